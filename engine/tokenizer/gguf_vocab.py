"""The vocabulary inside a GGUF file, as one checked value. Knows the tokenizer.ggml keys; builds no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine.errors import DamagedModelError

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """GGUF's token types; SentencePiece numbers them the same way."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """``tokens``, ``token_types`` and (unless empty) ``scores`` have one entry for each id.

    The ``add_*`` and ``remove_*`` fields are None where the file leaves them to the tokenizer's kind.
    """

    model: str
    pre: str | None
    tokens: list[str]
    token_types: list[TokenType]
    scores: list[float]
    merges: list[str]
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_space_prefix: bool | None
    remove_extra_whitespaces: bool | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> GgufVocab:
        """Raises DamagedModelError (naming no file): a key is missing, mistyped, or at odds with the number of tokens."""
        keys = _Keys(metadata)
        tokens = keys.strings("tokens")
        if not tokens:
            raise DamagedModelError(f"no vocabulary ({_PREFIX}tokens)")
        return cls(
            model=keys.required_string("model"),
            pre=keys.optional("pre", str),
            tokens=tokens,
            token_types=keys.token_types(len(tokens)),
            scores=keys.scores(len(tokens)),
            merges=keys.strings("merges"),
            bos_token_id=keys.token_id("bos_token_id", len(tokens)),
            eos_token_id=keys.token_id("eos_token_id", len(tokens)),
            unknown_token_id=keys.token_id("unknown_token_id", len(tokens)),
            add_bos_token=keys.optional("add_bos_token", bool),
            add_eos_token=keys.optional("add_eos_token", bool),
            add_space_prefix=keys.optional("add_space_prefix", bool),
            remove_extra_whitespaces=keys.optional("remove_extra_whitespaces", bool),
        )


class _Keys:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def optional(self, name: str, kind: type) -> Any:
        value = self._metadata.get(_PREFIX + name)
        if value is not None and type(value) is not kind:
            raise self._damaged(name, f"is not of type {kind.__name__}")
        return value

    def required_string(self, name: str) -> str:
        value = self.optional(name, str)
        if value is None:
            raise self._damaged(name, "is missing")
        return str(value)

    def strings(self, name: str) -> list[str]:
        value: list[str] = self.optional(name, list) or []
        if value and type(value[0]) is not str:
            raise self._damaged(name, "is not a list of strings")
        return value

    def scores(self, num_tokens: int) -> list[float]:
        value: list[float] = self.optional("scores", list) or []
        if value and (type(value[0]) is not float or len(value) != num_tokens):
            raise self._damaged("scores", f"is not a list of {num_tokens} floats")
        return value

    def token_types(self, num_tokens: int) -> list[TokenType]:
        value = self.optional("token_type", list)
        if value is None:
            return [TokenType.NORMAL] * num_tokens
        if len(value) != num_tokens:
            raise self._damaged("token_type", f"has {len(value)} entries for {num_tokens} tokens")
        by_number = {int(kind): kind for kind in TokenType}
        if not by_number.keys() >= set(value):
            raise self._damaged("token_type", f"holds an unknown type, {min(set(value) - by_number.keys())}")
        return [by_number[number] for number in value]

    def token_id(self, name: str, num_tokens: int) -> int | None:
        value: int | None = self.optional(name, int)
        if value is not None and not 0 <= value < num_tokens:
            raise self._damaged(name, f"is {value}, outside the {num_tokens} tokens")
        return value

    def _damaged(self, name: str, what: str) -> DamagedModelError:
        return DamagedModelError(f"{_PREFIX}{name} {what}")
