"""What the HTTP side needs of an engine, as a protocol: AsyncEngine in the server, a fake in the tests.

Imports nothing of the engine but its plain data, so this process stays free of torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from enum import Enum
from typing import Protocol

from engine.control import Command, Result
from engine.errors import EngineDeadError
from engine.queue_bound import Place
from engine.request import PLAIN_TERMS, Namespace, RequestOutput, RequestTerms, SamplingParams
from engine.stats import EngineInfo


class Tokenizer(Protocol):
    """Text to token ids. Safe to call from several threads."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class EngineClient(Protocol):
    """``status`` has a member named STARTING, READY, DEAD (being restarted) or STOPPED. ``info`` is None until READY."""

    @property
    def status(self) -> Enum: ...

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise InvalidRequestError, ContextLengthError or EngineDeadError if ``generate`` could not serve this."""

    def reserve(self, num_requests: int) -> tuple[Place, ...]:
        """Places in the queue for requests that come together, all of which are to be left in the end.

        Raises QueueFullError, or InvalidRequestError when there are never so many.
        """
        ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        terms: RequestTerms = PLAIN_TERMS,
        place: Place | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One output per token. Raises EngineDeadError or RequestFailedError midway; ``aclose`` aborts the request.

        Without a ``place`` it takes one.
        """
        ...

    def namespace(self, salt: str, num_tokens: int) -> Namespace:
        """Where requests of that many tokens, prompt and output, share blocks."""

    def num_public_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        """How many tokens of the prompt's start belong to a public prefix, whose blocks all salts share."""

    async def control(self, command: Command) -> Result:
        """The engine's answer to a command for its cache. Raises EngineDeadError or ControlRefusedError."""


class RunnableEngine(EngineClient, Protocol):
    """An engine with its life cycle."""

    async def start(self) -> None:
        """Return when READY. Raises StartupError with a message of one line."""

    async def stop(self, flush_seconds: float = 0.0) -> None:
        """End the engine; it may take that long to keep what is cached on the disk."""


class _PendingStatus(Enum):
    STARTING = "starting"


class PendingEngine:
    """Stands in the app while the model is still being fetched: STARTING, and dead to requests, until ``attach``."""

    def __init__(self) -> None:
        self._engine: EngineClient | None = None

    def attach(self, engine: EngineClient) -> None:
        assert self._engine is None, "an engine was attached twice"
        self._engine = engine

    @property
    def status(self) -> Enum:
        return self._engine.status if self._engine else _PendingStatus.STARTING

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info if self._engine else None

    @property
    def tokenizer(self) -> Tokenizer:
        return self._attached().tokenizer

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._attached().check(prompt_token_ids, sampling)

    def reserve(self, num_requests: int) -> tuple[Place, ...]:
        return self._attached().reserve(num_requests)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        terms: RequestTerms = PLAIN_TERMS,
        place: Place | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._attached().generate(prompt_token_ids, sampling, terms, place)

    def namespace(self, salt: str, num_tokens: int) -> Namespace:
        return self._attached().namespace(salt, num_tokens)

    def num_public_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        return self._attached().num_public_tokens(prompt_token_ids)

    async def control(self, command: Command) -> Result:
        return await self._attached().control(command)

    def _attached(self) -> EngineClient:
        if self._engine is None:
            raise EngineDeadError("the engine is starting")
        return self._engine
