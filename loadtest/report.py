"""A Markdown table from one or more results of ``loadtest.bench``: one column for each run, ratios to a base.

    python -m loadtest.report ours.json other.json --base other

Reads the medians that the bench wrote and computes nothing from requests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = dict[str, Any]
"""What ``loadtest.bench`` writes; see RunResult there."""

FORMAT = 1


class ReportError(Exception):
    """A file that is no result, or a base that is not among them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: ``figure`` of ``scenario``, shown times ``scale``."""

    title: str
    scenario: str
    figure: str
    scale: float = 1.0


ROWS = (
    Row("1 stream: decode tok/s", "single", "decode_tok_s"),
    Row("1 stream: TTFT, 128 tokens, ms", "single", "ttft_mean_s", 1e3),
    Row("1 stream: ITL p50 ms", "single", "itl_p50_s", 1e3),
    Row("1 stream: ITL p99 ms", "single", "itl_p99_s", 1e3),
    Row("prefill 2,048: tok/s", "prefill2048", "prefill_tok_s"),
    Row("8 at once: output tok/s", "batch8", "output_tok_s"),
    Row("8 at once: TTFT mean ms", "batch8", "ttft_mean_s", 1e3),
    Row("16 at once: output tok/s", "batch16", "output_tok_s"),
    Row("16 at once: TTFT mean ms", "batch16", "ttft_mean_s", 1e3),
    Row("16 at once: ITL p50 ms", "batch16", "itl_p50_s", 1e3),
    Row("16 at once: ITL p99 ms", "batch16", "itl_p99_s", 1e3),
    Row("16 on one prefix, cold: total s", "prefix16", "total_s"),
    Row("16 on one prefix, cold: TTFT mean ms", "prefix16", "ttft_mean_s", 1e3),
    Row("16 on one prefix, warm: total s", "prefix16_warm", "total_s"),
    Row("16 on one prefix, warm: TTFT mean ms", "prefix16_warm", "ttft_mean_s", 1e3),
)


def markdown(
    runs: Sequence[Run], base: str | None = None, weight_bytes: float | None = None, cache_bytes: float | None = None
) -> str:
    """The table and its notes. ``weight_bytes``: what one decode step must read, to state decode as a share of the machine's
    reading speed; with ``cache_bytes``, all of the KV cache, which the scenarios must have filled, also to state what memory
    goes to neither. Rows that no run has are left out. Raises ReportError if there is no run labelled ``base``."""
    base_run = _find(runs, base) if base is not None else None
    lines = ["| | " + " | ".join(run["label"] for run in runs) + " |", "|---|" + "---:|" * len(runs)]
    for row in ROWS:
        cells = [_cell(run, row, base_run) for run in runs]
        if any(cells):
            lines.append(f"| {row.title} | " + " | ".join(cell or "-" for cell in cells) + " |")
    lines += _machine_rows(runs, weight_bytes, cache_bytes)
    notes = _notes(runs)
    return "\n".join([*lines, "", *notes] if notes else lines)


def _find(runs: Sequence[Run], label: str) -> Run:
    for run in runs:
        if run["label"] == label:
            return run
    raise ReportError(f"no run is labelled {label!r}; there are: {', '.join(run['label'] for run in runs)}")


def _value(run: Run, row: Row) -> float | None:
    figures = run["scenarios"].get(row.scenario, {}).get("summary", {}).get("figures") or {}
    value = figures.get(row.figure)
    return None if value is None else value * row.scale


def _cell(run: Run, row: Row, base: Run | None) -> str:
    value = _value(run, row)
    if value is None:
        return ""
    mark = "*" if run["scenarios"][row.scenario]["summary"]["is_disturbed"] else ""
    base_value = _value(base, row) if base is not None and base is not run else None
    return f"{_short(value)}{mark}" + (f" ({value / base_value:.2f}x)" if base_value else "")


def _machine_rows(runs: Sequence[Run], weight_bytes: float | None, cache_bytes: float | None) -> list[str]:
    """What belongs to the whole run: start, memory, and what the machine could do."""
    facts: list[tuple[str, list[float | None]]] = [
        ("ready in s", [run["ready_in_s"] for run in runs]),
        ("peak RSS MiB (sum of VmHWM)", [_scaled(run["memory"], "peak_rss", 2**-20) for run in runs]),
        ("PSS at the end MiB", [_scaled(run["memory"], "pss", 2**-20) for run in runs]),
        ("machine: memory read GB/s", [_scaled(run["ceilings"], "read_bytes_per_s", 1e-9) for run in runs]),
        ("machine: float32 matmul GFLOP/s", [_scaled(run["ceilings"], "matmul_flop_per_s", 1e-9) for run in runs]),
    ]
    if weight_bytes is not None:
        facts.append(("decode: share of the memory's reading speed", [_read_share(run, weight_bytes) for run in runs]))
    if weight_bytes is not None and cache_bytes is not None:
        known = weight_bytes + cache_bytes
        facts.append(("PSS beside weights and cache, MiB", [_pss_beside(run, known) for run in runs]))
    return [
        f"| {title} | " + " | ".join("-" if value is None else _short(value) for value in values) + " |"
        for title, values in facts
        if any(value is not None for value in values)
    ]


def _scaled(part: dict[str, Any] | None, key: str, scale: float) -> float | None:
    value = part[key] if part is not None else None
    return None if value is None else value * scale


def _pss_beside(run: Run, known_bytes: float) -> float | None:
    pss = _scaled(run["memory"], "pss", 1)
    return None if pss is None else (pss - known_bytes) / 2**20


def _read_share(run: Run, weight_bytes: float) -> float | None:
    decode = _value(run, Row("", "single", "decode_tok_s"))
    return None if decode is None else decode * weight_bytes / run["ceilings"]["read_bytes_per_s"]


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    for run in runs:
        for name, scenario in run["scenarios"].items():
            summary = scenario["summary"]
            if summary["num_invalid"]:
                problems = [problem for repetition in scenario["repetitions"] for problem in repetition["problems"]]
                notes.append(
                    f"- {run['label']}, {name}: {summary['num_invalid']} invalid repetitions do not count ({problems[0]})"
                )
            if summary["is_disturbed"]:
                notes.append(f"- \\* {run['label']}, {name}: other processes kept the machine busy in every repetition")
            elif summary["num_disturbed"]:
                notes.append(f"- {run['label']}, {name}: {summary['num_disturbed']} disturbed repetitions do not count")
        if run["ceilings"]["foreign_cores"] > run["max_foreign_cores"]:
            cores = run["ceilings"]["foreign_cores"]
            notes.append(f"- {run['label']}: {cores:.2f} cores were busy elsewhere while the machine's ceilings were measured")
    return notes


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def load(path: Path) -> Run:
    """Raises ReportError with one line."""
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ReportError(f"{path}: {exc}") from exc
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise ReportError(f"{path} is no result of loadtest.bench in format {FORMAT}")
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.report", description="A Markdown table from results of loadtest.bench."
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--base", help="label of the run that the others are compared with")
    parser.add_argument("--weight-bytes", type=float, help="bytes of weights that one decode step reads")
    parser.add_argument("--cache-bytes", type=float, help="bytes of the KV cache, which the scenarios have filled")
    options = parser.parse_args(arguments)
    try:
        runs = [load(path) for path in options.files]
        print(markdown(runs, options.base, options.weight_bytes, options.cache_bytes))
    except ReportError as exc:
        print(f"report: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
