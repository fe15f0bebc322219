"""The definitions of the figures, and the event stream in every cut."""

from __future__ import annotations

import json

import pytest

from loadtest.stream import CompletionRecord, EventParser, FailureKind, StreamError, StreamFold, Usage

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n'


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]}).encode() + b"\n\n"


def test_times_are_what_their_names_say() -> None:
    record = CompletionRecord(10.0, (10.5, 10.75, 11.5), 12.0, Usage(3, 5, None), "length", "")
    assert record.ttft == 0.5
    assert record.itl == (0.25, 0.75)
    assert record.tpot == 1.0 / 4, "over tokens, not over chunks"
    assert record.e2e == 2.0


@pytest.mark.parametrize(("arrivals", "tokens"), [((1.0, 2.0), 1), ((1.0,), 5)])
def test_no_tpot_without_a_second_token_or_chunk(arrivals: tuple[float, ...], tokens: int) -> None:
    assert CompletionRecord(0.0, arrivals, 2.0, Usage(3, tokens, None), "length", "").tpot is None


def test_a_closing_chunk_without_text_is_no_arrival() -> None:
    fold = StreamFold(0.0)
    for at, piece in enumerate([chunk("a"), chunk("b"), chunk("", "length"), USAGE, b"data: [DONE]\n\n"], start=1):
        fold.feed(piece, float(at))
    record = fold.finish(9.0)
    assert record.arrivals == (1.0, 2.0)
    assert (record.text, record.finish_reason, record.ended_at) == ("ab", "length", 9.0)


def test_a_closing_chunk_with_text_and_a_chunk_whose_text_is_held_back_are_arrivals() -> None:
    fold = StreamFold(0.0)
    for at, piece in enumerate([chunk("a"), chunk(""), chunk("c", "length"), USAGE, b"data: [DONE]\n\n"], start=1):
        fold.feed(piece, float(at))
    assert fold.finish(9.0).arrivals == (1.0, 2.0, 3.0)


def test_a_closing_chunk_that_is_the_only_one_is_an_arrival() -> None:
    fold = StreamFold(0.0)
    fold.feed(chunk("", "length") + USAGE + b"data: [DONE]\n\n", 4.0)
    assert fold.finish(5.0).ttft == 4.0


def test_the_parser_does_not_care_how_the_bytes_are_cut() -> None:
    stream = b": comment\r\nevent: x\r\ndata: one\r\n\r\ndata:two\ndata: lines\n\n\n\ndata: [DONE]\n\n"
    want = [b"one", b"two\nlines", b"[DONE]"]
    for size in range(1, len(stream) + 1):
        parser = EventParser()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [event for piece in pieces for event in parser.feed(piece)] == want, f"pieces of {size} bytes"


def test_an_event_after_done_is_malformed() -> None:
    fold = StreamFold(0.0)
    with pytest.raises(StreamError, match=r"after \[DONE\]") as caught:
        fold.feed(b"data: [DONE]\n\n" + USAGE, 1.0)
    assert caught.value.kind is FailureKind.MALFORMED
