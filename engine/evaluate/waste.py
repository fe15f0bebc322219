"""How much of the blocks in use holds no token, by block size: counted by the cache manager, whatever the model.

    python -m engine.evaluate.waste

Requests that share nothing, so that every one has a last block of its own: the worst for waste. Knows no bytes and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.manager import KVCacheManager
from engine.request import PUBLIC_NAMESPACE

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
CHAT_LEN = 450
PROMPT_LEN = 12_000


@dataclass(frozen=True, slots=True)
class Waste:
    """Empty slots over all slots of the blocks in use. ``mean``: one request of each length around the named one, as many tokens
    up and down as half a block; ``worst``: one request of the length near it that has one token in its last block."""

    mean: float
    worst: float


def internal_waste(block_size: int, seq_lens: Sequence[int]) -> float:
    """The share of empty slots while requests of these lengths run at once."""
    num_blocks = sum(-(-length // block_size) for length in seq_lens)
    manager = KVCacheManager(num_blocks, block_size)
    for number, length in enumerate(seq_lens):
        request_id, tokens = str(number), (number, *range(length - 1))
        manager.admit(request_id, PUBLIC_NAMESPACE, manager.match_prefix(PUBLIC_NAMESPACE, tokens[:1]))
        allocated = manager.allocate(request_id, length)
        assert allocated, "the pool was made for these lengths"
        manager.commit(request_id, tokens, length)
    num_slots = manager.num_referenced_blocks * block_size
    return 1 - manager.num_filled_slots / num_slots


def waste(block_size: int, seq_len: int) -> Waste:
    start = seq_len - block_size // 2
    mean = internal_waste(block_size, range(start, start + block_size))
    return Waste(mean, internal_waste(block_size, [seq_len // block_size * block_size + 1]))


def table() -> str:
    lines = [
        f"| block size | {CHAT_LEN}-token chats, mean | worst length | {PROMPT_LEN:,}-token prompts, mean | worst length |",
        "|---|---|---|---|---|",
    ]
    for block_size in BLOCK_SIZES:
        chat, prompt = waste(block_size, CHAT_LEN), waste(block_size, PROMPT_LEN)
        figures = (chat.mean, chat.worst, prompt.mean, prompt.worst)
        lines.append(f"| {block_size} | {' | '.join(f'{figure:.2%}' for figure in figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
