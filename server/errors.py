"""Exceptions that only HTTP knows, and the one table that turns every exception into a status, a type and a code.

OctavoError
├── (engine.errors: InvalidRequestError, QueueFullError: 429, EngineDeadError, RequestFailedError, ...)
└── HttpError
    ├── AuthenticationError   no key or a wrong one: 401
    ├── ForbiddenError        a good key, but not for this; or nobody may: 403
    ├── NotFoundError         what the path or the body names is not there: 404
    ├── ModelNotServedError   another model than the one that is served: 404
    ├── BodyTooLargeError     413
    ├── ContentTypeError      415
    ├── ClientGoneError       the client hung up; the answer reaches nobody: 499
    └── UnavailableError      starting, restarting, draining or stopped: 503
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from engine.errors import (
    ContextLengthError,
    ControlRefusedError,
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    QueueFullError,
    RequestFailedError,
)

logger = logging.getLogger("octavo.server")

MAX_MESSAGE_LEN = 1000
RETRY_AFTER = {"retry-after": "5"}


class HttpError(OctavoError):
    """``param`` names the field at fault, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class AuthenticationError(HttpError):
    """The key is missing or wrong."""


class ForbiddenError(HttpError):
    """The caller may not do this."""


class NotFoundError(HttpError):
    """The thing that is named does not exist."""


class ModelNotServedError(HttpError):
    """The request asks for a model that is not the served one."""


class BodyTooLargeError(HttpError):
    """The request body is over the limit."""


class ContentTypeError(HttpError):
    """The request body is not declared as JSON in UTF-8."""


class ClientGoneError(HttpError):
    """The client hung up before its answer was complete."""


class UnavailableError(HttpError):
    """The server takes no request now, but may soon."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How a class of exceptions looks from outside. ``message`` stands in for texts that may show internals."""

    status: int
    type: str
    code: str | None = None
    message: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_GONE = ErrorKind(499, "invalid_request_error", "client_closed_request", "the client closed the request")

ERROR_KINDS: Mapping[type[Exception], ErrorKind] = {
    InvalidRequestError: ErrorKind(400, "invalid_request_error"),
    ContextLengthError: ErrorKind(400, "invalid_request_error", ContextLengthError.code),
    AuthenticationError: ErrorKind(401, "authentication_error", "invalid_api_key", headers={"www-authenticate": "Bearer"}),
    ForbiddenError: ErrorKind(403, "permission_error", "forbidden"),
    NotFoundError: ErrorKind(404, "not_found_error", "not_found"),
    ModelNotServedError: ErrorKind(404, "not_found_error", "model_not_found"),
    ControlRefusedError: ErrorKind(409, "conflict_error", "cache_conflict"),
    BodyTooLargeError: ErrorKind(413, "invalid_request_error", "content_too_large"),
    ContentTypeError: ErrorKind(415, "invalid_request_error", "unsupported_media_type"),
    QueueFullError: ErrorKind(429, "rate_limit_error", "queue_full", headers={"retry-after": "1"}),
    ClientGoneError: _GONE,
    ClientDisconnect: _GONE,
    UnavailableError: ErrorKind(503, "service_unavailable_error", "server_unavailable", headers=RETRY_AFTER),
    EngineDeadError: ErrorKind(
        503, "service_unavailable_error", "engine_unavailable", "the engine is not running; try again shortly", RETRY_AFTER
    ),
    RequestFailedError: ErrorKind(500, "server_error", "request_failed", "the engine could not finish this request"),
    Exception: ErrorKind(500, "server_error", "internal_error", "internal error"),
}


def kind_of(exc: Exception) -> ErrorKind:
    return next(ERROR_KINDS[base] for base in type(exc).__mro__ if base in ERROR_KINDS)


def error_body(exc: Exception) -> bytes:
    """The four-key error object, as JSON in ASCII. Bounded, whatever the exception says."""
    kind = kind_of(exc)
    return _body(kind.message or str(exc), kind.type, getattr(exc, "param", None), kind.code)


def error_response(exc: Exception) -> Response:
    kind = kind_of(exc)
    return Response(error_body(exc), kind.status, dict(kind.headers), "application/json")


def log_name(scope: Scope) -> str:
    """What the log calls a request: its id, and the name of the key that sent it."""
    request_id: str = scope.get("octavo.request_id", "-")
    caller = scope.get("octavo.caller")
    return f"{request_id} of {caller.name}" if caller is not None and caller.name is not None else request_id


def log_failure(exc: Exception, name: str) -> None:
    """Our own failures go to the log; the caller's mistakes do not. No request body is ever written. ``name``: ``log_name``."""
    if kind_of(exc).status == 500:
        logger.error("request %s failed: %s: %s", name, type(exc).__name__, exc, exc_info=exc)


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, _on_http_exception)
    for cls in (OctavoError, ClientDisconnect):
        app.add_exception_handler(cls, _on_exception)


async def _on_exception(request: Request, exc: Exception) -> Response:
    log_failure(exc, log_name(request.scope))
    return error_response(exc)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    """What the router itself refuses: an unknown path, a method that a path does not have."""
    assert isinstance(exc, HTTPException)
    phrase = HTTPStatus(exc.status_code).phrase
    kind = "not_found_error" if exc.status_code == 404 else "invalid_request_error"
    message = f"{phrase}: {request.method[:20]} {request.url.path[:200]}"
    body = _body(message, kind, None, phrase.lower().replace(" ", "_"))
    return Response(body, exc.status_code, exc.headers, "application/json")


def _body(message: str, type_: str, param: str | None, code: str | None) -> bytes:
    error = {"message": message[:MAX_MESSAGE_LEN], "type": type_, "param": param, "code": code}
    return json.dumps({"error": error}).encode()
