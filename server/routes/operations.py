"""What operators and probes ask: /health, /version and /metrics. Public even when an API key is set; none can generate text."""

from __future__ import annotations

from fastapi import APIRouter, Response
from starlette.requests import Request
from starlette.responses import JSONResponse

from server import __version__
from server.errors import RETRY_AFTER
from server.metrics import CONTENT_TYPE
from server.service import Service


def operations_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 when a request would be taken now; else 503 with the state: starting, restarting, stopped or draining."""
        state = service.state
        if state == "ready":
            return JSONResponse({"status": state})
        return JSONResponse({"status": state}, 503, RETRY_AFTER)

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Open to all; with the admin key, tokens that are cached for other tenants have their own label."""
        caller = service.keyring.identify(request.headers.get("authorization", "").encode())
        for_operator = caller is not None and caller.is_admin
        return Response(service.metrics.render(for_operator=for_operator), headers={"content-type": CONTENT_TYPE})

    return router
