"""The default model's vocabulary, out of its GGUF, against transformers' reading of the same file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "The quick  brown   fox\tjumps\n\nover\r\n the lazy dog.   ",
    'def f(x: int) -> str:\n    return f"{x!r}"  # note\n\n\nclass A(B):\n\tpass\n',
    "for (int i = 0; i < n; ++i) { a[i] <<= 0x1F; }\n",
    "I'll don't WE'VE they're it's 'tis o'clock",
    "3.14159 2024-11-30 1,000,000 x2y3",
    "日本語のテキスト、你好世界。한국어 텍스트",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 emoji 🇩🇪",
    "naïve café Ångström é",
    "Привет, как дела? שלום مرحبا नमस्ते",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <repo_name>x<file_sep> <|im_sta",
    "https://example.org/?q=a%20b&c=d#e  \u00a0\u2003\u200b\ufeff end",
    "\x00\x01\x7f\x80",
    "ﬁ ﷺ ≠ ∑ → ░▒▓",
]


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, local_files_only=True)


@pytest.fixture(scope="module")
def theirs_published(theirs: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """With the pre-tokenizer of the model's own tokenizer.json: transformers ignores ``tokenizer.ggml.pre`` "smollm",
    under which digits stand alone, and so joins the last space of a run to a digit behind it."""
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return theirs


@pytest.mark.parametrize("text", CORPUS)
def test_encodes_and_decodes_as_transformers_does(ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip, clean_up_tokenization_spaces=False)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30) | st.text(st.sampled_from("ab 1 2½Ⅷ٣\n\t'sé日🎉<|>_"), max_size=30))
def test_encodes_any_text_as_the_published_tokenizer(
    ours: Tokenizer, theirs_published: PreTrainedTokenizerBase, text: str
) -> None:
    ids = theirs_published.encode(text)
    assert ours.encode(text) == ids
    detokenizer = ours.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == ours.decode(ids)


def test_a_run_of_spaces_before_a_digit_stays_whole(ours: Tokenizer) -> None:
    assert [ours.decode([i]) for i in ours.encode("a  1")] == ["a", "  ", "1"]


def test_special_tokens_are_known(ours: Tokenizer) -> None:
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (49152, 1, 2)
    assert [i for i in range(ours.vocab_size) if ours.is_special(i)] == list(range(17))
    assert ours.encode("x") == ours.encode("x", add_special_tokens=False)  # add_bos_token is false in this file


def test_opens_without_reading_weights(ours: Tokenizer, smollm2_path: Path, tmp_path: Path) -> None:
    header = tmp_path / "header.gguf"
    header.write_bytes(smollm2_path.read_bytes()[:3_000_000])
    os.truncate(header, smollm2_path.stat().st_size)  # as long as before, but a hole where the weights were
    assert load_tokenizer(header).encode("Hello, world!") == ours.encode("Hello, world!")


def test_long_texts_come_back(ours: Tokenizer) -> None:
    for text in ("a" * 100_000, " " * 100_000, "hello world " * 8_333, "日本語" * 33_333, "1" * 100_000):
        assert ours.decode(ours.encode(text)) == text
