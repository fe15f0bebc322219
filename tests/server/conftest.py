"""An app over a FakeEngine, called in process or through a real server on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from server.app import create_app
from server.drain import Drain
from server.metrics import Metrics
from server.serve import HttpServer, bind
from server.settings import Settings
from tests.fakes import FakeEngine

Client = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def _client(engine: FakeEngine, drain: Drain | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, Metrics(CollectorRegistry()), Settings(**settings), drain)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@asynccontextmanager
async def _live(engine: FakeEngine, drain: Drain | None = None, **settings: Any) -> AsyncIterator[tuple[str, int]]:
    app = create_app(engine, Metrics(CollectorRegistry()), Settings(**settings), drain)
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, log_level="warning", access_log=False)
    server = HttpServer(config)
    address = sock.getsockname()[:2]
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield address
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
def client() -> Client:
    """``async with client(engine, **settings) as http``: the app, in process."""
    return _client


@pytest.fixture
def live() -> Callable[..., AbstractAsyncContextManager[tuple[str, int]]]:
    """``async with live(engine, **settings) as (host, port)``: the app, behind uvicorn."""
    return _live


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with _client(FakeEngine()) as client:
        yield client
