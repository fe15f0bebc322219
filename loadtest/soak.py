"""Many short requests, of which a part hang up at random moments: does the server give everything back, and do its counters add up?

    python -m loadtest.soak --serve "octavo serve smollm2-135m --kv-cache-memory 64MiB" --requests 10000

Then a calm part without hang-ups, over which the counters must agree with the client's own to the token. Reads Octavo's metrics.
Exit status: 0, or 1 if something does not hold, or 2 without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loadtest.bench import VOCAB_SIZE
from loadtest.client import CompletionRequest, Endpoint, completion_body, post
from loadtest.metrics import Metrics, read_metrics
from loadtest.proc import process_tree, resident_bytes
from loadtest.server import ServerError, ServerUnderTest, serving
from loadtest.soak_checks import Check, Memory, Tally, counter_checks, memory_check, table
from loadtest.stream import StreamError, StreamFold, Usage

NUM_CALM = 100
SAMPLE_S = 0.5
IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """``hang_up_s`` None: wait for the whole answer."""

    request: CompletionRequest
    is_streaming: bool
    hang_up_s: float | None


class Traffic:
    """Prompts of 8 to 40 tokens over a few shared beginnings, up to 6 tokens each, some streamed, some to be hung up on.

    The moment is drawn over the time that an answer takes, as measured by now; who is answered before is no hang-up. More are
    meant to hang up until the share of those who did is reached.
    """

    def __init__(self, seed: int, hang_up_share: float) -> None:
        self._rng = random.Random(seed)
        self._share = hang_up_share
        self._stems = [self._ids(28) for _ in range(8)]

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(3, VOCAB_SIZE) for _ in range(count))

    def next(self, tally: Tally) -> Ask:
        rng = self._rng
        prompt = rng.choice(self._stems)[: rng.randint(4, 28)] + self._ids(rng.randint(4, 12))
        is_wanted = tally.num_hung_up <= self._share * tally.num_ended and rng.random() < min(1.0, 2 * self._share)
        hang_up_s = rng.uniform(0, 1.2 * tally.answer_s) if is_wanted else None
        return Ask(CompletionRequest(prompt, rng.randint(1, 6)), rng.random() < 0.5, hang_up_s)


@dataclass(slots=True)
class Soak:
    """Runs requests against one server and keeps the client's side of the books."""

    endpoint: Endpoint
    traffic: Traffic
    concurrency: int
    tally: Tally = field(default_factory=Tally)

    async def run(self, count: int, progress: Progress, *, hang_up: bool) -> None:
        task = progress.add_task("with hang-ups" if hang_up else "calm", total=count)
        asks = iter(range(count))

        async def worker() -> None:
            for _ in asks:
                ask = self.traffic.next(self.tally)
                await self._send(ask if hang_up else Ask(ask.request, ask.is_streaming, None))
                progress.advance(task)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(worker())

    async def _send(self, ask: Ask) -> None:
        start = time.perf_counter()
        self.tally.sent(len(ask.request.prompt))
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(ask.hang_up_s if ask.hang_up_s is not None else self.endpoint.timeout_s):
                usage = await self._answer(ask, pieces)
        except TimeoutError:
            if ask.hang_up_s is None:
                self.tally.failed(f"no answer within {self.endpoint.timeout_s:g} s")
            else:
                self.tally.hung_up(has_begun=bool(pieces))
        except (StreamError, ConnectionError, asyncio.IncompleteReadError) as error:
            self.tally.failed(str(error))
        else:
            self.tally.answered(usage, ask.request.max_tokens, time.perf_counter() - start)

    async def _answer(self, ask: Ask, pieces: list[bytes]) -> Usage:
        async with aclosing(post(self.endpoint, self._body(ask))) as body:
            async for piece in body:
                pieces.append(piece)
        if not ask.is_streaming:
            usage = json.loads(b"".join(pieces))["usage"]
            return Usage(usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
        fold = StreamFold(0.0)
        for piece in pieces:
            fold.feed(piece, 0.0)
        return fold.finish(0.0).usage

    def _body(self, ask: Ask) -> Mapping[str, Any]:
        body = completion_body(self.endpoint.model, ask.request)
        return body if ask.is_streaming else {k: v for k, v in body.items() if k not in ("stream", "stream_options")}


def largest_child(pid: int) -> int:
    """The engine: beside it there may be helpers of the runtime."""
    return max(process_tree(pid)[1:], key=lambda child: resident_bytes(child) or 0)


async def watch(memories: Mapping[str, Memory], pids: Mapping[str, int], tally: Tally) -> None:
    """Sample until cancelled."""
    while True:
        for name, pid in pids.items():
            if (size := resident_bytes(pid)) is not None:
                memories[name].samples.append((tally.num_ended, size))
        await asyncio.sleep(SAMPLE_S)


async def idle(url: str) -> Metrics:
    """The metrics once nothing runs, or as they are when it does not come to that."""
    deadline = time.perf_counter() + IDLE_S
    while True:
        metrics = await asyncio.to_thread(read_metrics, url)
        is_idle = metrics["octavo_requests_running"] == metrics["octavo_requests_waiting"] == 0
        if is_idle or time.perf_counter() > deadline:
            return metrics
        await asyncio.sleep(0.1)


async def soak(server: ServerUnderTest, options: argparse.Namespace, console: Console) -> list[Check]:
    endpoint = Endpoint(server.url, options.model, timeout_s=120.0)
    run = Soak(endpoint, Traffic(options.seed, options.hang_ups), options.concurrency)
    assert server.pid is not None
    pids = {"server": server.pid, "engine": largest_child(server.pid)}
    memories = {name: Memory(name) for name in pids}
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*bar, console=console) as progress:
        start = await idle(server.url)
        watcher = asyncio.create_task(watch(memories, pids, run.tally))
        await run.run(options.requests, progress, hang_up=True)
        stormy, storm = run.tally, await idle(server.url)
        run.tally = Tally(answer_s=stormy.answer_s)
        await run.run(NUM_CALM, progress, hang_up=False)
        calm = await idle(server.url)
        watcher.cancel()
    checks = counter_checks(stormy, storm.since(start), storm, run.tally, calm.since(storm), calm)
    return [*checks, *(memory_check(memory, options.requests) for memory in memories.values())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", required=True, help="command that starts the server; --port is appended")
    parser.add_argument("--model", default="smollm2-135m", help="the model's name in the API")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--hang-ups", type=float, default=0.3, help="share of the requests that are given up half-way")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ready-timeout", type=float, default=300.0)
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        with serving(options.serve, options.ready_timeout) as server:
            checks = asyncio.run(soak(server, options, console))
    except ServerError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    print(table(checks))
    failed = [check.name for check in checks if not check.holds]
    if failed:
        print(f"soak: does not hold: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
