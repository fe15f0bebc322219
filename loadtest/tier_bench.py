"""What a tier is worth: the time to the first token of one prompt, computed, and found on the device, in host memory, on the disk.

    python -m loadtest.tier_bench --serve "octavo serve smollm2-135m" --kv-bytes-per-token 46080

Starts the server twice over one folder, with a device cache that holds one prompt and a host cache that holds one and what is being
written to the disk. Other prompts push the first one down: one, out of the device; three, out of host memory too (the one that takes
its place on the device, and two that pass through host memory). Then the server is stopped and started again.
Exit status: 0, or 1 if a request failed or found another number of cached tokens than its row says, or 2 without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench import VOCAB_SIZE
from loadtest.client import CompletionRequest, Endpoint, complete
from loadtest.server import ServerError, serving
from loadtest.stream import StreamError

BLOCK = 16
HOST_SLACK_BLOCKS = 16  # a write to the disk keeps its slot, and a few are under way
SETTLE_S = 1.0  # for the disk thread to write what has been pushed into host memory
ROWS = ("cold", "device", "host", "disk", "restart")


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed request. ``cached_tokens`` None: the server does not say."""

    ttft_s: float
    cached_tokens: int | None


class TierBench:
    """One repetition after another; each has a prompt of its own, which no cache knows."""

    def __init__(self, command: str, model: str, prompt_len: int, bytes_per_token: int, ready_timeout_s: float) -> None:
        self._model = model
        self._prompt_len = prompt_len
        self._ready_timeout_s = ready_timeout_s
        num_blocks = -(-(prompt_len + 2) // BLOCK)
        self._device_bytes = (num_blocks + 2) * BLOCK * bytes_per_token
        self._command = (
            f"{command} --block-size {BLOCK} --max-model-len {prompt_len + 8} --kv-cache-memory {self._device_bytes}"
            f" --host-cache {self._device_bytes + HOST_SLACK_BLOCKS * BLOCK * bytes_per_token}"
        )

    def run(self, num_repetitions: int, folder: Path) -> dict[str, list[Sample]]:
        """The samples of each row."""
        rows: dict[str, list[Sample]] = {name: [] for name in ROWS}
        command = f"{self._command} --disk-cache {folder} --disk-cache-size {100 * self._device_bytes}"
        prompts = [self._prompt() for _ in range(num_repetitions)]
        with serving(command, self._ready_timeout_s) as server:
            ask = self._asker(server.url)
            ask(self._prompt())  # the first long prompt ever pays for what is compiled and loaded late
            for prompt in prompts:
                for name, num_pushed in (("cold", 0), ("device", 0), ("host", 1), ("disk", 3)):
                    self._push(ask, num_pushed)
                    self._note(rows, name, ask(prompt))
        with serving(command, self._ready_timeout_s) as server:
            ask = self._asker(server.url)
            ask(self._prompt())
            for prompt in prompts:
                self._note(rows, "restart", ask(prompt))
        return rows

    def _note(self, rows: dict[str, list[Sample]], name: str, sample: Sample) -> None:
        rows[name].append(sample)
        print(f"{name}: {1000 * sample.ttft_s:,.0f} ms, {sample.cached_tokens} cached", file=sys.stderr, flush=True)

    def _prompt(self, length: int | None = None) -> tuple[int, ...]:
        rng = random.SystemRandom()
        return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length or self._prompt_len))

    def _push(self, ask: Callable[[tuple[int, ...]], Sample], count: int) -> None:
        for _ in range(count):
            ask(self._prompt())
            time.sleep(SETTLE_S)

    def _asker(self, url: str) -> Callable[[tuple[int, ...]], Sample]:
        endpoint = Endpoint(url, self._model)

        def ask(prompt: tuple[int, ...]) -> Sample:
            record = asyncio.run(complete(endpoint, CompletionRequest(prompt, 2)))
            return Sample(record.ttft, record.usage.cached_tokens)

        return ask


def is_as_named(name: str, sample: Sample, prompt_len: int) -> bool:
    """Whether the request found what its row says: nothing, or all full blocks but the last token's."""
    if sample.cached_tokens is None:
        return True
    if name == "cold":
        return sample.cached_tokens == 0
    return sample.cached_tokens >= (prompt_len - 1) // BLOCK * BLOCK


def table(rows: dict[str, list[Sample]]) -> str:
    cold = statistics.median(sample.ttft_s for sample in rows["cold"])
    lines = ["| found | TTFT, median | fastest | slowest | cold / this | cached tokens |", "|---|---|---|---|---|---|"]
    for name, samples in rows.items():
        times = [sample.ttft_s for sample in samples]
        median = statistics.median(times)
        cached = samples[0].cached_tokens
        figures = " | ".join(f"{1000 * seconds:,.0f} ms" for seconds in (median, min(times), max(times)))
        lines.append(f"| {name} | {figures} | {cold / median:.1f} | {cached} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", required=True, help="command that starts the server; cache flags and --port are appended")
    parser.add_argument("--model", default="smollm2-135m", help="the model's name in the API")
    parser.add_argument("--kv-bytes-per-token", type=int, required=True, help="octavo prints it at its start")
    parser.add_argument("--prompt-len", type=int, default=2000)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--ready-timeout", type=float, default=300.0)
    options = parser.parse_args(arguments)
    bench = TierBench(options.serve, options.model, options.prompt_len, options.kv_bytes_per_token, options.ready_timeout)
    try:
        with tempfile.TemporaryDirectory(prefix="tier-bench-") as folder:
            rows = bench.run(options.reps, Path(folder))
    except (ServerError, StreamError) as error:
        print(f"tier_bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ServerError) else 1
    print(table(rows))
    wrong = [name for name, samples in rows.items() for s in samples if not is_as_named(name, s, options.prompt_len)]
    if wrong:
        print(f"tier_bench: not what the rows say: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
