"""Puts the HTTP API together from ready-made parts.

With API keys in the settings, every path needs ``Authorization: Bearer KEY`` except /health, /version and /metrics:
probes and scrapers carry no keys, and none of these can generate text. /v1/models needs a key too. The admin key is taken
wherever an API key is; the cache's own paths take no other.
"""

from __future__ import annotations

import time

from fastapi import FastAPI

from server import __version__
from server.auth import Keyring
from server.drain import Drain
from server.engine_client import EngineClient
from server.errors import install_error_handlers
from server.metrics import Metrics
from server.middleware import ApiKeyMiddleware, DrainMiddleware, RequestIdMiddleware
from server.routes.cache import cache_router
from server.routes.completions import completions_router
from server.routes.models import models_router
from server.routes.operations import operations_router
from server.service import Service
from server.settings import Settings


def create_app(engine: EngineClient, metrics: Metrics, settings: Settings, drain: Drain | None = None) -> FastAPI:
    """The ASGI app. Starts and stops nothing: the engine's life, and when ``drain`` begins, are the caller's."""
    drain = drain or Drain()
    keyring = Keyring(settings.all_keys, settings.admin_key)
    service = Service(engine, metrics, settings, drain, keyring, created=int(time.time()))
    app = FastAPI(title="Octavo", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for router in (completions_router, cache_router, models_router, operations_router):
        app.include_router(router(service))
    install_error_handlers(app)
    app.add_middleware(ApiKeyMiddleware, keyring=keyring)
    app.add_middleware(DrainMiddleware, drain=drain)
    app.add_middleware(RequestIdMiddleware)
    return app
