"""How a byte-level vocabulary in a GGUF splits text before merging, by the name that ``tokenizer.ggml.pre`` gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from engine.errors import UnsupportedModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class BpeRecipe:
    """What the vocabulary's own tokenizer.json would say besides the vocabulary.

    ``ignore_merges``: a word that is itself a token is taken whole. ``add_bos_token`` holds where the GGUF is silent.
    """

    split: Callable[[], PreTokenizer]
    normalizer: Callable[[], NFC] | None = None
    ignore_merges: bool = False
    add_bos_token: bool = False


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_gpt2() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _default() -> PreTokenizer:
    """llama.cpp's split for vocabularies that its converter did not recognise."""
    numbers = [_isolate(r"\p{N}+"), _isolate(r"[0-9][0-9][0-9]")]
    return Sequence(
        [_isolate(r"[\p{P}\$\+<=>\^~\|]+"), _isolate(_GPT2), *numbers, ByteLevel(add_prefix_space=False, use_regex=False)]
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _isolate(regex: str) -> PreTokenizer:
    return Split(Regex(regex), behavior="isolated")


def _by_regex(regex: str) -> Callable[[], PreTokenizer]:
    return lambda: Sequence([_isolate(regex), ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3_RECIPE = BpeRecipe(_by_regex(_LLAMA3), ignore_merges=True, add_bos_token=True)
_RECIPES = {
    "default": BpeRecipe(_default),
    "gpt-2": BpeRecipe(_gpt2),
    "llama-bpe": _LLAMA3_RECIPE,
    "llama-v3": _LLAMA3_RECIPE,
    "llama3": _LLAMA3_RECIPE,
    "qwen2": BpeRecipe(_by_regex(_QWEN2), normalizer=NFC),
    "smollm": BpeRecipe(_digits_gpt2),
    "starcoder": BpeRecipe(_digits_gpt2),
    "tekken": BpeRecipe(_by_regex(_TEKKEN), ignore_merges=True, add_bos_token=True),
}


def recipe_for(pre: str | None) -> BpeRecipe:
    """Raises UnsupportedModelError: the name is not known, or missing (another split would give other tokens)."""
    if pre is None:
        raise UnsupportedModelError("the GGUF names no pre-tokenizer (tokenizer.ggml.pre); convert the model anew")
    if pre not in _RECIPES:
        raise UnsupportedModelError(
            f"pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(_RECIPES)}"
        )
    return _RECIPES[pre]
