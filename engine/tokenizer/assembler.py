"""Token events of one request to the text its reader gets: the one place where text is put together.

Stream and non-stream both use it; the whole answer is the fold of the outputs. Knows nothing of HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import FinishReason, RequestOutput, SamplingParams, TokenEvent
from engine.tokenizer.base import Tokenizer
from engine.tokenizer.stop import StopMatcher


class TextAssembler:
    """One ``RequestOutput`` for each ``TokenEvent``; its ``text`` may be "".

    - A stop string ends the request here, whatever the engine says: the output carries FinishReason.STOP with the
      string as ``stop_reason``, the text ends just before it, and the caller aborts the request in the engine (which
      may have ended it with this very event). No event may be pushed after an output with a finish reason.
    - An end-of-text or stop token that ended the request is counted and listed in ``token_ids``, but not shown.
    - At every other end the held-back text and the bytes of an incomplete character (as U+FFFD) come out first.
    - ``min_tokens``: text that became final with the first ``min_tokens`` tokens passes at once and is never searched.
      The search starts on the text behind it, so a stop string that begins in it does not match.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._detokenizer = tokenizer.detokenizer(prompt_token_ids)
        self._matcher = StopMatcher(sampling.stop)
        self._num_prompt_tokens = len(prompt_token_ids)
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._finished = False

    def push(self, event: TokenEvent) -> RequestOutput:
        assert not self._finished, "an event after the request's last output"
        self._num_output_tokens += event.token_id is not None
        if event.num_cached_tokens is not None:
            self._num_cached_tokens = event.num_cached_tokens
        text = self._text_of(event)
        matched = self._matcher.matched
        finish_reason = event.finish_reason if matched is None else FinishReason.STOP
        self._finished = finish_reason is not None
        return RequestOutput(
            text=text,
            token_ids=() if event.token_id is None else (event.token_id,),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            finish_reason=finish_reason,
            stop_reason=self._stop_token(event) if matched is None else matched,
        )

    def _text_of(self, event: TokenEvent) -> str:
        shown = event.token_id if event.finish_reason is not FinishReason.STOP else None
        delta = "" if shown is None else self._detokenizer.push(shown)
        if event.finish_reason is not None:
            delta += self._detokenizer.finish()
        if self._num_output_tokens > self._sampling.min_tokens:
            delta = self._matcher.push(delta)
        return delta if event.finish_reason is None else delta + self._matcher.finish()

    def _stop_token(self, event: TokenEvent) -> int | None:
        stopped = event.finish_reason is FinishReason.STOP and event.token_id in self._sampling.stop_token_ids
        return event.token_id if stopped else None
