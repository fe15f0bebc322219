"""What an operator sees of the KV cache and does to it: look, pin, unpin, drop, reset. For the admin key alone."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import JSONResponse

from engine.control import (
    CacheView,
    Deletions,
    Dropped,
    DropPrefix,
    Pinned,
    PinPrefix,
    ResetCache,
    ShowCache,
    ShowDeletions,
    Unpin,
    Unpinned,
    in_all,
)
from engine.errors import ControlRefusedError, InvalidRequestError
from engine.request import Namespace, RequestTerms, SamplingParams
from server.auth import Caller
from server.body import read_json
from server.cache_schemas import PinBody, PrefixBody, ViewWriter
from server.errors import ForbiddenError, NotFoundError
from server.routes.completions import tokenize
from server.schemas import parse_body
from server.service import Service

_MAX_PREFIXES = 1000
_MAX_TOKEN_IDS = 1_000_000
_PIN_ATTEMPTS = 3
_DELETE_SECONDS = 10.0  # how long an answer waits for files to be deleted; after that, it says how many are left
_DELETE_POLL_SECONDS = 0.02


def cache_router(service: Service) -> APIRouter:
    router = APIRouter(dependencies=[Depends(_admin_gate(service))])

    @router.get("/v1/cache")
    async def show_cache(request: Request) -> Response:
        command = ShowCache(_count(request, "top", 10, _MAX_PREFIXES), _count(request, "tokens", 32, _MAX_TOKEN_IDS))
        view = await service.engine.control(command)
        assert isinstance(view, CacheView)
        return JSONResponse(_writer(service).view(view))

    @router.post("/v1/cache/pin")
    async def pin(request: Request) -> Response:
        body = parse_body(PinBody, await read_json(request, service.settings.max_body_bytes))
        return JSONResponse(await _pin(service, body))

    @router.delete("/v1/cache/pin/{pin_id}")
    async def unpin(pin_id: str) -> Response:
        unpinned = await service.engine.control(Unpin(pin_id))
        assert isinstance(unpinned, Unpinned)
        if unpinned.pin is None:
            raise NotFoundError(f"there is no pin {pin_id[:64]!r} (any more)")
        return JSONResponse({"unpinned": _writer(service).pin(unpinned.pin)})

    @router.post("/v1/cache/drop")
    async def drop(request: Request) -> Response:
        body = parse_body(PrefixBody, await read_json(request, service.settings.max_body_bytes))
        salt = _salt(service, body)
        (token_ids,) = await tokenize(service.engine.tokenizer, body.prompts)
        num_public, num_classes = service.engine.num_public_tokens(token_ids), len(service.require_info().rope_classes)
        namespaces = (Namespace(salt, rope_class) for rope_class in range(num_classes))
        return JSONResponse(await _drop(service, *(DropPrefix(each, tuple(token_ids), num_public) for each in namespaces)))

    @router.post("/reset_prefix_cache")
    async def reset() -> Response:
        return JSONResponse(await _drop(service, ResetCache()))

    return router


def _admin_gate(service: Service) -> Any:
    """Lets the admin's requests through. Raises ForbiddenError for all others, and for everybody where there is no admin key."""

    async def check(request: Request) -> None:
        if not service.keyring.has_admin:
            raise ForbiddenError("this needs an admin key, and none is set: start the server with --admin-key KEY")
        caller: Caller = request.scope["octavo.caller"]
        if not caller.is_admin:
            raise ForbiddenError("this needs the admin key: Authorization: Bearer KEY")
        service.require_ready()

    return check


def _count(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        raise InvalidRequestError(f"{name} must be a whole number from 0 to {most}", param=name)
    return int(text)


def _writer(service: Service) -> ViewWriter:
    callers = {name: service.keyring.caller(name) for name in service.keyring.names}
    tenants = {caller.cache_salt(None): name for name, caller in callers.items() if caller is not None}
    return ViewWriter(service.require_info(), tenants, service.engine.tokenizer.decode)


def _salt(service: Service, body: PrefixBody) -> str:
    """The salt of the cache that is meant: a tenant's, or where callers have no keys or none is named, the common one."""
    if body.tenant is not None:
        caller = service.keyring.caller(body.tenant)
        if caller is None:
            raise NotFoundError(f"tenant: there is no API key by the name {body.tenant[:64]!r}", param="tenant")
        return caller.cache_salt(body.cache_salt)
    if service.keyring.needs_key and body.cache_salt is not None:
        raise InvalidRequestError("cache_salt needs a tenant: the name of the API key that sends it", param="cache_salt")
    return Caller().cache_salt(body.cache_salt)


async def _drop(service: Service, *commands: DropPrefix | ResetCache) -> dict[str, Any]:
    """Forget, and wait for the disk to follow, but not for ever."""
    answers = [await service.engine.control(command) for command in commands]
    dropped = in_all([answer for answer in answers if isinstance(answer, Dropped)])
    deletions = Deletions(dropped.num_deleting, 0)
    deadline = time.monotonic() + _DELETE_SECONDS
    while deletions.num_pending and time.monotonic() < deadline:
        await asyncio.sleep(_DELETE_POLL_SECONDS)
        now = await service.engine.control(ShowDeletions())
        assert isinstance(now, Deletions)
        deletions = now
    return _writer(service).dropped(dropped, deletions)


async def _pin(service: Service, body: PinBody) -> dict[str, Any]:
    """Pin what is resident; else compute it as any request would, and try again."""
    if body.tenant is None and service.keyring.needs_key:
        names = ", ".join(service.keyring.names[:20])
        raise InvalidRequestError(f"tenant must name the API key whose requests will find the pin: {names}", param="tenant")
    engine, salt = service.engine, _salt(service, body)
    (token_ids,) = await tokenize(engine.tokenizer, body.prompts)
    sampling = SamplingParams(temperature=0.0, max_tokens=body.max_tokens, ignore_eos=True)
    engine.check(token_ids, sampling)
    info = service.require_info()
    block_size = info.block_size
    if info.is_stream(len(token_ids) + body.max_tokens):
        raise InvalidRequestError(
            f"requests of more than {info.stream_len:,} tokens keep a window of their own and share nothing, so there is nothing to pin;"
            " send a shorter prompt or max_tokens",
            param="prompt",
        )
    if len(token_ids) < block_size:
        raise InvalidRequestError(
            f"prompt has {len(token_ids)} tokens; only whole blocks of {block_size} can be pinned", param="prompt"
        )
    pin_id, num_public = f"pin-{uuid.uuid4().hex[:16]}", engine.num_public_tokens(token_ids)
    namespace = engine.namespace(salt, len(token_ids) + body.max_tokens)
    command = PinPrefix(pin_id, namespace, tuple(token_ids), num_public, body.ttl)
    num_computed = 0
    for _ in range(_PIN_ATTEMPTS):
        result = await engine.control(command)
        if isinstance(result, Pinned):
            return _pin_answer(service, result, num_computed)
        num_computed += await _compute(service, token_ids, sampling, salt)
    raise ControlRefusedError(
        f"the blocks of this prompt were evicted {_PIN_ATTEMPTS} times between computing and pinning them; try again when the cache"
        " is under less pressure"
    )


def _pin_answer(service: Service, pinned: Pinned, num_computed: int) -> dict[str, Any]:
    """``expires_at`` is Unix time in seconds."""
    pin = _writer(service).pin(pinned.pin)
    block_bytes = service.require_info().block_bytes
    return pin | {
        "expires_at": time.time() + pinned.pin.seconds_left,
        "computed_tokens": num_computed,
        "pinned_bytes": pinned.num_pinned_blocks * block_bytes,
    }


async def _compute(service: Service, token_ids: list[int], sampling: SamplingParams, salt: str) -> int:
    """Run the prompt as a request up to its first token. Returns how many of its tokens had to be computed."""
    async with aclosing(service.engine.generate(token_ids, sampling, RequestTerms(salt=salt))) as outputs:
        first = await anext(outputs)
    return first.num_prompt_tokens - first.num_cached_tokens
