"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from server.errors import ModelNotServedError
from server.service import Service


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(service)]})

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        card = _card(service)
        if model != card["id"]:
            raise ModelNotServedError(f"the model {model[:100]!r} is not served here; {card['id']!r} is", param="model")
        return JSONResponse(card)

    return router


def _card(service: Service) -> dict[str, Any]:
    info = service.require_info()
    name = service.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": info.model_name,
        "parent": None,
        "max_model_len": info.max_model_len,
    }
