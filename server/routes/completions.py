"""POST /v1/completions: check everything before the first byte, then stream or fold."""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from itertools import product
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request, Response

from engine.request import RequestTerms
from server.auth import Caller
from server.body import read_json
from server.engine_client import Tokenizer
from server.errors import ClientGoneError, ModelNotServedError, log_name
from server.schemas import CompletionRequest, Prompts, parse_completion_request
from server.service import Service
from server.streaming import (
    AnswerShape,
    CompletionHead,
    EventStream,
    Outputs,
    completion_events,
    until_disconnect,
    whole_completion,
)

# Longer texts are tokenized off the event loop: a few milliseconds of work that other streams should not wait for.
_LONG_TEXT = 4096


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=_openapi_body())
    async def create_completion(request: Request) -> Response:
        arrival_time = time.monotonic()
        service.require_ready()
        body = parse_completion_request(await read_json(request, service.settings.max_body_bytes))
        _require_served(body.model, service.model_name)
        caller: Caller = request.scope["octavo.caller"]
        generators, places = await _prepare(service, body, caller, arrival_time)
        head = CompletionHead(id=f"cmpl-{uuid.uuid4().hex}", created=int(time.time()), model=service.model_name)
        shape = AnswerShape(body.num_choices, body.include_usage, bool(body.return_cache_info))
        if body.stream:
            name = log_name(request.scope)
            return EventStream(completion_events(generators, head, shape, service.drain, log_name=name), on_end=places.close)
        with places:
            answer = await until_disconnect(request.receive, whole_completion(generators, head, shape, service.drain))
        if answer is None:
            raise ClientGoneError("the client hung up")
        return Response(answer, media_type="application/json")

    return router


def _require_served(asked: str | None, served: str) -> None:
    if asked is not None and asked != served:
        raise ModelNotServedError(f"the model {asked[:100]!r} is not served here; {served!r} is", param="model")


async def _prepare(
    service: Service, body: CompletionRequest, caller: Caller, arrival_time: float
) -> tuple[list[Outputs], ExitStack]:
    """The generators of an admissible request, not yet running: choice i of prompt p is number p * n + i.

    The exit stack gives back what places in the queue they have not used. Raises what makes the request inadmissible.
    """
    engine = service.engine
    choices = body.sampling_params()
    prompts = await tokenize(engine.tokenizer, body.prompts)
    for ids in prompts:
        engine.check(ids, choices[0])
    places = engine.reserve(len(prompts) * len(choices))
    terms = RequestTerms(
        salt=caller.cache_salt(body.cache_salt),
        tenant=caller.tenant(body.cache_salt),
        priority=body.priority or 0,
        arrival_time=arrival_time,
        grows=body.rope_growth == "recompute",
    )
    generators = [
        engine.generate(ids, sampling, terms, place)
        for (ids, sampling), place in zip(product(prompts, choices), places, strict=True)
    ]
    unused = ExitStack()
    for place in places:
        unused.callback(place.leave)
    return generators, unused


async def tokenize(tokenizer: Tokenizer, prompts: Prompts) -> list[list[int]]:
    """Token ids are taken as they are; text gets the tokenizer's special tokens."""

    def work() -> list[list[int]]:
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return work() if num_chars <= _LONG_TEXT else await anyio.to_thread.run_sync(work)


def _openapi_body() -> dict[str, Any]:
    """The route reads the body itself, so it also has to describe it."""
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": CompletionRequest.model_json_schema()}}}
    }
