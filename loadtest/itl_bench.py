"""What a long prompt does to streams that run: the gaps between their chunks without it, and while it is computed.

    python -m loadtest.itl_bench --serve "octavo serve smollm2-135m"
    python -m loadtest.itl_bench --serve "octavo serve smollm2-135m --max-num-batched-tokens 256" --streams 8

Three parts, each with prompts that no cache knows: the streams alone; the long prompt alone; the streams, and in their midst the
long prompt. Exit status: 0, or 1 if a request failed or the streams ended before the prompt was computed, or 2 without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console

from loadtest.bench import VOCAB_SIZE
from loadtest.client import CompletionRequest, Endpoint, complete
from loadtest.measure import percentile
from loadtest.server import ServerError, serving
from loadtest.stream import CompletionRecord, StreamError

STREAM_PROMPT_LEN = 64
LEAD_SHARE = 0.2
"""How much of the time that the streams take alone has passed when the long prompt is sent."""


class BenchError(Exception):
    """The measurement says nothing; one line says why."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Gaps in seconds, of all streams together: alone, and those that overlap the computing of the long prompt."""

    gaps_alone: tuple[float, ...]
    gaps_beside: tuple[float, ...]
    prompt_len: int
    ttft_alone: float
    ttft_beside: float


@dataclass(frozen=True, slots=True)
class ItlBench:
    endpoint: Endpoint
    num_streams: int
    output_len: int
    prompt_len: int

    async def run(self) -> Figures:
        await complete(self.endpoint, _request(STREAM_PROMPT_LEN, 8))  # the first request ever pays for what is loaded late
        alone = await self._streams()
        long_alone = await complete(self.endpoint, _request(self.prompt_len, 1))
        seconds = max(record.ended_at for record in alone) - min(record.sent_at for record in alone)
        beside, long_beside = await asyncio.gather(self._streams(), self._later(LEAD_SHARE * seconds))
        start, end = long_beside.sent_at, long_beside.arrivals[0]
        if min(record.ended_at for record in beside) < end:
            raise BenchError("a stream ended before the long prompt was computed; use a larger --output-len")
        return Figures(
            gaps_alone=tuple(gap for record in alone for gap in record.itl),
            gaps_beside=tuple(gap for record in beside for gap in gaps_between(record, start, end)),
            prompt_len=self.prompt_len,
            ttft_alone=long_alone.ttft,
            ttft_beside=long_beside.ttft,
        )

    async def _streams(self) -> list[CompletionRecord]:
        requests = [_request(STREAM_PROMPT_LEN, self.output_len) for _ in range(self.num_streams)]
        return list(await asyncio.gather(*(complete(self.endpoint, request) for request in requests)))

    async def _later(self, seconds: float) -> CompletionRecord:
        await asyncio.sleep(seconds)
        return await complete(self.endpoint, _request(self.prompt_len, 1))


def _request(prompt_len: int, max_tokens: int) -> CompletionRequest:
    rng = random.SystemRandom()
    return CompletionRequest(tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(prompt_len)), max_tokens)


def gaps_between(record: CompletionRecord, start: float, end: float) -> list[float]:
    """The gaps between the record's chunks that overlap the time from start to end."""
    return [later - earlier for earlier, later in pairwise(record.arrivals) if later > start and earlier < end]


def table(figures: Figures) -> str:
    lines = ["| streams | gaps | p50 | p99 | longest |", "|---|---|---|---|---|"]
    for name, gaps in (("alone", figures.gaps_alone), ("beside the long prompt", figures.gaps_beside)):
        values = (percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps))
        lines.append(f"| {name} | {len(gaps)} | {' | '.join(f'{1000 * value:,.0f} ms' for value in values)} |")
    ttfts = f"{figures.ttft_alone:.2f} s alone, {figures.ttft_beside:.2f} s beside the streams"
    return "\n".join([*lines, "", f"TTFT of the {figures.prompt_len:,} tokens: {ttfts}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", required=True, help="command that starts the server; --port is appended")
    parser.add_argument("--model", default="smollm2-135m", help="the model's name in the API")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--prompt-len", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--ready-timeout", type=float, default=300.0)
    options = parser.parse_args(arguments)
    try:
        with serving(options.serve, options.ready_timeout) as server, Console(stderr=True).status("measuring"):
            endpoint = Endpoint(server.url, options.model)
            figures = asyncio.run(ItlBench(endpoint, options.streams, options.output_len, options.prompt_len).run())
    except (ServerError, StreamError, BenchError) as error:
        print(f"itl_bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ServerError) else 1
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
