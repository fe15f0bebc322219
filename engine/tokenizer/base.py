"""What every tokenizer offers, whatever file it came from. Knows nothing of stop strings, requests or HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import InvalidRequestError


class IncrementalDetokenizer(Protocol):
    """Turns the tokens of one output into text, one token at a time.

    With C the prompt's text less an incomplete character at its end, C + all deltas + ``finish()`` is the decoding of
    prompt + output. So an output that continues a prompt keeps its leading space, and the bytes of a character that
    the prompt left open belong to the output. Special tokens give no text. Constant cost per token.
    """

    def push(self, token_id: int) -> str:
        """The text that became final with this token: "" while a character is incomplete."""

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character. Called once, after the last token."""


@dataclass(frozen=True, slots=True)
class Affixes:
    """Special tokens that belong around a prompt."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def around(self, token_ids: list[int]) -> list[int]:
        return [*self.before, *token_ids, *self.after]


class Tokenizer(ABC):
    """Text to token ids and back. Immutable, so that any number of requests may share one.

    ``vocab_size`` is one more than the largest id that has a meaning here; the model's own vocabulary may be padded
    beyond it. Ids without a meaning decode to nothing.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. The text of a special token is read as that token, as transformers does.

        ``add_special_tokens`` adds what the model's own files say belongs around a prompt (a BOS token, or nothing).

        Raises:
            InvalidRequestError: the text holds a lone surrogate.
        """
        _check_encodable(text)
        return self._encode(text, add_special_tokens)

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a sequence that starts here. Invalid UTF-8 shows as U+FFFD; never raises for ids >= 0."""

    @abstractmethod
    def is_special(self, token_id: int) -> bool:
        """True for control tokens: ids that structure the input and never show as text."""

    @abstractmethod
    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        """A fresh detokenizer for one output that continues ``prompt_token_ids``."""


def _check_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise InvalidRequestError(f"prompt is not valid text: lone surrogate {where}", param="prompt") from None
