"""The one text assembler: its joined text is the whole decode cut at the first stop string, for every kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_stop_matcher import first_stop
from vocab_builders import quick

from engine.request import FinishReason, RequestOutput, SamplingParams, TokenEvent
from engine.tokenizer import TextAssembler, Tokenizer

token_lists = st.lists(st.integers(0, 450), min_size=1, max_size=12)


def run(tokenizer: Tokenizer, sampling: SamplingParams, prompt: list[int], events: list[TokenEvent]) -> list[RequestOutput]:
    assembler = TextAssembler(tokenizer, sampling, prompt)
    outputs: list[RequestOutput] = []
    for event in events:
        outputs.append(assembler.push(event))
        if outputs[-1].finish_reason is not None:
            break
    return outputs


def tokens(ids: list[int], last: FinishReason) -> list[TokenEvent]:
    return [TokenEvent("r", i, last if n == len(ids) else None) for n, i in enumerate(ids, 1)]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def continuation(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    whole, before = tokenizer.decode(prompt + ids), tokenizer.decode(prompt)
    assert whole.startswith(before)
    return whole[len(before) :]


@quick
@given(data=st.data(), ids=token_lists, prompt=st.sampled_from(["", "hello", "日本 a  "]))
def test_joined_text_is_the_whole_decode_cut_at_the_first_stop_string(
    tokenizer: Tokenizer, data: st.DataObject, ids: list[int], prompt: str
) -> None:
    prompt_ids = tokenizer.encode(prompt) or [0]
    whole = continuation(tokenizer, prompt_ids, ids)
    substrings = st.tuples(st.integers(0, len(whole)), st.integers(1, 4)).map(lambda at: whole[at[0] : sum(at)])
    stop = data.draw(st.lists((substrings | st.text("ab 日\ufffd", max_size=2)).filter(bool), max_size=3))
    outputs = run(tokenizer, SamplingParams(max_tokens=99, stop=tuple(stop)), prompt_ids, tokens(ids, FinishReason.LENGTH))
    text, matched = first_stop(whole, stop)
    assert text_of(outputs) == text
    assert outputs[-1].stop_reason == matched
    assert outputs[-1].finish_reason is (FinishReason.LENGTH if matched is None else FinishReason.STOP)


@quick
@given(
    ids=token_lists, stop=st.lists(st.text("ab e", min_size=1, max_size=2), max_size=2), reason=st.sampled_from(FinishReason)
)
def test_every_event_gives_one_output_and_the_last_alone_is_final(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], reason: FinishReason
) -> None:
    outputs = run(tokenizer, SamplingParams(max_tokens=99, stop=tuple(stop)), [5], tokens(ids, reason))
    assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [output.num_output_tokens for output in outputs] == list(range(1, len(outputs) + 1))
    assert [output.token_ids for output in outputs] == [(i,) for i in ids[: len(outputs)]]


@quick
@given(ids=token_lists, min_tokens=st.integers(0, 12))
def test_text_of_the_first_min_tokens_is_never_searched(tokenizer: Tokenizer, ids: list[int], min_tokens: int) -> None:
    assume(min_tokens < len(ids))
    stop = ["a", " ", "he"]
    outputs = run(tokenizer, SamplingParams(max_tokens=99), [5], tokens(ids, FinishReason.LENGTH))
    protected = text_of(outputs[:min_tokens])
    rest, matched = first_stop(text_of(outputs[min_tokens:]), stop)
    sampling = SamplingParams(max_tokens=99, min_tokens=min_tokens, stop=tuple(stop))
    stopped = run(tokenizer, sampling, [5], tokens(ids, FinishReason.LENGTH))
    assert text_of(stopped) == protected + rest
    assert stopped[-1].stop_reason == matched
    assert len(stopped) > min_tokens


@pytest.fixture(scope="session")
def byte_level(loaded: dict[str, Tokenizer]) -> Tokenizer:
    return loaded["byte_level_json"]


def test_the_token_that_ended_the_request_is_counted_but_not_shown(byte_level: Tokenizer) -> None:
    hello, tool = byte_level.encode("hello"), byte_level.encode("<tool>")
    sampling = SamplingParams(max_tokens=99, stop_token_ids=(tool[0],))
    by_token = run(byte_level, sampling, [0], tokens([*hello, *tool], FinishReason.STOP))
    assert text_of(by_token) == "hello"
    assert by_token[-1].stop_reason == tool[0]
    assert by_token[-1].num_output_tokens == len(hello) + 1
    assert by_token[-1].token_ids == tuple(tool)
    by_eos = run(byte_level, sampling, [0], tokens([*hello, 1], FinishReason.STOP))
    assert text_of(by_eos) == "hello"
    assert by_eos[-1].stop_reason is None
    assert by_eos[-1].finish_reason is FinishReason.STOP


def test_a_stop_token_that_did_not_end_the_request_is_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<tool>b")
    outputs = run(byte_level, SamplingParams(max_tokens=99, min_tokens=2), [0], tokens(ids, FinishReason.LENGTH))
    assert text_of(outputs) == "a<tool>b"


@pytest.mark.parametrize("reason", FinishReason)
@pytest.mark.parametrize("half_a_character", [True, False])
def test_held_text_and_incomplete_bytes_come_out_at_every_end(
    byte_level: Tokenizer, reason: FinishReason, half_a_character: bool
) -> None:
    ids = byte_level.encode("hello sto") + byte_level.encode("ߐ")[:half_a_character]
    events = [*[TokenEvent("r", i) for i in ids], TokenEvent("r", None, reason)]
    outputs = run(byte_level, SamplingParams(max_tokens=99, stop=("stop",)), [0], events)
    assert text_of(outputs) == "hello sto" + "\ufffd" * half_a_character
    assert outputs[-1].finish_reason is reason
    assert outputs[-1].num_output_tokens == len(ids)
    assert outputs[-1].token_ids == ()
    assert outputs[-1].stop_reason is None


def test_a_stop_string_in_the_very_last_token_wins_over_the_length(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello")
    outputs = run(byte_level, SamplingParams(max_tokens=99, stop=("lo",)), [0], tokens(ids, FinishReason.LENGTH))
    assert (text_of(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason) == ("hel", FinishReason.STOP, "lo")


def test_counts_of_the_prompt_are_carried_through(byte_level: Tokenizer) -> None:
    events = [TokenEvent("r", 5, num_cached_tokens=2), TokenEvent("r", 6, FinishReason.LENGTH)]
    outputs = run(byte_level, SamplingParams(max_tokens=99), [0, 7, 8], events)
    assert [(output.num_prompt_tokens, output.num_cached_tokens) for output in outputs] == [(3, 2), (3, 2)]


def test_nothing_may_be_pushed_after_the_end(byte_level: Tokenizer) -> None:
    assembler = TextAssembler(byte_level, SamplingParams(max_tokens=99, stop=("h",)), [0])
    assembler.push(TokenEvent("r", byte_level.encode("hello")[0]))
    with pytest.raises(AssertionError, match="after the request's last output"):
        assembler.push(TokenEvent("r", 5))
