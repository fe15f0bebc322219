"""What the cache's own book-keeping costs: microseconds of one core per block, without a model and without bytes.

    python -m engine.evaluate.manager_cost

    cold    a prompt that nobody knows comes into an empty cache: match, admit, allocate and commit in chunks, free
    hit     the same prompt again, all of it found
    evict   a prompt that nobody knows comes into a cache that is full of others: each block takes an older one's place
    decode  one more token of a running request, per token

Each figure is the best of several rounds; garbage collection is on, as it is in a server.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv.manager import KVCacheManager
from engine.request import Namespace

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per block (``decode``: per token)."""

    cold: float
    hit: float
    evict: float
    decode: float


def measure(num_tokens: int = 12_000, num_rounds: int = 20) -> Cost:
    rng = random.Random(1)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    prompts = [[rng.randrange(50_000) for _ in range(num_tokens)] for _ in range(num_rounds)]
    full = KVCacheManager(3 * num_blocks, BLOCK_SIZE)
    for prompt in prompts[:3]:
        run(full, prompt)
    warm = KVCacheManager(3 * num_blocks, BLOCK_SIZE)
    run(warm, prompts[0])
    empty = [KVCacheManager(num_blocks, BLOCK_SIZE) for _ in prompts]
    return Cost(
        cold=_best([lambda m=m, p=p: run(m, p) for m, p in zip(empty, prompts, strict=True)]) / num_blocks,  # type: ignore[misc]
        hit=_best([lambda: run(warm, prompts[0])] * num_rounds) / num_blocks,
        evict=_best([lambda p=p: run(full, p) for p in prompts[3:]]) / num_blocks,  # type: ignore[misc]
        decode=_best([lambda p=p: decode(p) for p in prompts[:3]]) / num_tokens,  # type: ignore[misc]
    )


def run(manager: KVCacheManager, prompt: Sequence[int]) -> None:
    """A request's whole way: found as far as it is known, the rest taken and published chunk by chunk, given back."""
    match = manager.match_prefix(NAMESPACE, prompt)
    manager.admit("request", NAMESPACE, match)
    num_computed = match.num_tokens
    while num_computed < len(prompt):
        num_computed = min(len(prompt), num_computed + CHUNK_TOKENS)
        assert manager.allocate("request", num_computed)
        manager.take_copies()
        manager.finish_step()
        manager.commit("request", prompt, num_computed)
    manager.free("request")


def decode(tokens: Sequence[int]) -> None:
    """A request that grows from its first token, one token a step."""
    manager = KVCacheManager(-(-len(tokens) // BLOCK_SIZE), BLOCK_SIZE)
    manager.admit("request", NAMESPACE, manager.match_prefix(NAMESPACE, tokens[:1]))
    for length in range(1, len(tokens) + 1):
        assert manager.allocate("request", length)
        manager.commit("request", tokens, length)


def _best(rounds: Sequence[Callable[[], None]]) -> float:
    """Microseconds of the fastest round."""
    seconds = []
    for act in rounds:
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return 1e6 * min(seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12_000, help="length of each prompt")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    cost = measure(options.tokens, max(4, options.rounds))
    for name in ("cold", "hit", "evict"):
        print(f"{name:7} {getattr(cost, name):6.2f} us per block")
    print(f"decode  {cost.decode:6.2f} us per token")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
