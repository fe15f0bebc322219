"""The long-context study against transformers' own numbers, and what it leaves in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from engine.errors import ConfigError, UnsupportedModelError
from engine.evaluate.longcontext import REPORT, Study, StudyOptions, longcontext
from engine.evaluate.rope_study import NUM_BUCKETS, NUM_KEYS, Reader, passkey_prompt, scalings
from engine.model.weights import open_checkpoint
from engine.tokenizer import load_tokenizer
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]

TRAINED = 256
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make_folder(folder, max_position_embeddings=TRAINED, attention_gain=10.0).float()


@pytest.fixture
def options(tiny: tuple[Path, Any], tmp_path: Path) -> StudyOptions:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (7 * i + i * i // 5) % 26) for i in range(1500)))
    return StudyOptions(
        model=str(tiny[0]), out=tmp_path / "out", multiples=(1, 2), tokens=1024, passkeys=1, depths=(0.0, 1.0), text=text
    )


def ignore(count: int) -> None:
    """A progress bar that is not there."""


def test_perplexity_is_transformers_own_and_every_scaling_changes_it(tiny: tuple[Path, Any]) -> None:
    path, model = tiny
    windows = [[2 + (11 * i + 5 * i * i + shift) % 250 for i in range(2 * TRAINED)] for shift in (0, 3)]
    rows = {row.name: row.classes[2] for row in scalings(open_checkpoint(path).config, (1, 2))}
    reader = Reader(path, list(dict.fromkeys(rows.values())), 2 * TRAINED, chunk=100)
    cells = {name: reader.perplexity(rope_class, windows, ignore) for name, rope_class in rows.items()}
    with torch.no_grad():
        logits = model(torch.tensor(windows)).logits
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), torch.tensor(windows)[:, 1:], reduction="none")
    none = cells["none"]
    assert none.num_tokens == nll.numel()
    assert none.nll == pytest.approx(nll.mean().item(), abs=1e-5)
    last = 2 * TRAINED // NUM_BUCKETS
    assert none.by_position[-1] == pytest.approx(nll[:, -last:].mean().item(), abs=1e-4)
    assert none.by_position[0] == pytest.approx(nll[:, : last - 1].mean().item(), abs=1e-4)
    assert cells["YaRN x 2"] == cells["ladder (YaRN)"]
    assert cells["NTK x 2"].nll == pytest.approx(cells["dynamic NTK"].nll, abs=1e-6)
    assert len({round(cell.nll, 5) for cell in cells.values()}) == 4


def test_within_the_trained_length_only_what_does_not_look_at_it_differs(tiny: tuple[Path, Any]) -> None:
    rows = {row.name: row.classes[1].rope.rope_type for row in scalings(open_checkpoint(tiny[0]).config, (1, 2))}
    assert [name for name, rope_type in rows.items() if rope_type != "default"] == ["linear x 2", "NTK x 2", "YaRN x 2"]


@pytest.mark.parametrize("depth", [0.0, 0.5])
def test_the_rank_of_a_key_is_transformers_own(tiny: tuple[Path, Any], depth: float) -> None:
    path, model = tiny
    row = scalings(open_checkpoint(path).config, (1, 2))[0]
    reader = Reader(path, [row.classes[2]], 2 * TRAINED, chunk=50)
    prompt, keys = passkey_prompt(load_tokenizer(path), 2 * TRAINED, depth, seed=3)
    assert len(keys) == NUM_KEYS == len({tuple(key) for key in keys})
    assert 2 * TRAINED - 100 < len(prompt) + len(keys[0]) <= 2 * TRAINED
    with torch.no_grad():
        log_p = model(torch.tensor([[*prompt, *key] for key in keys])).logits.log_softmax(-1)
    at = torch.arange(len(prompt) - 1, len(prompt) + len(keys[0]) - 1)
    scores = [sum(row[i, token].item() for i, token in zip(at, key, strict=True)) for row, key in zip(log_p, keys, strict=True)]
    expected = 1 + sum(score > scores[0] for score in scores[1:])
    assert reader.passkey_rank(row.classes[2], prompt, keys, ignore) == expected
    text = load_tokenizer(path).decode(prompt)
    hidden = load_tokenizer(path).decode(keys[0]).strip()
    assert f"The pass key is {hidden}. Remember it." in text


def test_a_study_writes_its_report_and_goes_on_where_it_was_cut(options: StudyOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Reader, "perplexity", counted(calls, "perplexity", Reader.perplexity, fail_at=4))
    monkeypatch.setattr(Reader, "passkey_rank", counted(calls, "passkey", Reader.passkey_rank))
    with pytest.raises(KeyboardInterrupt):
        longcontext(options, QUIET)
    assert len(json.loads((options.out / REPORT).read_text())["cells"]) == 3
    text = longcontext(options, QUIET)
    cells = json.loads((options.out / REPORT).read_text())["cells"]
    num_perplexity = sum(key.startswith("perplexity") for key in cells)
    assert calls.count("perplexity") == num_perplexity + 1, "the one that was cut, and no finished one twice"
    assert calls.count("passkey") == len(cells) - num_perplexity == 2 * num_perplexity
    assert (options.out / "report.md").read_text() == text
    assert f"| none | {math.exp(cells['perplexity default 256']['nll']):.2f} |" in text
    assert text.count("| ladder (YaRN) |") == 2
    for name in ("perplexity.png", "passkey.png"):
        assert (options.out / name).read_bytes().startswith(b"\x89PNG")
    assert longcontext(options, QUIET) == text
    assert calls.count("perplexity") == num_perplexity + 1


def counted(calls: list[str], name: str, method: Callable[..., Any], fail_at: int | None = None) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        return method(*arguments)

    return call


def test_what_cannot_be_studied_is_refused(options: StudyOptions, tmp_path: Path) -> None:
    longer = StudyOptions(model=options.model, out=options.out, multiples=(8,), tokens=1024, text=options.text)
    with pytest.raises(ConfigError, match="1,024 tokens"):
        longcontext(longer, QUIET)
    Study(options)._save()
    with pytest.raises(ConfigError, match="other settings"):
        Study(longer)
    make_folder(tmp_path / "scaled", rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="linear"):
        scalings(open_checkpoint(tmp_path / "scaled").config, (1, 2))
