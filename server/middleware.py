"""What happens to every request at the edge: its id, its key, its place in the drain count, and the last net for errors.

Written against ASGI itself, so that ``receive`` still tells the routes when a client hangs up.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.auth import Keyring
from server.drain import Drain
from server.errors import AuthenticationError, error_response, log_failure, log_name

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
            log_failure(exc, log_name(scope))
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
    """Finds out who calls, by ``Authorization: Bearer KEY``, and refuses strangers where a key is needed.

    On every path outside PUBLIC_PATHS, ``scope["octavo.caller"]`` is a Caller from here on.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self.app = app
        self.keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            return await self.app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        caller = self.keyring.identify(given)
        if caller is None:
            exc = AuthenticationError("a valid API key is required: Authorization: Bearer KEY")
            return await error_response(exc)(scope, receive, send)
        scope["octavo.caller"] = caller
        return await self.app(scope, receive, send)
