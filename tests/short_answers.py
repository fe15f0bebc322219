"""Brings the default scheduling to preempt: it lets in by how long answers have been, so it is shown short ones first."""

from __future__ import annotations

from engine.llm import LLM
from engine.request import FinishReason, SamplingParams
from tests.tiny_folder import EOS


def expect_short_answers(llm: LLM, num_answers: int = 8) -> None:
    """Have so many requests end at their first token, in a small part of the prompt's blocks, and forget their prompts again."""
    prompt = (1, 2, 3)
    (first,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))[0].token_ids
    stop = SamplingParams(temperature=0.0, max_tokens=32, stop_token_ids=(first,))
    for answer in llm.generate([prompt] * num_answers, stop):
        assert answer.finish_reason is FinishReason.STOP
    llm.core.scheduler.manager.operator.reset()


def up_to_eos(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """What a tiny model answers when its end-of-text token counts."""
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
