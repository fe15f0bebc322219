"""Pieces in SentencePiece's writing ("▁" for a space, bytes as tokens of their own) to bytes of text."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto


class SpaceRule(Enum):
    """What becomes of spaces where a text begins: encoding has put one there that is not in the text.

    DROP_ONE takes one from the first piece, DROP_ALL one from each piece until something is left of one.
    """

    KEEP = auto()
    DROP_ONE = auto()
    DROP_ALL = auto()


class PieceBytes:
    """``piece`` gives an id's piece, or its byte (0-255) for byte tokens; "" for ids without a meaning.

    A space is only dropped from a piece, never a byte token, as in SentencePiece. An id without a meaning is no text:
    the one behind it may still lose its space.
    """

    replace_each_byte = True

    def __init__(self, piece: Callable[[int], str | int], spaces: SpaceRule) -> None:
        self._piece = piece
        self._spaces = spaces
        self._cache: dict[int, bytes] = {}

    def inner(self, token_id: int) -> bytes:
        data = self._cache.get(token_id)
        if data is None:
            piece = self._piece(token_id)
            data = bytes([piece]) if isinstance(piece, int) else piece.replace("▁", " ").encode()
            self._cache[token_id] = data
        return data

    def first(self, token_id: int) -> bytes:
        data = self.inner(token_id)
        if self._spaces is SpaceRule.KEEP or isinstance(self._piece(token_id), int):
            return data
        return data.removeprefix(b" ")

    def begins_text(self, token_id: int) -> bool:
        return bool(self.first(token_id) if self._spaces is SpaceRule.DROP_ALL else self.inner(token_id))
