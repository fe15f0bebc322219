"""SmolLM2 in float32 says the same, whether its prompt is computed or comes from host memory, from the disk, or after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import CacheConfig
from engine.core import StepOutput
from engine.llm import LLM
from engine.request import SamplingParams
from engine.stats import Admission

pytestmark = pytest.mark.all_cores

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
BLOCK_BYTES = 737_280  # 16 tokens of 2 x 30 layers x 3 KV heads x 64 x float32
TEXTS = (
    "It was a bright cold day in April, and the clocks were striking thirteen. " * 4,
    "The quick brown fox jumps over the lazy dog while the band plays on. " * 4,
    "Take two cups of flour, one of sugar, a pinch of salt, and stir slowly. " * 4,
)


class Asked:
    """An LLM of few blocks, and what its admissions said."""

    def __init__(self, path: Path, **cache: object) -> None:
        self.llm = LLM(str(path), cache=CacheConfig(**cache))  # type: ignore[arg-type]
        self.admissions: list[Admission] = []
        self._step = self.llm.core.step
        self.llm.core.step = self._recorded_step  # type: ignore[method-assign]

    def _recorded_step(self) -> StepOutput:
        output = self._step()
        self.admissions.extend(output.admissions)
        return output

    def ask(self, number: int) -> tuple[int, ...]:
        """The answer's tokens; the disk has come to rest by then."""
        tokens = self.llm.generate([TEXTS[number]], GREEDY)[0].token_ids
        while self.llm.core.is_disk_busy:
            self.llm.core.wait_for_disk(1.0)
            self.llm.core.poll_disk()
        return tokens


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> list[tuple[int, ...]]:
    plain = Asked(smollm2_path, memory_bytes=100 * BLOCK_BYTES)
    return [plain.ask(number) for number in range(len(TEXTS))]


def test_from_host_memory_from_the_disk_and_after_a_restart(
    smollm2_path: Path, tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    cache = {"memory_bytes": 8 * BLOCK_BYTES, "host_bytes": 8 * BLOCK_BYTES, "disk_path": str(tmp_path)}
    first = Asked(smollm2_path, **cache)
    for number in (0, 1, 0, 2, 1, 0):
        assert first.ask(number) == expected[number]
    assert any(admission.sources.host >= 16 for admission in first.admissions)
    assert any(admission.sources.disk >= 16 for admission in first.admissions)
    first.llm.close()
    again = Asked(smollm2_path, **cache)
    for number in range(len(TEXTS)):
        assert again.ask(number) == expected[number]
        assert again.admissions[-1].sources.disk >= 48, "the process that knew it is gone, its files are not"
    again.llm.close()
