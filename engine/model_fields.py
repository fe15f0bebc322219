"""Reads a checkpoint's key-value description key by key, and refuses by name whatever nobody has read.

Knows nothing about models: a key is either taken by the caller, declared harmless by the caller, or an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import DamagedModelError, UnsupportedModelError


def shown(value: object) -> str:
    """``value`` as it appears in an error message: one line, at most about 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


class Fields:
    """A mapping with typed getters that remember what was read. ``source`` opens every error message; ``prefix`` goes before
    the keys in messages (where the caller has cut it off).

    A null counts as "not given" in the typed getters. A key that is required and missing, or of the wrong type,
    raises DamagedModelError.
    """

    def __init__(self, source: str, values: Mapping[str, Any], *, prefix: str = "") -> None:
        self.source = source
        self._prefix = prefix
        self._values = values
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """The raw value; ``default`` only where the key is absent (a null is returned as None)."""
        self._taken.add(key)
        return self._values.get(key, default)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number, at least ``minimum``. An integral float counts as whole."""
        value = self._required(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.damaged(f"{self._prefix}{key} must be a whole number, got {shown(value)}")
        if value < minimum:
            raise self.damaged(f"{self._prefix}{key} must be at least {minimum}, got {value}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.take(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.damaged(f"{self._prefix}{key} must be a number, got {shown(value)}")
        if not 0 < value < 1e300:  # false for NaN too
            raise self.damaged(f"{self._prefix}{key} must be positive and finite, got {value}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.damaged(f"{self._prefix}{key} must be true or false, got {shown(value)}")
        return value

    def refuse_rest(self, harmless: Mapping[str, Collection[Any] | None]) -> None:
        """Raise UnsupportedModelError for the first key that was neither taken nor declared harmless, nor null.

        ``harmless`` maps a key to the values that change nothing, or to None where no value does.
        """
        for key, value in self._values.items():
            if key in self._taken or value is None:
                continue
            if key not in harmless:
                raise self.unsupported(key, value)
            allowed = harmless[key]
            if allowed is not None and value not in allowed:
                raise self.unsupported(key, value)

    def unsupported(self, key: str, value: object, hint: str = "") -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.source}: {self._prefix}{key} = {shown(value)} is not supported{hint}")

    def damaged(self, message: str) -> DamagedModelError:
        return DamagedModelError(f"{self.source}: {message}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.take(key)
        if value is None:
            value = default
        if value is None:
            raise self.damaged(f"{self._prefix}{key} is missing")
        return value


def shared_head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    """hidden_size / num_heads, where a description gives no head size of its own."""
    if hidden_size % num_heads:
        raise fields.damaged(
            f"hidden size {hidden_size} is not a multiple of {num_heads} attention heads, and no head_dim is given"
        )
    return hidden_size // num_heads


def token_id(source: str, key: str, value: Any) -> int | None:
    """A token id or None; anything else raises DamagedModelError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DamagedModelError(f"{source}: {key} must hold token ids, got {shown(value)}")
    return value
