"""From the bytes of a request body to plain Python values. Knows JSON, not what the values mean."""

from __future__ import annotations

import json
from email.message import Message

import msgspec
from starlette.requests import Request

from engine.errors import InvalidRequestError
from server.errors import BodyTooLargeError, ContentTypeError

# What is read and thrown away of a body that is too large, so that the client gets to read why it was refused.
_MAX_DISCARDED = 64 * 1024 * 1024


async def read_json(request: Request, max_bytes: int) -> object:
    """Raises ContentTypeError, BodyTooLargeError or InvalidRequestError. NaN, Infinity and lone surrogates are no JSON."""
    _require_json(request.headers.get("content-type", ""))
    body = await _read(request, max_bytes)
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequestError(f"the request body is not valid JSON: {_reason(body, exc)}") from None


def _reason(body: bytes, exc: msgspec.DecodeError | UnicodeDecodeError) -> str:
    """In one case msgspec's own words mislead: to it, a string that ends in half of a surrogate pair is cut short."""
    if isinstance(exc, UnicodeDecodeError):
        return "invalid UTF-8"
    if "truncated" in str(exc) and _is_json_to_the_standard_library(body):
        return "a string ends in half of a surrogate pair"
    return str(exc)


def _is_json_to_the_standard_library(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _require_json(content_type: str) -> None:
    header = Message()
    header["content-type"] = content_type
    charset = header.get_content_charset("utf-8")
    if not content_type or header.get_content_type() != "application/json" or charset not in ("utf-8", "utf8"):
        raise ContentTypeError("the request body must have the content type application/json (UTF-8)")


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > max_bytes + _MAX_DISCARDED:
            break
    if size > max_bytes:
        raise BodyTooLargeError(f"the request body is larger than {max_bytes} bytes")
    return b"".join(chunks)
