"""Token ids to text: whole (``join_tokens``) and incrementally, by the same bytes. Knows no vocabulary file.

``ByteDetokenizer`` serves every tokenizer whose tokens stand for bytes of their own (byte-level BPE, byte fallback).
``WindowDetokenizer`` serves the others, whose decoder only ever appends, through the library's own decode.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_ESCAPED_TO_REPLACEMENT = {0xDC80 + byte: 0xFFFD for byte in range(128)}
_MAX_INCOMPLETE_BYTES = 3  # of a UTF-8 sequence


class TokenBytes(Protocol):
    """The bytes that each token adds to a text; b"" for ids without a meaning.

    ``replace_each_byte`` says how invalid UTF-8 shows: one U+FFFD for each byte (SentencePiece), or one for each
    truncated character (byte-level BPE; Unicode's "maximal subpart").
    """

    replace_each_byte: bool

    def inner(self, token_id: int) -> bytes:
        """Bytes of a token that follows text."""

    def first(self, token_id: int) -> bytes:
        """Bytes of a token that no text precedes; SentencePiece drops a space there."""

    def begins_text(self, token_id: int) -> bool:
        """Whether a token that no text precedes counts as text for the one behind it."""


class Utf8Decoder:
    """UTF-8 in pieces cut anywhere; the result does not depend on the cuts."""

    def __init__(self, replace_each_byte: bool) -> None:
        self._escapes = replace_each_byte
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape" if replace_each_byte else "replace")

    def decode(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        return text.translate(_ESCAPED_TO_REPLACEMENT) if self._escapes and not text.isascii() else text


def join_tokens(source: TokenBytes, token_ids: Sequence[int]) -> str:
    """The text of a whole sequence; the caller has taken special tokens out if they are not to show."""
    parts: list[bytes] = []
    at_start = True
    for token_id in token_ids:
        parts.append(source.first(token_id) if at_start else source.inner(token_id))
        at_start = at_start and not source.begins_text(token_id)
    return Utf8Decoder(source.replace_each_byte).decode(b"".join(parts), final=True)


class ByteDetokenizer:
    """Exact and constant in cost: the state is at most three bytes and whether any text came before."""

    def __init__(self, source: TokenBytes, is_special: Callable[[int], bool], prompt_token_ids: Sequence[int]) -> None:
        self._source = source
        self._is_special = is_special
        self._decoder = Utf8Decoder(source.replace_each_byte)
        self._decoder.decode(self._incomplete_tail(prompt_token_ids))
        self._at_start = not any(not is_special(i) and source.begins_text(i) for i in prompt_token_ids)

    def push(self, token_id: int) -> str:
        if self._is_special(token_id):
            return ""
        if not self._at_start:
            return self._decoder.decode(self._source.inner(token_id))
        self._at_start = not self._source.begins_text(token_id)
        return self._decoder.decode(self._source.first(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _incomplete_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """From the last lead byte near the prompt's end; a character that is complete there decodes to nothing kept."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _MAX_INCOMPLETE_BYTES:
                break
            if not self._is_special(token_id):
                tail = self._source.inner(token_id) + tail
        for start in range(len(tail) - 1, max(len(tail) - 1 - _MAX_INCOMPLETE_BYTES, -1), -1):
            if tail[start] >= 0xC0:
                return tail[start:]
        return b""


class WindowDetokenizer:
    """Decodes each token behind the last visible one. For decoders that append to what one visible token back shows.

    ``decode`` maps visible ids to text. Such decoders know whole pieces only, so no character is ever incomplete.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], is_visible: Callable[[int], bool], prompt_token_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        self._is_visible = is_visible
        last = next((i for i in reversed(prompt_token_ids) if is_visible(i)), None)
        self._window = [] if last is None else [last]

    def push(self, token_id: int) -> str:
        if not self._is_visible(token_id):
            return ""
        before = self._decode(self._window)
        after = self._decode([*self._window, token_id])
        assert after.startswith(before), "a decoder that rewrites earlier text was let in"
        self._window = [token_id]
        return after[len(before) :]

    def finish(self) -> str:
        return ""
