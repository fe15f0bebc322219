"""The request and answer bodies of /v1/completions.

Requests are checked strictly: no coercion, no unknown field, and a field that is known but not built is accepted only
with the value that changes nothing. Answers are msgspec structs, cheap enough to write one for every token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.errors import InvalidRequestError
from engine.request import MAX_SEED, MIN_SEED, SamplingParams

MAX_PROMPTS = 1024  # also the most choices of one answer
MAX_N = 128
MAX_SALT_LEN = 256
MAX_STOPS = 4
MAX_STOP_LEN = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKEN_ID = 2**31 - 1
_MAX_FIELDS = 200
_MAX_NAME_LEN = 64

Prompts = tuple[str, ...] | tuple[list[int], ...]


def refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


def _only(neutral: object) -> AfterValidator:
    """Accept the one value of a field not yet built that asks for nothing."""

    def check(value: object, info: ValidationInfo) -> object:
        if value is not None and value != neutral:
            raise refuse(
                f"{info.field_name} is not supported yet; leave it out or send {msgspec.json.encode(neutral).decode()}"
            )
        return value

    return AfterValidator(check)


def parse_prompts(value: object) -> Prompts:
    """One prompt or many, text or token ids, as a tuple of prompts of one kind."""
    if isinstance(value, str):
        return (_check_text(value),)
    if not isinstance(value, list):
        raise refuse("prompt must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise refuse("prompt must not be empty")
    if _is_token_id(value[0]):
        return (_check_token_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise refuse(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(value)}")
    if isinstance(value[0], str):
        return tuple(_check_text(item) for item in value)
    return tuple(_check_token_ids(item) for item in value)


def _is_token_id(value: object) -> bool:
    return type(value) is int


def _check_text(text: object) -> str:
    if not isinstance(text, str):
        raise refuse("prompt must not mix strings with other things")
    if not text:
        raise refuse("prompt must not be empty")
    if "\0" in text:
        raise refuse("prompt must not contain the NUL character")
    return text


def _check_token_ids(ids: object) -> list[int]:
    if not isinstance(ids, list):
        raise refuse("prompt must be a string, a list of strings, a list of token ids or a list of such lists")
    if not ids:
        raise refuse("prompt must not be empty")
    if not all(_is_token_id(item) for item in ids):
        raise refuse("prompt must hold integers only, when it is given as token ids")
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise refuse("prompt holds a token id that is out of the vocabulary")
    return ids


def _parse_stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refuse("stop must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise refuse(f"stop must hold at most {MAX_STOPS} strings, got {len(stops)}")
    if any(not stop or "\0" in stop or len(stop) > MAX_STOP_LEN for stop in stops):
        raise refuse(f"each stop string must have 1 to {MAX_STOP_LEN} characters, none of them NUL")
    return tuple(stops)


def _parse_top_k(value: int) -> int:
    """The API's -1 means off, as 0 does."""
    return 0 if value == -1 else value


Int64 = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)]
Float = Annotated[float, Field(allow_inf_nan=False)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_LEN)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]}
_STOP_SCHEMA = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}, {"type": "null"}]}


class StrictBody(BaseModel):
    """Fields of exactly the declared types, and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


Body = TypeVar("Body", bound=StrictBody)


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, _only(False)] = None
    continuous_usage_stats: Annotated[bool | None, _only(False)] = None


class CompletionRequest(StrictBody):
    """The body of POST /v1/completions. None stands for "not given" throughout; the defaults are SamplingParams'."""

    model: str | None = None
    prompt: Annotated[Any, PlainValidator(parse_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Annotated[Int64, AfterValidator(_parse_top_k)] | None = None
    min_p: Float | None = None
    seed: Int64 | None = None
    stop: Annotated[Any, PlainValidator(_parse_stop), WithJsonSchema(_STOP_SCHEMA)] = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Int64, Field(ge=1, le=MAX_N)] | None = None
    best_of: Int64 | None = None
    cache_salt: CacheSalt | None = None
    return_cache_info: bool | None = None
    priority: Int64 | None = None
    rope_growth: Literal["reserve", "recompute"] | None = None
    user: str | None = None

    echo: Annotated[bool | None, _only(False)] = None
    logprobs: Annotated[Any, _only(None)] = None
    suffix: Annotated[Any, _only(None)] = None
    logit_bias: Annotated[dict[str, Any] | None, _only({})] = None
    presence_penalty: Annotated[Float | None, _only(0)] = None
    frequency_penalty: Annotated[Float | None, _only(0)] = None
    repetition_penalty: Annotated[Float | None, _only(1)] = None

    @property
    def prompts(self) -> Prompts:
        prompts: Prompts = self.prompt
        return prompts

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """For each prompt."""
        return self.n or 1

    def sampling_params(self) -> tuple[SamplingParams, ...]:
        """One for each choice of a prompt; choice i draws from seed + i. Raises InvalidRequestError for a value out of range."""
        given = {name: value for name in _PLAIN_SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        first = SamplingParams(**given, stop=self.stop, stop_token_ids=tuple(self.stop_token_ids or ()))
        return tuple(replace(first, seed=_nth_seed(first.seed, index)) for index in range(self.num_choices))


def _nth_seed(seed: int | None, index: int) -> int | None:
    """seed + index, going round from the largest 64-bit integer to the smallest."""
    return None if seed is None else (seed + index - MIN_SEED) % 2**64 + MIN_SEED


_PLAIN_SAMPLING_FIELDS = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")


def parse_body(kind: type[Body], body: object) -> Body:
    """Raises InvalidRequestError naming the first field at fault, in a message that stays short whatever was sent."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    if len(body) > _MAX_FIELDS:
        raise InvalidRequestError(f"the request body has {len(body)} fields, more than there are")
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        raise _invalid(exc.errors(include_url=False, include_input=False)[0]) from None


def parse_completion_request(body: object) -> CompletionRequest:
    """Raises InvalidRequestError as ``parse_body`` does."""
    request = parse_body(CompletionRequest, body)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    _check_choices(request)
    return request


def _check_choices(request: CompletionRequest) -> None:
    n, num_prompts = request.num_choices, len(request.prompts)
    if n * num_prompts > MAX_PROMPTS:
        raise InvalidRequestError(
            f"n {n} of {num_prompts} prompts makes {n * num_prompts} choices; at most {MAX_PROMPTS} are answered at once",
            param="n",
        )
    if request.best_of is not None and request.best_of != n:
        raise InvalidRequestError(
            f"best_of {request.best_of} with n {n} asks to choose among candidates, which is not supported; leave best_of out",
            param="best_of",
        )


def _invalid(error: ErrorDetails) -> InvalidRequestError:
    param = ".".join(str(part)[:_MAX_NAME_LEN] for part in error["loc"])
    message = _MESSAGES.get(error["type"], _plain_message)(param, error["msg"])
    return InvalidRequestError(message, param=param)


def _plain_message(param: str, message: str) -> str:
    """pydantic says "Input should be a valid integer"; the reader wants to know which input."""
    subject, _, rest = message.partition(" should ")
    return f"{param} must {rest}" if subject == "Input" else f"{param}: {message}"


_MESSAGES: dict[str, Callable[[str, str], str]] = {
    "missing": lambda param, _: f"{param} is required",
    "extra_forbidden": lambda param, _: f"unknown field: {param}",
    "refused": lambda _, message: message,
}


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """``cached_tokens`` counts prompt tokens that were really served from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CacheInfo(msgspec.Struct, frozen=True):
    """The prompt's tokens by where they came from, as far as the caller may know: what is cached for others is ``unseen``.

    ``rope_class`` names the rotation that the request's length was given; blocks are shared within it.
    """

    device: int
    host: int
    disk: int
    in_flight: int
    evicted: int
    unseen: int
    evicted_seconds: float | None
    rope_class: str | None


class Choice(msgspec.Struct, frozen=True):
    """``finish_reason`` is null in a stream until the last chunk of this index, which has ``cache_info`` if it was asked for."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: None = None
    cache_info: CacheInfo | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, or one chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    object: str = "text_completion"
