"""From documents to batches of tokens: the SentencePiece model, the training stream, the passkey rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece
import torch

from engine.demo.data import Corpus, passkey_document, pieces

BOS, EOS = 1, 2
PASSKEY_SHARE = 0.05
MAX_FILLERS = 5


def train_tokenizer(corpus: Corpus, path: Path, vocab_size: int) -> None:
    """Write a BPE model with byte fallback; numbers fall into digits. ``path`` ends with ".model"."""
    rng = random.Random(0)
    passkeys = [passkey_document(rng, 1, 1).text for _ in range(50)]  # so that their words are tokens
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*pieces(corpus.train), *passkeys]),
        model_prefix=str(path.with_suffix("")),
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.9995,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    path.with_suffix(".vocab").unlink()


@dataclass(frozen=True, slots=True)
class TokenStreams:
    """Documents as tokens, one after the other with EOS behind each. uint16 [tokens]."""

    train: npt.NDArray[np.uint16]
    held_out: npt.NDArray[np.uint16]


def encode_corpus(tokenizer: sentencepiece.SentencePieceProcessor, corpus: Corpus) -> TokenStreams:
    return TokenStreams(_stream(tokenizer, corpus.train), _stream(tokenizer, corpus.held_out))


def _stream(tokenizer: sentencepiece.SentencePieceProcessor, documents: Sequence[str]) -> npt.NDArray[np.uint16]:
    ids = [token for document in tokenizer.encode(list(documents)) for token in (*document, EOS)]
    return np.array(ids, dtype=np.uint16)


class Batches:
    """Rows of BOS and a window of the training stream, or, one in twenty, a passkey document that the stream fills up.

    What a step gets depends on the seed and its number alone: a run that was cut goes on as if it had not been.
    """

    def __init__(
        self, stream: npt.NDArray[np.uint16], tokenizer: sentencepiece.SentencePieceProcessor, context_len: int, seed: int
    ) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._context_len = context_len
        self._seed = seed

    def batch(self, step: int, num_rows: int) -> torch.Tensor:
        """int64 [num_rows, context_len + 1]: inputs, and one column on the targets."""
        rng = random.Random(f"{self._seed} {step}")
        return torch.tensor([self._row(rng) for _ in range(num_rows)])

    def _row(self, rng: random.Random) -> list[int]:
        start = rng.randrange(len(self._stream) - self._context_len)
        window = self._stream[start : start + self._context_len].tolist()
        head = self._passkey(rng) if rng.random() < PASSKEY_SHARE else []
        return [BOS, *head, *window][: self._context_len + 1]

    def _passkey(self, rng: random.Random) -> list[int]:
        """A whole document with as many fillers as still fit, of a random number that is wanted; the key at a random depth."""
        for num_fillers in range(rng.randint(0, MAX_FILLERS), -1, -1):
            num_before = rng.randint(0, num_fillers)
            document = passkey_document(rng, num_before, num_fillers - num_before)
            ids: list[int] = self._tokenizer.encode(f"{document.text} {document.key}")
            if len(ids) + 2 <= self._context_len:
                return [*ids, EOS]
        return []


def held_out_rows(stream: npt.NDArray[np.uint16], context_len: int, num_rows: int) -> torch.Tensor:
    """int64 [rows, context_len + 1]: evenly spaced windows of the stream, behind BOS."""
    starts = np.linspace(0, len(stream) - context_len, num_rows).astype(int)
    return torch.tensor([[BOS, *stream[start : start + context_len].tolist()] for start in starts])
