"""``python -m engine.evaluate.endless``: does an endless request stay as good as it began, in constant memory?

Two streams through the real scheduler and cache, each in buckets of tokens: the perplexity of a text that is read (Moby Dick), and that
of tokens that the model draws itself at temperature 1, by its own probabilities; and the most blocks that were held.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from engine.config import CacheConfig, EngineConfig
from engine.core import EngineCore
from engine.errors import OctavoError
from engine.evaluate.texts import moby_dick
from engine.load import LoadedEngine, load_engine
from engine.model.hub import resolve
from engine.request import Request, SamplingParams
from engine.runner.model_runner import ModelRunner
from engine.runner.sampler import sample
from engine.sched.plan import SampledTokens, StepPlan
from engine.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tokens [start, end) of a stream. ``num_blocks`` is the most that it held up to there."""

    start: int
    end: int
    perplexity: float
    num_blocks: int


class ScoringRunner:
    """Runs one request alone, and keeps the negative log-probability of each of its tokens but the first of the prompt.

    ``text`` is what the prompt holds; tokens behind it are drawn.
    """

    def __init__(self, runner: ModelRunner, text: Sequence[int]) -> None:
        self.nll: list[float] = []
        self.num_blocks = 0  # the most that a step used
        self._runner = runner
        self._text = text

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> SampledTokens:
        (sequence,) = plan.sequences
        self.num_blocks = max(self.num_blocks, len(sequence.block_table))
        log_p = self._runner.score(plan).float().log_softmax(-1)
        read = self._text[len(self.nll) + 1 : len(self.nll) + 1 + len(log_p)]
        self._note(log_p[: len(read)], read)
        if sequence.sample is None:
            return SampledTokens((None,))
        (drawn,) = sample(log_p[-1:].clone(), (sequence.sample,))
        assert drawn.token_id is not None, drawn.error
        self._note(log_p[-1:], [drawn.token_id])
        return SampledTokens((drawn,))

    def _note(self, log_p: torch.Tensor, tokens: Sequence[int]) -> None:
        self.nll.extend((-log_p.gather(1, torch.tensor(tokens, dtype=torch.long)[:, None])).squeeze(1).tolist())


def stream(
    engine: LoadedEngine, text: Sequence[int], num_drawn: int, bucket: int, on_tokens: Callable[[int], None]
) -> list[Bucket]:
    """Read the text, then draw ``num_drawn`` tokens. ``on_tokens`` hears how many tokens have been scored since the last call."""
    runner = ScoringRunner(engine.runner, text)
    core = EngineCore(engine.core.scheduler, runner, block_bytes=engine.info.block_bytes, clock=time.monotonic)
    sampling = SamplingParams(temperature=1.0, max_tokens=num_drawn, ignore_eos=True, seed=0)
    assert core.add(Request("endless", tuple(text), sampling, seed=0)) is None
    buckets: list[Bucket] = []
    while core.has_work:
        before = len(runner.nll)
        core.step()
        on_tokens(len(runner.nll) - before)
        start = bucket * len(buckets)
        while len(runner.nll) >= start + bucket or (start < len(runner.nll) and not core.has_work):
            part = runner.nll[start : start + bucket]
            buckets.append(Bucket(start, start + len(part), math.exp(sum(part) / len(part)), runner.num_blocks))
            start += bucket
    return buckets


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        results = run(options)
    except OctavoError as error:
        print(f"endless: error: {error}", file=sys.stderr)
        return 2
    print(table(results))
    print()
    print(json.dumps({name: [asdict(bucket) for bucket in buckets] for name, buckets in results.items()}))
    return 0


def run(options: argparse.Namespace) -> dict[str, list[Bucket]]:
    model = resolve(options.model, progress=lambda done, total: None)
    book = options.text.read_text(encoding="utf-8") if options.text is not None else moby_dick()
    text = load_tokenizer(model.path).encode(book[: 16 * options.tokens])[: options.tokens]
    config = EngineConfig(
        model_path=str(model.path),
        model_name=model.name,
        attention_sinks=options.attention_sinks,
        window=options.window,
        cache=CacheConfig(block_size=options.block_size),
    )
    engine = load_engine(config)
    for note in engine.info.notes:
        print(note, file=sys.stderr)
    jobs = {"read": (text, 1), "drawn": (text[:32], options.tokens)}
    results = {}
    with Progress(console=Console(stderr=True)) as bar:
        for name in options.what.split(","):
            prompt, num_drawn = jobs[name]
            task = bar.add_task(f"{len(prompt) + num_drawn:,} tokens, {name}", total=len(prompt) + num_drawn - 1)
            results[name] = stream(engine, prompt, num_drawn, options.bucket, lambda n, task=task: bar.advance(task, n))  # type: ignore[misc]
    return results


def table(results: dict[str, list[Bucket]]) -> str:
    lines = ["| tokens | " + " | ".join(f"{name}: perplexity | blocks held" for name in results) + " |"]
    lines.append("|---|" + "---|---|" * len(results))
    for row in range(max(map(len, results.values()))):
        cells = [buckets[row] if row < len(buckets) else None for buckets in results.values()]
        first = next(cell for cell in cells if cell is not None)
        values = (f"{cell.perplexity:.2f} | {cell.num_blocks}" if cell is not None else " | " for cell in cells)
        lines.append(f"| {first.start:,} to {first.end:,} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="endless", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="as for octavo serve")
    parser.add_argument("--what", default="read,drawn", help="read, drawn, or both, comma-separated")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--bucket", type=int, default=2_000)
    parser.add_argument("--attention-sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=1_024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--text", type=Path, help="a UTF-8 file in place of Moby Dick")
    return parser


if __name__ == "__main__":
    sys.exit(main())
