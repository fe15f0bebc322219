"""``python -m engine.evaluate.kv_speed``: how long a decode step takes over each KV format, all formats in one run, turn about."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from engine.config import KV_DTYPES
from engine.errors import OctavoError
from engine.evaluate.quality import Reader, open_readers
from engine.model.hub import resolve
from engine.model.weights import open_checkpoint
from engine.sched.plan import StepPlan


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    contexts = [int(context) for context in options.contexts.split(",")]
    try:
        checkpoint = open_checkpoint(resolve(options.model, progress=lambda done, total: None).path)
        readers = open_readers(checkpoint, options.formats.split(","), max(contexts) + 1, 16, "auto", options.sequences)
    except OctavoError as error:
        print(f"kv_speed: error: {error}", file=sys.stderr)
        return 2
    print(f"| ms a step, {options.sequences} sequences of | " + " | ".join(reader.format.dtype for reader in readers) + " |")
    print("|---" * (len(readers) + 1) + "|")
    for reader in readers:
        reader.fill()
    for context in contexts:
        times = time_steps(readers, context, options.sequences, options.reps)
        cells = [f"{ms:.1f} ({ms / times[0]:.2f} x)" for ms in times]
        print(f"| {context:,} tokens | " + " | ".join(cells) + " |", flush=True)
    return 0


def time_steps(readers: Sequence[Reader], context: int, num_sequences: int, reps: int) -> list[float]:
    """Milliseconds of a decode step behind ``context`` tokens, for each reader the median of ``reps``; the first step does not count."""
    times: list[list[float]] = [[] for _ in readers]
    for _ in range(reps + 1):
        for reader, own in zip(readers, times, strict=True):
            plan = StepPlan(tuple(reader.sequence((7,), context, index) for index in range(num_sequences)))
            start = time.perf_counter()
            reader.runner.score(plan)
            own.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(own[1:]) for own in times]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kv_speed", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="as for octavo serve")
    parser.add_argument("--formats", default=",".join(KV_DTYPES), help="comma-separated; ratios are to the first")
    parser.add_argument(
        "--contexts", default="512,2048,4096,8000", help="tokens before the one that is decoded, comma-separated"
    )
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--reps", type=int, default=9)
    return parser


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
