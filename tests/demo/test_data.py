"""The corpus: Debian's container of the Bible, passkey documents, and rows that depend on nothing but seed and step."""

from __future__ import annotations

import itertools
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from engine.demo.data import Corpus, bible_chapters, bible_text, load_corpus, passkey_document
from engine.demo.tokens import BOS, EOS, Batches, encode_corpus, held_out_rows, train_tokenizer
from engine.errors import DamagedModelError


def compressed(text: bytes) -> bytes:
    """compress(1)'s format of under 255 bytes: every byte as itself, a code of 9 bits, after the magic."""
    assert len(text) < 255
    bits = "".join(f"{byte:09b}"[::-1] for byte in text)
    return b"\x1f\x9d\x90" + bytes(int(bits[i : i + 8].ljust(8, "0")[::-1], 2) for i in range(0, len(bits), 8))


def container(windows: list[bytes]) -> bytes:
    first, *others = (compressed(window) for window in windows)
    parts = [first[3:], *(other[3:] for other in others)]
    start = 0x5C + 4 * (len(parts) + 1) + 3
    offsets = list(itertools.accumulate((len(part) for part in parts), initial=start))
    head = b"EC02Compressed Data File".ljust(0x54, b"\0") + struct.pack(">II", 65536, len(parts))
    return head + struct.pack(f">{len(offsets)}I", *offsets) + first[:3] + b"".join(parts)


def test_the_bible_out_of_debians_container() -> None:
    text = "A Title.\nGe1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus the heavens.\n1Jn1:1 That which was.\n"
    windows = [text[i : i + 40].encode() for i in range(0, len(text), 40)]
    assert bible_text(container(windows)) == text
    assert bible_chapters(text) == ["In the beginning.\nAnd the earth.", "Thus the heavens.", "That which was."]


def test_another_file_is_not_taken_for_it() -> None:
    with pytest.raises(DamagedModelError, match=r"bible\.data"):
        bible_text(b"something else")


def test_every_twentieth_document_of_each_text_is_held_out(tmp_path: Path) -> None:
    for name in ("sotu", "moby-dick-chapters", "bible"):
        (tmp_path / f"{name}.json").write_text(json.dumps([f"{name} {i}" for i in range(45)]))
    corpus = load_corpus(tmp_path)
    assert set(corpus.held_out) == {f"{name} {i}" for name in ("sotu", "moby-dick-chapters", "bible") for i in (19, 39)}
    assert len(corpus.train) == 3 * 43
    assert not set(corpus.train) & set(corpus.held_out)


def test_a_passkey_stands_where_it_is_put() -> None:
    document = passkey_document(random.Random(3), 2, 1)
    before, after = document.text.split(f"The pass key is {document.key}. Remember it. {document.key} is the pass key.")
    assert (before.count("The grass is green."), after.count("The grass is green.")) == (2, 1)
    assert after.endswith("What is the pass key? The pass key is")
    assert len(document.key) == 5


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    rng = random.Random(1)
    words = ["whale", "people", "government", "lord", "sea", "nation", "and", "of", "the", "unto", "ship", "earth"]
    texts = [" ".join(rng.choices(words, k=300)) + "." for _ in range(12)]
    return Corpus(tuple(texts[:10]), tuple(texts[10:]))


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(corpus, path, 400)
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def test_rows_depend_on_seed_and_step_alone(corpus: Corpus, tokenizer: sentencepiece.SentencePieceProcessor) -> None:
    stream = encode_corpus(tokenizer, corpus).train
    batches = Batches(stream, tokenizer, 256, seed=1)
    first, second = batches.batch(0, 4), batches.batch(1, 4)
    assert first.shape == (4, 257)
    assert not first.equal(second)
    assert Batches(stream, tokenizer, 256, seed=1).batch(1, 4).equal(second)
    assert not Batches(stream, tokenizer, 256, seed=2).batch(1, 4).equal(second)
    assert (first[:, 0] == BOS).all()


def test_one_row_in_twenty_is_a_whole_passkey_document(corpus: Corpus, tokenizer: sentencepiece.SentencePieceProcessor) -> None:
    stream = encode_corpus(tokenizer, corpus).train
    texts = [tokenizer.decode(row) for row in Batches(stream, tokenizer, 256, seed=1).batch(0, 1000).tolist()]
    passkeys = [text for text in texts if "pass key" in text]
    assert 30 <= len(passkeys) <= 75
    for text in passkeys:
        key = text.split("Remember it. ")[1][:5]
        assert text.split("What is the pass key? The pass key is ")[1].startswith(key)


def test_a_document_ends_with_eos_and_windows_are_held_out_evenly(
    corpus: Corpus, tokenizer: sentencepiece.SentencePieceProcessor
) -> None:
    streams = encode_corpus(tokenizer, corpus)
    assert (streams.train == EOS).sum() == 10
    assert streams.train[-1] == EOS
    rows = held_out_rows(streams.held_out, 64, 5)
    assert rows.shape == (5, 65)
    assert np.array_equal(rows[0, 1:], streams.held_out[:64])
    assert np.array_equal(rows[-1, 1:], streams.held_out[-64:])
