"""Tokenizers that the sentencepiece library runs. Knows the ModelProto, not the files it came from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from engine.errors import DamagedModelError, UnsupportedModelError
from engine.tokenizer.base import Affixes, IncrementalDetokenizer, Tokenizer
from engine.tokenizer.detokenizer import ByteDetokenizer, join_tokens
from engine.tokenizer.gguf_vocab import TokenType
from engine.tokenizer.pieces import PieceBytes, SpaceRule

_proto: Any = sentencepiece_model_pb2  # generated code without types
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that a folder's JSON files put beside, or behind, the vocabulary of its tokenizer.model."""

    content: str
    special: bool


class SentencePieceTokenizer(Tokenizer):
    """Text is cut at special (and added) tokens first; each part between them is encoded like a text of its own.

    ``model`` is a ModelProto. ``cut_at_user_defined`` counts its user-defined pieces among the added tokens, as
    llama.cpp does; SentencePiece itself matches them inside a part, after the space that it puts in front.

    Raises:
        DamagedModelError, UnsupportedModelError: naming no file.
    """

    def __init__(
        self,
        model: Any,
        *,
        affixes: Affixes,
        bos_token_id: int | None,
        eos_token_id: int | None,
        added: Mapping[int, AddedToken] | None = None,
        cut_at_user_defined: bool = False,
    ) -> None:
        self._processor = _load(model)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._affixes = affixes
        self._pieces: list[str] = [piece.piece for piece in model.pieces]
        types: list[int] = [piece.type for piece in model.pieces]
        self._bytes_of = {i: int(self._pieces[i][1:-1], 16) for i, kind in enumerate(types) if kind == TokenType.BYTE}
        cut_at = (*_SPECIAL, TokenType.USER_DEFINED) if cut_at_user_defined else _SPECIAL
        self._special = {i for i, kind in enumerate(types) if kind in _SPECIAL}
        self._atoms = {self._pieces[i].replace("▁", " "): i for i, kind in enumerate(types) if kind in cut_at}
        self._add(added or {})
        self.vocab_size = len(self._pieces)
        self._cuts = _alternation(self._atoms)
        self._bytes = PieceBytes(self._piece, _space_rule(model.normalizer_spec))

    def _add(self, added: Mapping[int, AddedToken]) -> None:
        size = max([len(self._pieces), *(i + 1 for i in added)])
        self._pieces += [""] * (size - len(self._pieces))
        for token_id, token in added.items():
            self._pieces[token_id] = token.content
            self._atoms[token.content] = token_id
            if token.special:
                self._special.add(token_id)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for part in self._cuts.split(text) if self._cuts else [text]:
            if part in self._atoms:
                ids.append(self._atoms[part])
            elif part:
                ids += self._processor.encode(part)
        return self._affixes.around(ids) if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return join_tokens(self._bytes, [i for i in token_ids if not (skip_special_tokens and i in self._special)])

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        return ByteDetokenizer(self._bytes, self.is_special, prompt_token_ids)

    def _piece(self, token_id: int) -> str | int:
        if token_id in self._bytes_of:
            return self._bytes_of[token_id]
        return self._pieces[token_id] if token_id < len(self._pieces) else ""


def empty_model() -> Any:
    """A ModelProto to be filled."""
    return _proto.ModelProto()


def parse_model(data: bytes) -> Any:
    """A ModelProto. Raises DamagedModelError without naming a file."""
    model = empty_model()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError, whose module differs between its versions
        raise DamagedModelError(f"not a SentencePiece model: {error}") from None
    if not model.pieces:
        raise DamagedModelError("not a SentencePiece model: it has no pieces")
    return model


def _load(model: Any) -> Any:
    _refuse_unsupported(model)
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    except (RuntimeError, OSError) as error:
        raise DamagedModelError(f"not a usable SentencePiece vocabulary: {error}") from None


def _refuse_unsupported(model: Any) -> None:
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise UnsupportedModelError("SentencePiece models with treat_whitespace_as_suffix are not supported")
    if not model.normalizer_spec.escape_whitespaces:
        raise UnsupportedModelError("SentencePiece models without escape_whitespaces are not supported")
    if model.denormalizer_spec.precompiled_charsmap:
        raise UnsupportedModelError("SentencePiece models with a denormalizer are not supported")


def _space_rule(normalizer_spec: Any) -> SpaceRule:
    if normalizer_spec.remove_extra_whitespaces:
        return SpaceRule.DROP_ALL
    return SpaceRule.DROP_ONE if normalizer_spec.add_dummy_prefix else SpaceRule.KEEP


def _alternation(atoms: Mapping[str, int]) -> re.Pattern[str] | None:
    """Matches the longest atom; in a group, so that ``split`` keeps it."""
    longest_first = sorted((atom for atom in atoms if atom), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
