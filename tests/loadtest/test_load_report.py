"""The table: ratios, marks, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.report import FORMAT, ReportError, load, main, markdown


def run(label: str, decode: float | None, *, disturbed: int = 0, counted: int = 3, invalid: int = 0) -> dict[str, Any]:
    summary = {
        "figures": None if decode is None else {"decode_tok_s": decode, "ttft_mean_s": 0.25},
        "num_counted": counted,
        "num_disturbed": disturbed,
        "num_invalid": invalid,
        "is_disturbed": counted == disturbed > 0,
    }
    repetitions = [{"problems": ["request 0: cut: gone"] if invalid else []}]
    return {
        "format": FORMAT,
        "max_foreign_cores": 0.15,
        "label": label,
        "ready_in_s": 6.5,
        "ceilings": {"num_threads": 2, "read_bytes_per_s": 20e9, "matmul_flop_per_s": 1.5e11, "foreign_cores": 0.0},
        "scenarios": {"single": {"summary": summary, "repetitions": repetitions}},
        "memory": {"peak_rss": 900 << 20, "pss": None},
    }


def test_ratios_are_to_the_base() -> None:
    lines = markdown([run("ours", 44.0), run("other", 22.0)], base="other").splitlines()
    assert lines[0] == "| | ours | other |"
    assert "| 1 stream: decode tok/s | 44 (2.00x) | 22 |" in lines
    assert "| 1 stream: TTFT, 128 tokens, ms | 250 (1.00x) | 250 |" in lines


def test_the_machine_is_in_the_table_and_rows_without_a_figure_are_not() -> None:
    text = markdown([run("ours", 30.0)], weight_bytes=5e8)
    assert "| ready in s | 6.5 |" in text
    assert "| peak RSS MiB (sum of VmHWM) | 900 |" in text
    assert "| machine: memory read GB/s | 20 |" in text
    assert "| decode: share of the memory's reading speed | 0.75 |" in text
    assert "PSS" not in text
    assert "16 at once" not in text


def test_memory_beside_weights_and_cache() -> None:
    known = run("ours", 30.0) | {"memory": {"peak_rss": 950 << 20, "pss": 900 << 20}}
    text = markdown([known], weight_bytes=300 << 20, cache_bytes=200 << 20)
    assert "| PSS beside weights and cache, MiB | 400 |" in text
    assert "beside weights" not in markdown([run("ours", 30.0)], weight_bytes=300 << 20)


def test_disturbed_and_invalid_repetitions_are_told() -> None:
    assert "| 1 stream: decode tok/s | 30* |" in markdown([run("ours", 30.0, disturbed=3)])
    assert "1 disturbed repetitions do not count" in markdown([run("ours", 30.0, disturbed=1, counted=2)])
    text = markdown([run("ours", None, counted=0, invalid=3)])
    assert "3 invalid repetitions do not count (request 0: cut: gone)" in text
    assert "decode tok/s" not in text


def test_files_in_table_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(run("ours", 44.0)))
    assert main([str(path)]) == 0
    assert "| 1 stream: decode tok/s | 44 |" in capsys.readouterr().out


def test_what_is_no_result_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"format": 99}')
    with pytest.raises(ReportError, match="format 1"):
        load(other)
    assert main([str(tmp_path / "missing.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ReportError, match="there are: ours"):
        markdown([run("ours", 1.0)], base="theirs")
