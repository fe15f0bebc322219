"""What a streamed completion says and when: server-sent events in, one finished record or one named failure out.

Defines TTFT, ITL, TPOT and end-to-end for everything in this package. Knows no transport: the asyncio client and the
locust user feed the same fold. Times are seconds of one monotonic clock (``time.perf_counter``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any


class FailureKind(StrEnum):
    """Why a request does not count. There is no other way for a request to disappear from the figures."""

    CONNECT = "connect"  # no connection, or none that answers
    HTTP_STATUS = "http_status"  # an answer other than 200
    ERROR_EVENT = "error_event"  # the stream carried an error object
    MALFORMED = "malformed"  # not HTTP, not an event stream, not JSON, or not a completion
    CUT = "cut"  # the connection ended inside the body
    NO_DONE = "no_done"  # the body ended properly, without [DONE]
    EMPTY = "empty"  # [DONE] without a single choice
    NO_FINISH = "no_finish"  # no choice had a finish reason
    NO_USAGE = "no_usage"  # token counts are never guessed
    TIMEOUT = "timeout"  # not finished within the client's patience


class StreamError(Exception):
    """A request that failed; ``kind`` says how."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(f"{kind.value}: {message}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's own counts. ``cached_tokens`` is None if the server does not report it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """One request that ended as it should.

    ``arrivals``: when each chunk with a choice was read, at least one; a chunk may hold several tokens. A last chunk that
    has only a finish reason is no arrival, unless it is the only one.
    """

    sent_at: float
    arrivals: tuple[float, ...]
    ended_at: float
    usage: Usage
    finish_reason: str
    text: str

    @property
    def ttft(self) -> float:
        """From before the connection is opened to the first chunk."""
        return self.arrivals[0] - self.sent_at

    @property
    def itl(self) -> tuple[float, ...]:
        """Gaps between neighbouring chunks."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals))

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None with fewer than two tokens or chunks."""
        if self.usage.completion_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.usage.completion_tokens - 1)

    @property
    def e2e(self) -> float:
        """From before the connection is opened to the end of the body."""
        return self.ended_at - self.sent_at


class EventParser:
    """Bytes of a ``text/event-stream`` in any cut, data payloads out. Comments and other fields are ignored, as the format demands."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads of all events that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class StreamFold:
    """Folds the stream of one request with one prompt and one choice into its record."""

    def __init__(self, sent_at: float) -> None:
        self._sent_at = sent_at
        self._parser = EventParser()
        self._arrivals: list[float] = []
        self._texts: list[str] = []
        self._usage: Usage | None = None
        self._finish_reason: str | None = None
        self._done = False

    def feed(self, piece: bytes, at: float) -> None:
        """Take bytes that were read at ``at``. Raises StreamError on an error event or on what is not a completion stream."""
        for payload in self._parser.feed(piece):
            if self._done:
                raise StreamError(FailureKind.MALFORMED, f"an event after [DONE]: {payload[:200]!r}")
            if payload == b"[DONE]":
                self._done = True
            else:
                self._take(_parse(payload), at)

    def finish(self, at: float) -> CompletionRecord:
        """The record of a body that ended properly at ``at``. Raises StreamError if anything is missing."""
        if not self._done:
            raise StreamError(FailureKind.NO_DONE, f"the stream ended after {len(self._arrivals)} chunks without [DONE]")
        if not self._arrivals:
            raise StreamError(FailureKind.EMPTY, "the stream had no choice")
        if self._finish_reason is None:
            raise StreamError(FailureKind.NO_FINISH, f"no finish reason in {len(self._arrivals)} chunks")
        if self._usage is None:
            raise StreamError(FailureKind.NO_USAGE, "the stream had no usage, although stream_options.include_usage was set")
        text = "".join(self._texts)
        return CompletionRecord(self._sent_at, tuple(self._arrivals), at, self._usage, self._finish_reason, text)

    def _take(self, event: dict[str, Any], at: float) -> None:
        if event.get("error"):
            raise StreamError(FailureKind.ERROR_EVENT, json.dumps(event["error"])[:400])
        if event.get("usage"):
            self._usage = _usage(event["usage"])
        for choice in event.get("choices") or ():
            text = choice.get("text") or ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if text or not self._arrivals or not choice.get("finish_reason"):
                self._arrivals.append(at)
                self._texts.append(text)


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError as exc:
        raise StreamError(FailureKind.MALFORMED, f"{exc} in event {payload[:200]!r}") from exc
    if not isinstance(event, dict):
        raise StreamError(FailureKind.MALFORMED, f"an event that is no object: {payload[:200]!r}")
    return event


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    try:
        return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens"))
    except KeyError as exc:
        raise StreamError(FailureKind.MALFORMED, f"usage without {exc.args[0]}: {json.dumps(usage)[:200]}") from exc
