"""The API side of the engine: a stream for each request, aborts, health, and a supervisor that restarts a dead engine.

Knows the engine only as a process that exchanges messages. Imports neither torch nor numba.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from engine.config import EngineConfig
from engine.control import Command, Refused, Result
from engine.engine_process import EngineProcess
from engine.errors import (
    ContextLengthError,
    ControlRefusedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    StartupError,
)
from engine.messages import Abort, Add, Control, ControlReply, Outputs
from engine.queue_bound import Place, QueueBound
from engine.request import PLAIN_TERMS, FinishReason, Namespace, RequestOutput, RequestTerms, SamplingParams, TokenEvent
from engine.rope_classes import choose_rope_class
from engine.stats import Admission, EngineInfo, PromptSources, StepStats
from engine.tokenizer import TextAssembler, Tokenizer

logger = logging.getLogger("octavo.engine")

MAX_BACKOFF_SECONDS = 30.0


class EngineStatus(Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    STOPPED = "stopped"


class EngineListener(Protocol):
    """Who wants to know what happens, such as the metrics. Called on the event loop; must be quick and must not raise."""

    def on_step(self, stats: StepStats) -> None: ...

    def on_admission(self, admission: Admission) -> None: ...

    def on_token(self, seconds: float, *, first: bool) -> None:
        """``seconds`` since the request's arrival for its first token, since its previous token for the others."""

    def on_finish(self, reason: FinishReason, seconds: float) -> None: ...

    def on_ready(self, info: EngineInfo) -> None:
        """The engine is up, for the first time or again; ``info`` is what it settled on."""

    def on_restart(self) -> None:
        """The engine died: nothing runs, waits or is cached any more."""


class _Stream:
    """One request on the API side. The receiving loop writes it, the request's coroutine reads its queue."""

    def __init__(self, assembler: TextAssembler, arrival_time: float, place: Place, *, grows: bool) -> None:
        self.assembler = assembler
        self.place = place
        self.arrival_time = arrival_time
        self.last_token_time: float | None = None
        self.sources: PromptSources | None = None
        self.rope_class: str | None = None
        self.grows = grows
        self.is_finished = False
        self.queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()


class AsyncEngine:
    """The engine as the server sees it. Use from one event loop: ``start``, then ``generate`` any number of times, then ``stop``."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        listener: EngineListener,
        on_progress: Callable[[str, float | None], None] = lambda stage, share: None,
        public_prefixes: Sequence[Sequence[int]] = (),
    ) -> None:
        """``public_prefixes`` are token ids whose full blocks all salts share."""
        self.tokenizer = tokenizer
        self.num_restarts = 0
        self._config = config
        self._listener = listener
        self._on_progress = on_progress
        self._public_prefixes = tuple(tuple(prefix) for prefix in public_prefixes)
        self._status = EngineStatus.STARTING
        self._info: EngineInfo | None = None
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._queue = QueueBound(config.scheduler.max_queue)
        self._streams: dict[str, _Stream] = {}
        self._controls: dict[int, asyncio.Future[Result]] = {}
        self._num_controls = 0

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def info(self) -> EngineInfo | None:
        """What the engine settled on; None until it is ready for the first time."""
        return self._info

    @property
    def engine_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Spawn the engine and return when it is ready.

        Raises:
            StartupError: it cannot start; the process is gone.
        """
        self._process = await EngineProcess.spawn(self._config)
        try:
            self._info = await self._process.wait_ready(self._on_progress)
        except StartupError:
            await self._process.stop()
            self._status = EngineStatus.STOPPED
            raise
        self._listener.on_ready(self._info)
        self._status = EngineStatus.READY
        self._supervisor = asyncio.create_task(self._supervise(self._process), name="engine-supervisor")
        self._supervisor.add_done_callback(self._on_supervisor_end)

    async def stop(self, flush_seconds: float = 0.0) -> None:
        """End the engine. Streams that still run get an EngineDeadError. See ``EngineProcess.stop`` for ``flush_seconds``."""
        self._status = EngineStatus.STOPPED
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._process is not None:
            await self._process.stop(flush_seconds)
        self._fail_all(EngineDeadError("the server is shutting down"))

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Refuse what cannot be served, before anything is sent.

        Raises:
            EngineDeadError: the engine is not up.
            InvalidRequestError: no tokens, or an id outside the vocabulary.
            ContextLengthError: prompt and max_tokens exceed the context, or the whole KV cache.
        """
        info = self._info
        if self._status is not EngineStatus.READY or info is None:
            raise EngineDeadError(f"the engine is {self._status.value}; try again in a moment")
        check_request(info, prompt_token_ids, sampling)

    def num_public_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        """How many tokens of the prompt's start are the start of a public prefix, for the one that it follows longest."""
        return max((_common_len(prefix, prompt_token_ids) for prefix in self._public_prefixes), default=0)

    def namespace(self, salt: str, num_tokens: int) -> Namespace:
        """Where a request of that many tokens, prompt and output, may share blocks: with those of its salt and its RoPE class."""
        info = self._info
        assert info is not None, "the engine is not ready"
        return Namespace(salt, choose_rope_class(info.rope_classes, info.num_places(num_tokens)))

    def _rope_limits(self) -> tuple[int, ...]:
        assert self._info is not None
        return tuple(max_len for _, max_len in self._info.rope_classes)

    def reserve(self, num_requests: int) -> tuple[Place, ...]:
        """Places in the queue for requests that come together, one for each ``generate``. Whoever reserves sees to it that all are left.

        Raises:
            InvalidRequestError, QueueFullError: see ``QueueBound.reserve``.
        """
        return self._queue.reserve(num_requests)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        terms: RequestTerms = PLAIN_TERMS,
        place: Place | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One output for each token. Closing the generator early aborts the request in the engine.

        Raises:
            EngineDeadError, RequestFailedError: in the middle of the stream; and at its start what ``check`` raises and,
                without a ``place``, what ``reserve`` raises.
        """
        self.check(prompt_token_ids, sampling)
        assert self._info is not None
        grows = terms.grows and not self._info.is_stream(len(prompt_token_ids) + sampling.max_tokens)
        message = Add(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(63),
            namespace=self.namespace(terms.salt, len(prompt_token_ids) + (1 if grows else sampling.max_tokens)),
            arrival_time=terms.arrival_time or time.monotonic(),
            num_public_tokens=self.num_public_tokens(prompt_token_ids),
            tenant=terms.tenant,
            priority=terms.priority,
            rope_limits=self._rope_limits() if grows else (),
        )
        assembler = TextAssembler(self.tokenizer, sampling, message.prompt_token_ids)
        place = place if place is not None else self.reserve(1)[0]
        stream = _Stream(assembler, message.arrival_time, place, grows=grows)
        self._open(message, stream)
        try:
            while True:
                item = await stream.queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._close(message.request_id, stream)

    async def control(self, command: Command) -> Result:
        """What the engine answers to a command for its cache, applied between two steps.

        Raises:
            EngineDeadError: the engine is not up, or died before it answered; then nobody knows what it did.
            ControlRefusedError: the cache cannot do that now; nothing has changed.
        """
        if self._status is not EngineStatus.READY:
            raise EngineDeadError(f"the engine is {self._status.value}; try again in a moment")
        assert self._process is not None
        self._num_controls += 1
        control_id = self._num_controls
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._controls[control_id] = future
        self._process.send(Control(control_id, command))
        try:
            result = await future
        finally:
            del self._controls[control_id]
        if isinstance(result, Refused):
            raise ControlRefusedError(result.message)
        return result

    def _open(self, message: Add, stream: _Stream) -> None:
        assert self._process is not None
        self._streams[message.request_id] = stream
        self._process.send(message)

    def _close(self, request_id: str, stream: _Stream) -> None:
        """The reader is gone. If the request still runs, the engine is told to end it."""
        self._streams.pop(request_id, None)
        if stream.is_finished:
            return
        self._end(stream, FinishReason.ABORT)
        if self._process is not None and self._status is EngineStatus.READY:
            self._process.send(Abort(request_id))

    def _end(self, stream: _Stream, reason: FinishReason) -> None:
        stream.is_finished = True
        stream.place.leave()
        self._listener.on_finish(reason, time.monotonic() - stream.arrival_time)

    def _on_supervisor_end(self, supervisor: asyncio.Task[None]) -> None:
        """Nobody reads the engine any more. Unless that is a stop, it is our bug: everyone waiting is told, and /health says 503."""
        if supervisor.cancelled():
            return
        logger.critical("the supervisor of the engine failed", exc_info=supervisor.exception())
        self._status = EngineStatus.DEAD
        self._fail_all(EngineDeadError("the engine's supervisor failed; restart the server"))

    async def _supervise(self, process: EngineProcess) -> None:
        """Read what the engine says; when it dies, tell everyone and start another, for as long as we run."""
        while True:
            while (message := await process.receive()) is not None:
                if isinstance(message, Outputs):
                    self._dispatch(process, message)
                elif isinstance(message, ControlReply):
                    self._answer(message)
            self._status = EngineStatus.DEAD
            logger.error("the engine process died with %d requests in flight; restarting it", len(self._streams))
            self._listener.on_restart()
            self._fail_all(EngineDeadError("the engine process died; it is being restarted"))
            await process.stop()
            process = await self._restart()

    async def _restart(self) -> EngineProcess:
        backoff = 0.5
        while True:
            self.num_restarts += 1
            process: EngineProcess | None = None
            try:
                process = self._process = await EngineProcess.spawn(self._config)
                self._info = await process.wait_ready(lambda stage, share: None)
            except Exception as error:  # whatever it was, the next try may work; until then /health says 503
                logger.error("the engine did not come back (%s); next try in %.1f s", error, backoff)
                if process is not None:
                    await process.stop()
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
                continue
            self._listener.on_ready(self._info)
            self._status = EngineStatus.READY
            logger.warning("the engine is back")
            return process

    def _dispatch(self, process: EngineProcess, outputs: Outputs) -> None:
        now = time.monotonic()
        for admission in outputs.admissions:
            self._listener.on_admission(admission)
            if (stream := self._streams.get(admission.request_id)) is not None:
                stream.sources = admission.sources
                stream.rope_class = self._rope_class_name(admission.rope_class)
                stream.place.leave()
        for event in outputs.events:
            stream = self._streams.get(event.request_id)
            if stream is not None and not stream.is_finished:
                self._deliver(process, stream, event, now)
        self._listener.on_step(outputs.stats)

    def _rope_class_name(self, rope_class: int) -> str:
        assert self._info is not None
        return self._info.rope_classes[rope_class][0]

    def _last_rope_class(self, stream: _Stream, output: RequestOutput) -> str | None:
        """The class that the last token was computed in: of one that grows, the least that covers what it came to."""
        if not stream.grows or stream.rope_class is None:
            return stream.rope_class
        num_tokens = output.num_prompt_tokens + max(1, output.num_output_tokens)
        return self._rope_class_name(self.namespace("", num_tokens).rope_class)

    def _answer(self, reply: ControlReply) -> None:
        future = self._controls.get(reply.control_id)
        if future is not None and not future.done():  # else who asked has gone
            future.set_result(reply.result)

    def _deliver(self, process: EngineProcess, stream: _Stream, event: TokenEvent, now: float) -> None:
        if event.finish_reason is FinishReason.ERROR:
            self._end(stream, FinishReason.ERROR)
            stream.queue.put_nowait(RequestFailedError(event.error or "the request failed in the engine"))
            return
        if event.token_id is not None:
            since = stream.arrival_time if stream.last_token_time is None else stream.last_token_time
            self._listener.on_token(now - since, first=stream.last_token_time is None)
            stream.last_token_time = now
        try:
            output = stream.assembler.push(event)
        except Exception:  # the text of one request must not take the loop down that serves them all
            logger.exception("request %s failed while its text was put together", event.request_id)
            self._end(stream, FinishReason.ERROR)
            stream.queue.put_nowait(RequestFailedError("the text of this request could not be put together"))
            process.send(Abort(event.request_id))
            return
        if output.finish_reason is not None:
            self._end(stream, output.finish_reason)
            output = replace(output, sources=stream.sources, rope_class=self._last_rope_class(stream, output))
            if event.finish_reason is None:  # a stop string: the engine does not know it yet
                process.send(Abort(event.request_id))
        stream.queue.put_nowait(output)

    def _fail_all(self, error: Exception) -> None:
        """Tell everyone who waits for the engine that nothing more will come."""
        for future in self._controls.values():
            if not future.done():
                future.set_exception(error)
        for stream in self._streams.values():
            if not stream.is_finished:
                self._end(stream, FinishReason.ERROR)
                stream.queue.put_nowait(error)


def _common_len(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def check_request(info: EngineInfo, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
    """See ``AsyncEngine.check``; the part that needs no living engine."""
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt is empty; at least one token is needed", param="prompt")
    for ids, param in ((prompt_token_ids, "prompt"), (sampling.stop_token_ids, "stop_token_ids")):
        if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidRequestError(f"token id {wrong} is out of vocabulary (0 to {info.vocab_size - 1})", param=param)
    total, cache_len = len(prompt_token_ids) + sampling.max_tokens, info.num_blocks * info.block_size
    limit = min(info.max_model_len, cache_len) if info.holds_all else info.max_model_len
    if total > limit:
        raise ContextLengthError(
            f"this model's context is {limit} tokens{info.limited_by(limit)}; the request asks for {total}"
            f" ({len(prompt_token_ids)} of prompt and max_tokens {sampling.max_tokens}); shorten one of them",
            param="prompt" if len(prompt_token_ids) >= limit else "max_tokens",
        )
