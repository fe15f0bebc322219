"""Offline inference over a tiny random model: what comes back, what is reused, and what is left behind when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from engine.llm import LLM
from engine.request import FinishReason, SamplingParams
from tests.tiny_folder import EOS, make_folder, one_thread

__all__ = ["one_thread"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ("the capital of France", "nobody has counted", "sea", "a town by the sea and nobody there", "is is is", "blocks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_folder(path, max_position_embeddings=256)
    return path


def make_llm(folder: Path, *, num_blocks: int = 200, **scheduler: int) -> LLM:
    cache = CacheConfig(block_size=4, memory_bytes=num_blocks * 4 * 384)
    return LLM(str(folder), cache=cache, scheduler=SchedulerConfig(**scheduler))


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return make_llm(folder)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The module's LLM, with a check that the test left nothing running in it."""
    yield shared
    assert_idle(shared)


def assert_idle(llm: LLM) -> None:
    stats = llm.core.idle_stats()
    assert (stats.num_running, stats.num_waiting, stats.cache.num_referenced_blocks) == (0, 0, 0)
    llm.core.scheduler.manager.check_integrity()


def test_answers_come_in_order_with_their_counts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert answer.token_ids == llm.generate([prompt], GREEDY)[0].token_ids
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.num_prompt_tokens == len(llm.tokenizer.encode(prompt))
        assert len(answer.token_ids) == 24
    assert len({answer.token_ids for answer in together}) > 1


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_token_ids_say_the_same_as_their_text(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    by_text, by_ids, by_tuple = llm.generate([PROMPTS[0], ids, tuple(ids)], GREEDY)
    assert by_text.text == by_ids.text == by_tuple.text
    assert by_text.token_ids == by_ids.token_ids == by_tuple.token_ids


def test_the_text_is_the_decoding_of_the_tokens(llm: LLM) -> None:
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert llm.tokenizer.decode([*ids, *answer.token_ids]) == llm.tokenizer.decode(ids) + answer.text


def test_a_model_padded_beyond_its_tokenizer_may_say_ids_without_a_meaning(llm: LLM) -> None:
    wild = SamplingParams(temperature=2.0, max_tokens=100, ignore_eos=True, seed=1)
    (answer,) = llm.generate([[299, 5, 298]], wild)
    assert any(token >= llm.tokenizer.vocab_size for token in answer.token_ids)
    assert answer.text == llm.tokenizer.decode(answer.token_ids)


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[0]], GREEDY)
    stop = whole.text[len(whole.text) // 2 :][:2]
    cut = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,))
    (answer, other) = llm.generate([PROMPTS[0], PROMPTS[1]], cut)
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish_reason is FinishReason.STOP
    assert len(answer.token_ids) < 24
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert other.text == llm.generate([PROMPTS[1]], cut)[0].text


def test_a_stop_token_and_eos_end_the_request_unseen(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[0]], GREEDY)
    stop = whole.token_ids[5]
    first = whole.token_ids.index(stop)
    (answer,) = llm.generate(
        [PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    )
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids == whole.token_ids[: first + 1]
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert llm.tokenizer.decode([*ids, *answer.token_ids[:-1]]) == llm.tokenizer.decode(ids) + answer.text


def test_eos_ends_a_request_but_not_before_min_tokens_and_not_when_ignored(llm: LLM) -> None:
    def tokens_of(**params: object) -> list[tuple[int, ...]]:
        sampling = SamplingParams(temperature=2.0, max_tokens=100, **params)  # type: ignore[arg-type]
        seeds = range(8)
        return [llm.generate([[9]], replace(sampling, seed=seed))[0].token_ids for seed in seeds]

    plain, ignoring, at_least = tokens_of(), tokens_of(ignore_eos=True), tokens_of(min_tokens=80)
    assert any(len(tokens) < 80 for tokens in plain), "EOS is drawn early by some seed"
    assert all(tokens[-1] == EOS for tokens in plain if len(tokens) < 100)
    assert all(EOS not in tokens[:-1] for tokens in plain)
    assert all(len(tokens) == 100 for tokens in ignoring)
    assert any(EOS in tokens for tokens in ignoring)
    assert all(len(tokens) > 79 and EOS not in tokens[:80] for tokens in at_least)


def test_blocks_of_earlier_calls_are_reused(folder: Path) -> None:
    llm = make_llm(folder)
    prompt = list(range(20, 41))  # 5 full blocks and a token
    (first,) = llm.generate([prompt], GREEDY)
    (again,) = llm.generate([prompt], GREEDY)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 20)
    assert again.token_ids == first.token_ids
    (longer,) = llm.generate([[*prompt, *first.token_ids]], GREEDY)
    assert longer.num_cached_tokens == 44, "all of 21 + 24 tokens but the last, which was never computed"
    assert_idle(llm)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.5, "top_k": 20}]
)
def test_same_seed_same_text_whatever_shares_the_batch(folder: Path, llm: LLM, sampling: dict[str, float]) -> None:
    params = SamplingParams(seed=42, max_tokens=40, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    (alone,) = llm.generate([PROMPTS[3]], params)
    for neighbours in (PROMPTS[:2], PROMPTS):
        assert llm.generate([*neighbours, PROMPTS[3]], params)[-1].token_ids == alone.token_ids
    chunked, small = make_llm(folder, max_num_batched_tokens=3), make_llm(folder, num_blocks=22)
    for other in (chunked, small):
        assert other.generate([*PROMPTS, PROMPTS[3]], params)[-1].token_ids == alone.token_ids
    other_seed = SamplingParams(seed=43, max_tokens=40, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    assert llm.generate([PROMPTS[3]], other_seed)[0].token_ids != alone.token_ids


def test_without_a_seed_every_request_draws_its_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=2.0)
    answers = llm.generate([PROMPTS[0]] * 4, params) + llm.generate([PROMPTS[0]] * 4, params)
    assert len({answer.token_ids for answer in answers}) == 8


@pytest.mark.parametrize(
    ("bad", "kind"), [([], InvalidRequestError), ("", InvalidRequestError), ([300], InvalidRequestError), ([-1], InvalidRequestError),
                      ([5] * 240, ContextLengthError), ("\ud800", InvalidRequestError)]
)  # fmt: skip
def test_one_bad_prompt_refuses_the_call_and_nothing_runs(llm: LLM, bad: object, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        llm.generate([PROMPTS[0], bad, PROMPTS[1]], GREEDY)  # type: ignore[list-item]
    assert_idle(llm)
    assert len(llm.generate([PROMPTS[0]], GREEDY)) == 1


def test_an_interrupted_call_leaves_nothing_running(folder: Path) -> None:
    """Ctrl-C in a notebook, and the next cell works."""
    llm = make_llm(folder)
    expected = llm.generate([PROMPTS[0]], GREEDY)[0].token_ids
    step, calls = llm.core.step, iter(range(100))

    def interrupted() -> object:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step()

    llm.core.step = interrupted  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    llm.core.step = step  # type: ignore[method-assign]
    assert_idle(llm)
    assert llm.generate([PROMPTS[0]], GREEDY)[0].token_ids == expected


def test_a_request_whose_logits_are_not_finite_fails_and_its_neighbours_do_not(tmp_path: Path) -> None:
    model = make_folder(tmp_path, max_position_embeddings=64)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = float("nan")
    model.save_pretrained(tmp_path)
    llm = make_llm(tmp_path)
    good, bad, other = llm.generate([[5, 6], [5, 77, 6], [8]], GREEDY)
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.token_ids == ()
    assert [len(answer.token_ids) for answer in (good, other)] == [24, 24]
    assert_idle(llm)


def test_progress_is_shown_when_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr().out == ""
    llm.generate(PROMPTS, GREEDY, show_progress=True)
    shown = capsys.readouterr().out
    assert "generating" in shown
    assert "100%" in shown


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
