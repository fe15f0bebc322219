from __future__ import annotations

import pytest

from engine.evaluate.waste import BLOCK_SIZES, CHAT_LEN, PROMPT_LEN, internal_waste, table, waste


def test_blocks_of_16_waste_below_2_percent_of_chats_and_a_thousandth_of_long_prompts_on_average() -> None:
    assert 0 < waste(16, CHAT_LEN).mean < 0.02
    assert 0 < waste(16, PROMPT_LEN).mean < 0.001


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_what_the_manager_counts_is_what_a_plain_sum_gives(block_size: int) -> None:
    lengths = [1, 7, 16, 450, 451, 1000]
    slots = sum(-(-length // block_size) * block_size for length in lengths)
    assert internal_waste(block_size, lengths) == pytest.approx(1 - sum(lengths) / slots)
    worst = waste(block_size, CHAT_LEN).worst
    assert worst == pytest.approx((block_size - 1) / ((CHAT_LEN // block_size + 1) * block_size))
    assert worst > waste(block_size, CHAT_LEN).mean > 0


def test_the_table_has_a_row_for_each_block_size() -> None:
    rows = table().splitlines()[2:]
    assert [int(row.split("|")[1]) for row in rows] == list(BLOCK_SIZES)
