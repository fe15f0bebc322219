"""SmolLM2 in float32 says the same, whether its prompt is computed or comes from host memory, from the disk, or after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import CacheConfig
from engine.llm import LLM, Completion
from engine.request import SamplingParams

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
BLOCK_BYTES = 737_280  # 16 tokens of 2 x 30 layers x 3 KV heads x 64 x float32
TEXTS = (
    "It was a bright cold day in April, and the clocks were striking thirteen. " * 4,
    "The quick brown fox jumps over the lazy dog while the band plays on. " * 4,
    "Take two cups of flour, one of sugar, a pinch of salt, and stir slowly. " * 4,
)


def make_llm(path: Path, *, num_blocks: int = 200, host_blocks: int = 0, disk: Path | None = None) -> LLM:
    cache = CacheConfig(
        memory_bytes=num_blocks * BLOCK_BYTES,
        host_bytes=host_blocks * BLOCK_BYTES,
        disk_path=str(disk) if disk is not None else None,
    )
    return LLM(str(path), cache=cache)


def ask(llm: LLM, number: int) -> Completion:
    completion = llm.generate([TEXTS[number]], GREEDY)[0]
    while llm.core.is_disk_busy:
        llm.core.wait_for_disk(1.0)
        llm.core.poll_disk()
    return completion


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> list[tuple[int, ...]]:
    llm = make_llm(smollm2_path)
    return [ask(llm, number).token_ids for number in range(len(TEXTS))]


def test_from_host_memory(smollm2_path: Path, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(smollm2_path, num_blocks=8, host_blocks=40)
    for number in (0, 1, 2, 0, 1, 2):
        answer = ask(llm, number)
        assert answer.token_ids == expected[number]
    assert answer.num_cached_tokens >= 48


def test_from_the_disk_and_after_a_restart(smollm2_path: Path, tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(smollm2_path, num_blocks=8, host_blocks=8, disk=tmp_path)
    for number in (0, 1, 2, 0, 1, 2):
        answer = ask(llm, number)
        assert answer.token_ids == expected[number]
    assert answer.num_cached_tokens >= 48
    llm.close()
    llm = make_llm(smollm2_path, num_blocks=8, host_blocks=8, disk=tmp_path)
    for number in range(len(TEXTS)):
        answer = ask(llm, number)
        assert answer.token_ids == expected[number]
        assert answer.num_cached_tokens >= 48, "the process that knew it is gone, its files are not"
    llm.close()
