"""From the engine's outputs to the answer: merged over prompts, written as server-sent events or folded into one body.

The whole answer is the fold of the same outputs that a stream is made of. Knows nothing of requests' fields or of tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import RequestFailedError
from engine.request import FinishReason, RequestOutput
from engine.stats import PromptSources
from server.drain import Drain
from server.errors import UnavailableError, error_body, log_failure
from server.schemas import CacheInfo, Choice, Completion, PromptTokensDetails, Usage

T = TypeVar("T")
Outputs = AsyncGenerator[RequestOutput, None]
Batch = list[tuple[int, RequestOutput]]

DONE_EVENT = b"data: [DONE]\n\n"
_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_encode = msgspec.json.Encoder().encode


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class OutputMerge:
    """Runs several generators at once and hands out whatever is ready, tagged with the index of its generator.

    Every generator is closed by ``aclose`` at the latest, which aborts its request in the engine.
    """

    def __init__(self, generators: Sequence[Outputs]) -> None:
        self._ready: Batch = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._num_open = len(generators)
        self._tasks = [asyncio.create_task(self._pump(index, outputs)) for index, outputs in enumerate(generators)]

    async def batches(self) -> AsyncIterator[Batch]:
        """Batches in order, none empty. Raises the first error of any generator, after what came before it."""
        while self._num_open or self._ready or self._error:
            await self._wake.wait()
            self._wake.clear()
            if self._ready:
                batch, self._ready = self._ready, []
                yield batch
            if self._error is not None:
                raise self._error

    def fail(self, error: Exception) -> None:
        """End ``batches`` with this error, unless another one came first."""
        self._error = self._error or error
        self._wake.set()

    async def aclose(self) -> None:
        await _cancel(*self._tasks)

    async def _pump(self, index: int, outputs: Outputs) -> None:
        reason = None
        try:
            async for output in outputs:
                reason = _require_api_reason(output.finish_reason)
                self._ready.append((index, output))
                self._wake.set()
            if reason is None:
                raise RequestFailedError("the engine's outputs ended without a finish reason")
        except Exception as exc:
            self.fail(exc)
        finally:
            await outputs.aclose()
            self._num_open -= 1
            self._wake.set()


def _require_api_reason(reason: FinishReason | None) -> FinishReason | None:
    """Only stop and length are answers; what the engine aborted or could not finish is an error."""
    if reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise RequestFailedError(f"the engine ended the request with finish reason {reason.value}")
    return reason


@asynccontextmanager
async def merged(generators: Sequence[Outputs], drain: Drain) -> AsyncIterator[OutputMerge]:
    """An OutputMerge that a shutdown cuts short and that is closed on every way out."""
    merge = OutputMerge(generators)
    try:
        with drain.on_cut(lambda: merge.fail(UnavailableError("the server is shutting down"))):
            yield merge
    finally:
        await merge.aclose()


class CompletionHead(msgspec.Struct, frozen=True):
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str

    def wrap(self, choices: list[Choice], usage: Usage | None = None) -> bytes:
        return _encode(Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage))


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """``n`` choices for each prompt, in prompt order; what is told besides their text."""

    n: int = 1
    include_usage: bool = False
    cache_info: bool = False


def fold_batch(batch: Batch, *, cache_info: bool = False) -> list[Choice]:
    """One choice for each index that has something to say: its texts joined, its finish reason if it ended."""
    texts: dict[int, list[str]] = {}
    last: dict[int, RequestOutput] = {}
    for index, output in batch:
        texts.setdefault(index, []).append(output.text)
        last[index] = output
    choices = [_choice(index, "".join(texts[index]), last[index], cache_info) for index in last]
    return [choice for choice in choices if choice.text or choice.finish_reason]


def _choice(index: int, text: str, last: RequestOutput, cache_info: bool) -> Choice:
    reason = last.finish_reason.value if last.finish_reason else None
    info = _cache_info(last.sources, last.rope_class) if cache_info and last.sources is not None else msgspec.UNSET
    return Choice(index=index, text=text, finish_reason=reason, stop_reason=last.stop_reason, cache_info=info)


def _cache_info(sources: PromptSources, rope_class: str | None) -> CacheInfo:
    return CacheInfo(
        device=sources.device,
        host=sources.host,
        disk=sources.disk,
        in_flight=sources.in_flight,
        evicted=sources.evicted,
        unseen=sources.unseen + sources.other_namespace,
        evicted_seconds=sources.evicted_seconds,
        rope_class=rope_class,
    )


def usage_of(last_outputs: Mapping[int, RequestOutput], n: int = 1) -> Usage:
    """The sums over prompts, from the last output of each choice: a prompt counts once, however many choices it has.

    Its cached tokens are those of the choice that found fewest: what the others found more, they owe to that one.
    """
    prompts: dict[int, list[RequestOutput]] = {}
    for index, output in last_outputs.items():
        prompts.setdefault(index // n, []).append(output)
    prompt = sum(outputs[0].num_prompt_tokens for outputs in prompts.values())
    completion = sum(output.num_output_tokens for output in last_outputs.values())
    cached = sum(min(output.num_cached_tokens for output in outputs) for outputs in prompts.values())
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


async def whole_completion(generators: Sequence[Outputs], head: CompletionHead, shape: AnswerShape, drain: Drain) -> bytes:
    """The body of an answer that is not streamed. Raises what the engine raises."""
    async with merged(generators, drain) as merge:
        outputs = [item async for batch in merge.batches() for item in batch]
    choices = sorted(fold_batch(outputs, cache_info=shape.cache_info), key=lambda choice: choice.index)
    return head.wrap(choices, usage_of(dict(outputs), shape.n))


async def completion_events(
    generators: Sequence[Outputs], head: CompletionHead, shape: AnswerShape, drain: Drain, *, log_name: str
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer, [DONE] included. An error becomes an event: the status line is long gone."""
    last: dict[int, RequestOutput] = {}
    try:
        async with merged(generators, drain) as merge:
            async for batch in merge.batches():
                last.update(batch)
                yield b"".join(event(head.wrap([choice])) for choice in fold_batch(batch, cache_info=shape.cache_info))
        if shape.include_usage:
            yield event(head.wrap([], usage_of(last, shape.n)))
    except Exception as exc:
        log_failure(exc, log_name)
        yield event(error_body(exc))
    yield DONE_EVENT


class EventStream(Response):
    """Sends events as they come. A client that hangs up closes the generator at once, also while no event is due."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, on_end: Callable[[], None] = lambda: None) -> None:
        """``on_end`` is called once nothing more will be sent, also if nothing ever was."""
        super().__init__(headers=_SSE_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._events:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None if the client hung up first; ``work`` has then been cancelled and has ended.

    ``receive`` must have no part of the request body left to give.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, watcher)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and see the end of tasks. What they raise on the way is of no more interest: their reader is gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
