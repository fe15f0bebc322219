"""The merge of generators, the drain count and work in threads, by themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from engine.errors import RequestFailedError
from engine.request import FinishReason, RequestOutput
from server.drain import Drain
from server.streaming import Batch, OutputMerge, fold_batch, usage_of
from server.threads import CancelledWork, CancelToken, run_in_thread


def output(
    text: str, count: int = 1, reason: FinishReason | None = None, stop_reason: str | int | None = None
) -> RequestOutput:
    return RequestOutput(text, (count,), 3, 2, count, reason, stop_reason)


async def play(*outputs: RequestOutput) -> AsyncGenerator[RequestOutput, None]:
    for item in outputs:
        yield item


END = FinishReason.LENGTH


async def test_merge_keeps_the_order_of_each_generator() -> None:
    first = [output(str(i), i, END if i == 9 else None) for i in range(10)]
    second = [output(str(i), i, END if i == 4 else None) for i in range(5)]
    merge = OutputMerge([play(*first), play(*second)])
    items = [item async for batch in merge.batches() for item in batch]
    assert [out for index, out in items if index == 0] == first
    assert [out for index, out in items if index == 1] == second
    await merge.aclose()


async def test_merge_gives_what_came_before_an_error_and_then_the_error() -> None:
    merge = OutputMerge([play(output("a"), output("b"))])  # ends without a finish reason
    seen: Batch = []

    async def read() -> None:
        async for batch in merge.batches():
            seen.extend(batch)

    with pytest.raises(RequestFailedError, match="without a finish reason"):
        await read()
    assert [out.text for _, out in seen] == ["a", "b"]
    await merge.aclose()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_an_abort_by_the_engine_is_no_answer(reason) -> None:
    merge = OutputMerge([play(output("a"), output("", reason=reason))])
    with pytest.raises(RequestFailedError):
        _ = [batch async for batch in merge.batches()]
    await merge.aclose()


def test_fold_joins_the_texts_of_each_index_and_drops_what_says_nothing() -> None:
    batch = [(1, output("a")), (0, output("")), (1, output("b", 2, FinishReason.STOP, "END"))]
    (choice,) = fold_batch(batch)
    assert (choice.index, choice.text, choice.finish_reason, choice.stop_reason) == (1, "ab", "stop", "END")
    (last,) = fold_batch([(0, output("", 5, END))])
    assert (last.text, last.finish_reason) == ("", "length")


def test_usage_sums_over_prompts() -> None:
    usage = usage_of({0: output("", 5), 1: output("", 7)})
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 12, 18)
    assert usage.prompt_tokens_details.cached_tokens == 4
    of_one_prompt = usage_of({0: output("", 5), 1: replace(output("", 7), num_cached_tokens=3)}, n=2)
    assert (of_one_prompt.prompt_tokens, of_one_prompt.completion_tokens) == (3, 12)
    assert of_one_prompt.prompt_tokens_details.cached_tokens == 2, "what the first choice found; the other owes it the rest"


async def test_drain_waits_for_the_last_active_request() -> None:
    drain = Drain()
    await asyncio.wait_for(drain.wait_idle(), 1)
    with drain.active(), drain.active():
        assert drain.num_active == 2
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(drain.wait_idle(), 0.01)
    await asyncio.wait_for(drain.wait_idle(), 1)


async def test_cut_reaches_those_inside_and_those_that_come_late() -> None:
    drain = Drain()
    calls = []
    with drain.on_cut(lambda: calls.append("inside")), drain.on_cut(lambda: calls.append("also")):
        drain.cut()
    assert sorted(calls) == ["also", "inside"]
    with drain.on_cut(lambda: calls.append("late")):
        assert calls[-1] == "late"
    drain.cut()
    assert len(calls) == 3


async def test_work_in_a_thread_gives_its_result_or_its_error() -> None:
    assert await run_in_thread(lambda token: threading.current_thread().daemon) is True

    def fail(token: CancelToken) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await run_in_thread(fail)


async def test_cancelled_work_gets_the_time_to_clean_up() -> None:
    state = []

    def work(token: CancelToken) -> None:
        state.append("begun")
        try:
            while True:
                token.check()
                time.sleep(0.005)
        except CancelledWork:
            state.append("cleaned up")
            raise

    task = asyncio.create_task(run_in_thread(work))
    await asyncio.sleep(0.03)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state == ["begun", "cleaned up"]
