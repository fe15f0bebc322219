"""A tokenizer from the vocabulary inside a GGUF file, whose weights are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from engine.errors import DamagedModelError, UnsupportedModelError
from engine.gguf_file import read_gguf_header
from engine.tokenizer.base import Affixes, Tokenizer
from engine.tokenizer.gguf_vocab import GgufVocab, TokenType
from engine.tokenizer.library import ByteLevelBytes, LibraryTokenizer
from engine.tokenizer.naming import errors_naming
from engine.tokenizer.pretokenizers import recipe_for
from engine.tokenizer.spm import SentencePieceTokenizer, empty_model


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf_header(path).metadata
    with errors_naming(path):
        vocab = GgufVocab.from_metadata(metadata)
        if vocab.model == "gpt2":
            return _byte_level(vocab)
        if vocab.model == "llama":
            return _sentencepiece(vocab)
        raise UnsupportedModelError(
            f"tokenizer {vocab.model!r} (tokenizer.ggml.model) is not supported; supported: gpt2, llama"
        )


def _byte_level(vocab: GgufVocab) -> Tokenizer:
    recipe = recipe_for(vocab.pre)
    backend = tokenizers.Tokenizer(_merging_model(vocab, recipe.ignore_merges))
    backend.pre_tokenizer = recipe.split()
    backend.decoder = decoders.ByteLevel()
    if recipe.normalizer is not None:
        backend.normalizer = recipe.normalizer()
    backend.add_special_tokens(_added(vocab, TokenType.CONTROL) + _added(vocab, TokenType.UNKNOWN))
    backend.add_tokens(_added(vocab, TokenType.USER_DEFINED))
    return LibraryTokenizer(
        backend,
        ByteLevelBytes(backend.id_to_token),
        affixes=_affixes(vocab, recipe.add_bos_token),
        bos_token_id=vocab.bos_token_id,
        eos_token_id=vocab.eos_token_id,
    )


def _merging_model(vocab: GgufVocab, ignore_merges: bool) -> models.BPE:
    if not vocab.merges:
        raise DamagedModelError("tokenizer.ggml.merges is missing")
    ids = {token: i for i, token in enumerate(vocab.tokens)}
    if len(ids) != len(vocab.tokens):
        raise DamagedModelError(f"{len(vocab.tokens) - len(ids)} tokens stand twice in tokenizer.ggml.tokens")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocab.merges)]
    try:
        return models.BPE(ids, merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise DamagedModelError(f"tokenizer.ggml.merges: {error}") from None


def _added(vocab: GgufVocab, kind: TokenType) -> list[AddedToken]:
    special = kind is not TokenType.USER_DEFINED
    pairs = zip(vocab.tokens, vocab.token_types, strict=True)
    return [AddedToken(token, normalized=False, special=special) for token, own_kind in pairs if own_kind is kind]


def _affixes(vocab: GgufVocab, add_bos_by_default: bool) -> Affixes:
    add_bos = add_bos_by_default if vocab.add_bos_token is None else vocab.add_bos_token
    before = _existing(vocab.bos_token_id, "bos_token_id") if add_bos else ()
    return Affixes(before, _existing(vocab.eos_token_id, "eos_token_id") if vocab.add_eos_token else ())


def _existing(token_id: int | None, name: str) -> tuple[int]:
    if token_id is None:
        raise DamagedModelError(f"tokenizer.ggml.{name} is missing, but is to be put around prompts")
    return (token_id,)


def _sentencepiece(vocab: GgufVocab) -> Tokenizer:
    affixes = _affixes(vocab, add_bos_by_default=vocab.bos_token_id is not None)
    return SentencePieceTokenizer(
        _proto(vocab),
        affixes=affixes,
        bos_token_id=vocab.bos_token_id,
        eos_token_id=vocab.eos_token_id,
        cut_at_user_defined=True,
    )


def _proto(vocab: GgufVocab) -> Any:
    """The ModelProto that a "llama" vocabulary was made from: BPE by score, text otherwise untouched."""
    if not vocab.scores:
        raise DamagedModelError("tokenizer.ggml.scores is missing")
    types = list(vocab.token_types)
    if TokenType.UNKNOWN not in types:
        types[_existing_unknown(vocab)] = TokenType.UNKNOWN
    model = empty_model()
    for token, score, kind in zip(vocab.tokens, vocab.scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=int(kind))
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = TokenType.BYTE in types
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = vocab.add_space_prefix is not False
    model.normalizer_spec.remove_extra_whitespaces = vocab.remove_extra_whitespaces is True
    return model


def _existing_unknown(vocab: GgufVocab) -> int:
    if vocab.unknown_token_id is None:
        raise DamagedModelError("the vocabulary has no unknown token")
    return vocab.unknown_token_id
