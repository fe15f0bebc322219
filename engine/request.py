"""What a request asks for, what is known of it, and what is said about it.

Knows nothing of blocks, tensors, text or HTTP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from engine.errors import InvalidRequestError
from engine.stats import PromptSources

MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)


class FinishReason(str, Enum):
    """Why a request ended. The values are the API's and the metric's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(Enum):
    """Where a request is. PREEMPTED waits like WAITING but was admitted before."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Namespace(NamedTuple):
    """The root of the prefix tree that a request may share blocks under.

    Two requests share a block only if their whole namespace and all tokens up to the block's end are equal.
    """

    salt: str = ""
    rope_class: int = 0


PUBLIC_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Valid once constructed.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off; ``top_p`` 0 keeps the likeliest token only.
    ``seed`` None draws a fresh one for each request.

    Raises:
        InvalidRequestError: a value is out of range; ``param`` names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _check_range("seed", self.seed, MIN_SEED, MAX_SEED)
        if any(s == "" for s in self.stop):
            raise InvalidRequestError("stop strings must not be empty", param="stop")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """Whose request it is, how it takes its turn, and how its rotation follows its length.

    ``salt`` says whose blocks it may share. ``tenant`` is with whom it takes turns; the lower the ``priority``, the earlier it is
    served. ``arrival_time`` is on the clock of ``time.monotonic``; None is the time of the call.
    ``grows``: the request starts in the RoPE class of its prompt and is computed again in the next one when it outgrows it.
    Without, it keeps the class of the longest that it may become.
    """

    salt: str = ""
    tenant: str = ""
    priority: int = 0
    arrival_time: float | None = None
    grows: bool = False


PLAIN_TERMS = RequestTerms()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine. Written by the Scheduler alone.

    ``token_ids`` holds the prompt and, behind it, every sampled token. Always 0 <= num_computed_tokens <= num_tokens,
    and a request has a finish reason exactly when its status is FINISHED. The first ``num_public_tokens`` tokens of the prompt
    are an operator's public prefix: their full blocks belong to no salt. A stream may outgrow all bounds: it reads its first and its
    last tokens only (see engine.kv.stream). The lower the ``priority``, the earlier it is
    served; within a priority, tenants take turns.

    ``rope_limits``, where given, has the most tokens of each RoPE class: a request that outgrows its class moves to the next.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    namespace: Namespace = PUBLIC_NAMESPACE
    arrival_time: float = 0.0
    num_public_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    rope_limits: tuple[int, ...] = ()
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0
    max_computed_tokens: int = 0
    is_regrowing: bool = False
    is_stream: bool = False
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "a request without a prompt was let in"
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens that the request may come to."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def has_outgrown(self) -> bool:
        """Whether its next token would be one more than its RoPE class is for."""
        return bool(self.rope_limits) and self.num_tokens >= self.rope_limits[self.namespace.rope_class]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token, or the end of a request, or both.

    Exactly one event of each request carries a finish reason. ``token_id`` is None for aborts and errors.
    ``num_cached_tokens`` is set on a request's first event. ``error`` is set with FinishReason.ERROR only.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What the request's reader gets: the text that became final with these tokens, and the counts so far.

    ``text`` is a delta; joined over all outputs of a request it equals the decoding of the whole, cut at a stop string.
    ``stop_reason`` is the stop string or stop token id that matched, None for the end-of-text token or the length.
    ``sources`` and ``rope_class``, by name, come with a request's last output.
    """

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    sources: PromptSources | None = None
    rope_class: str | None = None
