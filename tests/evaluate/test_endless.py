"""The endless benchmark on a tiny model: every token is scored once, in buckets, within the places of a stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.evaluate.endless import main
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]


def test_it_reads_and_draws_in_constant_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "tiny", max_position_embeddings=128)
    (tmp_path / "text").write_text("Call me Ishmael. " * 40)
    options = ["--tokens", "150", "--bucket", "50", "--window", "32", "--text", str(tmp_path / "text")]
    assert main([*options, "--model", str(tmp_path / "tiny"), "--block-size", "8"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(bucket["start"], bucket["end"]) for bucket in results["read"]] == [(0, 50), (50, 100), (100, 150)]
    assert results["drawn"][-1]["end"] == 32 + 150 - 1
    for buckets in results.values():
        assert [bucket["num_blocks"] for bucket in buckets] == [5] * len(buckets), "32 + 8 tokens in blocks of 8"
        assert all(bucket["perplexity"] > 1 for bucket in buckets)
