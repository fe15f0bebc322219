"""Tokenizers that the tokenizers library runs. Knows the library's parts, not the files they came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from engine.errors import UnsupportedModelError
from engine.tokenizer.base import Affixes, IncrementalDetokenizer, Tokenizer
from engine.tokenizer.detokenizer import ByteDetokenizer, TokenBytes, WindowDetokenizer, join_tokens
from engine.tokenizer.pieces import PieceBytes, SpaceRule

_APPENDING_DECODERS = ("BPEDecoder", "Metaspace", "WordPiece")


class LibraryTokenizer(Tokenizer):
    """``affixes`` None leaves the special tokens around a prompt to the library's post-processor.

    ``token_bytes`` None says that the decoder is not a matter of bytes but of whole pieces appended.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        token_bytes: TokenBytes | None,
        *,
        affixes: Affixes | None,
        bos_token_id: int | None,
        eos_token_id: int | None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes = token_bytes
        self._affixes = affixes
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._affixes is None or not add_special_tokens:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._affixes.around(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [i for i in token_ids if not (skip_special_tokens and i in self._special)]
        return self._decode_visible(shown) if self._bytes is None else join_tokens(self._bytes, shown)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        if self._bytes is None:
            return WindowDetokenizer(self._decode_visible, self._is_visible, prompt_token_ids)
        return ByteDetokenizer(self._bytes, self.is_special, prompt_token_ids)

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._special and token_id < self.vocab_size

    def _decode_visible(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


class ByteLevelBytes:
    """GPT-2's alphabet: each byte is one printable character. Tokens with others in them stand for their UTF-8."""

    replace_each_byte = False

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        self._token_of = token_of
        self._cache: dict[int, bytes] = {}

    def inner(self, token_id: int) -> bytes:
        data = self._cache.get(token_id)
        if data is None:
            data = self._cache[token_id] = _from_byte_alphabet(self._token_of(token_id) or "")
        return data

    def first(self, token_id: int) -> bytes:
        return self.inner(token_id)

    def begins_text(self, token_id: int) -> bool:
        return True


def _byte_alphabet() -> dict[int, int]:
    """Character -> byte. Printable Latin-1 characters are their own byte; the others, in order, start at U+0100."""
    own = {ord(char) for char in ByteLevel.alphabet() if ord(char) < 256}
    moved = [byte for byte in range(256) if byte not in own]
    return {byte: byte for byte in own} | {256 + i: byte for i, byte in enumerate(moved)}


_ALPHABET = _byte_alphabet()


def _from_byte_alphabet(token: str) -> bytes:
    data = [_ALPHABET.get(ord(char)) for char in token]
    known = [byte for byte in data if byte is not None]
    return bytes(known) if len(known) == len(data) else token.encode()


def token_bytes_for(backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> TokenBytes | None:
    """Reads the "decoder" of a tokenizer.json; None where it appends whole pieces.

    Byte-fallback decoders show valid characters among invalid bytes, as SentencePiece does; the library would turn the
    whole run of byte tokens into U+FFFD, so that text already streamed would have to be taken back.

    Raises:
        UnsupportedModelError: the decoder may rewrite earlier text, or is not known.
    """
    kind = None if decoder is None else decoder.get("type")
    if decoder is None or (kind in _APPENDING_DECODERS and not decoder.get("cleanup")):
        return None
    if kind == "ByteLevel":
        return ByteLevelBytes(backend.id_to_token)
    if kind == "Sequence" and (spaces := _byte_fallback_spaces(decoder.get("decoders", []))) is not None:
        return PieceBytes(_piece_lookup(backend.id_to_token), spaces)
    raise UnsupportedModelError(f"tokenizer.json: decoder {_names(decoder)} is not supported")


def _byte_fallback_spaces(steps: list[dict[str, Any]]) -> SpaceRule | None:
    """The space rule of Replace, ByteFallback, Fuse and perhaps Strip, in this order; None for anything else."""
    if [step.get("type") for step in steps[:3]] != ["Replace", "ByteFallback", "Fuse"] or len(steps) > 4:
        return None
    if steps[0].get("pattern") != {"String": "▁"} or steps[0].get("content") != " ":
        return None
    if len(steps) == 3:
        return SpaceRule.KEEP
    strip = {key: steps[3].get(key) for key in ("type", "content", "start", "stop")}
    return SpaceRule.DROP_ONE if strip == {"type": "Strip", "content": " ", "start": 1, "stop": 0} else None


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _piece_lookup(token_of: Callable[[int], str | None]) -> Callable[[int], str | int]:
    def piece(token_id: int) -> str | int:
        token = token_of(token_id) or ""
        match = _BYTE_TOKEN.fullmatch(token)
        return token if match is None else int(match[1], 16)

    return piece


def _names(decoder: dict[str, Any]) -> str:
    steps = decoder.get("decoders") or []
    return str(decoder.get("type")) + (f" of {', '.join(str(step.get('type')) for step in steps)}" if steps else "")
