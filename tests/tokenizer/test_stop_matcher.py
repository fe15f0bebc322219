"""The automaton against the definition, read character by character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocab_builders import quick

from engine.tokenizer import StopMatcher
from engine.tokenizer.stop import _Automaton

stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
pieces = st.lists(st.text("abc", max_size=4), max_size=8)


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string and that string, by the plainest means."""
    for end in range(1, len(text) + 1):
        endings = [s for s in stop if text[:end].endswith(s)]
        if endings:
            longest = max(endings, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed(matcher: StopMatcher, parts: list[str]) -> str:
    text = ""
    for part in parts:
        text += matcher.push(part)
        if matcher.matched is not None:
            break
    return text + matcher.finish()


@quick
@given(stop=stops, parts=pieces)
def test_cuts_at_the_first_stop_string_however_the_text_is_cut(stop: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(stop)
    assert (feed(matcher, parts), matcher.matched) == first_stop("".join(parts), stop)


@quick
@given(stop=stops, parts=pieces)
def test_holds_back_only_what_may_begin_a_stop_string(stop: list[str], parts: list[str]) -> None:
    matcher, seen, shown = StopMatcher(stop), "", ""
    for part in parts:
        seen += part
        shown += matcher.push(part)
        if matcher.matched is not None:
            break
        prefixes = {s[:n] for s in stop for n in range(len(s))}
        longest = next(seen[i:] for i in range(len(seen) + 1) if seen[i:] in prefixes or i == len(seen))
        assert shown == seen[: len(seen) - len(longest)]


@pytest.mark.parametrize(
    ("stop", "parts", "text", "matched"),
    [
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["bc", "abc"], ["ab", "c"], "", "abc"),
        (["\n\n"], ["x\n", "y\n", "\nz"], "x\ny", "\n\n"),
        (["aab"], ["aa", "aab"], "aa", "aab"),
        (["日本"], ["日", "日本語"], "日", "日本"),
        (["stop"], ["sto"], "sto", None),
        ([], ["any"], "any", None),
    ],
)
def test_examples(stop: list[str], parts: list[str], text: str, matched: str | None) -> None:
    matcher = StopMatcher(stop)
    assert feed(matcher, parts) == text
    assert matcher.matched == matched


def test_nothing_may_follow_a_match() -> None:
    matcher = StopMatcher(["x"])
    matcher.push("ax")
    with pytest.raises(AssertionError, match="after a stop string"):
        matcher.push("b")


def test_cost_is_linear_on_a_text_that_almost_matches() -> None:
    automaton, num_moves, state = _Automaton(["a" * 500 + "b"]), 0, 0
    for char in "a" * 5000 + "c":
        state, depth_before = automaton.step(state, char), automaton.depths[state]
        num_moves += 1 + max(0, depth_before - automaton.depths[state])
    assert num_moves <= 2 * 5001
