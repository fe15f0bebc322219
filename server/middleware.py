"""What happens to every request at the edge: its id, its key, its place in the drain count, and the last net for errors.

Written against ASGI itself, so that ``receive`` still tells the routes when a client hangs up.
"""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.drain import Drain
from server.errors import AuthenticationError, error_response, log_failure

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# All else needs the key, so that a new route is behind it until somebody says otherwise.
PUBLIC_PATHS = frozenset({"/health", "/version", "/metrics"})


class RequestIdMiddleware:
    """Exactly one X-Request-Id in each answer: the caller's if it is short and plain, else a fresh one. Never an engine key."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["octavo.request_id"] = request_id
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as exc:
            if is_started:
                raise
            log_failure(exc, request_id)
            await error_response(exc)(scope, receive, send_with_id)
        return None


class DrainMiddleware:
    """Counts each API request from its head to the last byte of its answer."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            return await self.app(scope, receive, send)
        with self.drain.active():
            return await self.app(scope, receive, send)


class ApiKeyMiddleware:
    """``Authorization: Bearer KEY`` on every path outside PUBLIC_PATHS, compared in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self.api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS or self._is_authorized(scope):
            return await self.app(scope, receive, send)
        exc = AuthenticationError("a valid API key is required: Authorization: Bearer KEY")
        return await error_response(exc)(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.api_key)
