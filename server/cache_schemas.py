"""The bodies of the cache's own routes, and its answers as JSON. Bytes are computed here, from blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from engine.control import CacheView, Deletions, Dropped, PinView
from engine.kv.survey import NamespaceView, PrefixView
from engine.stats import EngineInfo
from server.schemas import CacheSalt, Float, Int64, Prompts, StrictBody, parse_prompts, refuse

MAX_TTL_SECONDS = 30 * 86400.0
SHORT_SALT_LEN = 12
MAX_TEXT_LEN = 200


def _parse_prompt(value: object) -> Prompts:
    prompts = parse_prompts(value)
    if len(prompts) != 1:
        raise refuse(f"prompt must be one prompt here, got {len(prompts)}")
    return prompts


_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}


class PrefixBody(StrictBody):
    """A prefix in somebody's cache: ``tenant`` is the name of an API key, ``cache_salt`` what its client sends."""

    prompt: Annotated[Any, PlainValidator(_parse_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    tenant: str | None = None
    cache_salt: CacheSalt | None = None

    @property
    def prompts(self) -> Prompts:
        """Exactly one."""
        prompts: Prompts = self.prompt
        return prompts


class PinBody(PrefixBody):
    """``ttl`` is in seconds: every pin ends. ``max_tokens`` is what requests will ask for that are to find the pin: where the RoPE
    scaling depends on a request's length, it decides which blocks they read."""

    ttl: Annotated[Float, Field(ge=1, le=MAX_TTL_SECONDS)]
    max_tokens: Annotated[Int64, Field(ge=1, le=2**31 - 1)] = 1


class ViewWriter:
    """Writes the engine's answers as JSON values. ``tenants`` maps salts to the names of their keys."""

    def __init__(self, info: EngineInfo, tenants: dict[str, str], decode: Callable[[tuple[int, ...]], str]) -> None:
        self._info = info
        self._tenants = tenants
        self._decode = decode

    def view(self, view: CacheView) -> dict[str, Any]:
        blocks = {
            "referenced": view.num_referenced_blocks,
            "cached": view.num_cached_blocks,
            "free": view.num_free_blocks,
        }
        return {
            "block_size": self._info.block_size,
            "block_bytes": self._info.block_bytes,
            "capacity_bytes": self._bytes(view.num_blocks),
            "blocks": blocks,
            "bytes": {state: self._bytes(count) for state, count in blocks.items()},
            "tiers": self._tiers(view),
            "pinned": self._sized(view.num_pinned_blocks),
            "pin_limit": self._sized(view.pin_limit_blocks),
            "pins": [self.pin(pin) for pin in view.pins],
            "namespaces": [self._namespace(item) for item in view.namespaces],
            "top_by_bytes": [self._prefix(item) for item in view.by_bytes],
            "top_by_hits": [self._prefix(item) for item in view.by_hits],
        }

    def _tiers(self, view: CacheView) -> dict[str, Any]:
        """What each tier holds and may hold. ``disk`` are the folder's files, other models' and headers included."""
        return {
            "device": {**self._sized(view.num_blocks - view.num_free_blocks), "capacity_bytes": self._bytes(view.num_blocks)},
            "host": {**self._sized(view.num_host_blocks), "capacity_bytes": self._info.host_cache_bytes},
            "disk": {"files": view.num_disk_files, "bytes": view.disk_bytes, "capacity_bytes": self._info.disk_cache_bytes},
        }

    def pin(self, pin: PinView) -> dict[str, Any]:
        return {"id": pin.pin_id, "tokens": pin.num_tokens, **self._sized(pin.num_blocks), "seconds_left": pin.seconds_left}

    def dropped(self, dropped: Dropped, deletions: Deletions) -> dict[str, Any]:
        """``complete`` when nothing that was meant has stayed, and no file is left of it.

        What was dropped is not found any more; ``deletions`` are files that are not off the disk yet, or could not be deleted, and
        ``held_host_blocks`` were not free when the drop was done: a disk job or a waiting request had yet to let go of them.
        """
        kept = {
            "device": {
                "referenced": dropped.num_referenced_blocks,
                "pinned": dropped.num_pinned_blocks,
                "continued": dropped.num_continued_blocks,
            },
            "host": {"continued": dropped.num_continued_host_blocks},
            "disk": {"continued": dropped.num_continued_disk_blocks},
        }
        left = {"pending": deletions.num_pending, "failed": deletions.num_failed}
        is_complete = not any((*left.values(), *(count for counts in kept.values() for count in counts.values())))
        return {
            "dropped": {
                "device": self._sized(dropped.num_blocks),
                "host": self._sized(dropped.num_host_blocks),
                "disk": {"blocks": dropped.num_disk_blocks, "bytes": dropped.num_disk_bytes},
            },
            "kept_blocks": kept,
            "held_host_blocks": dropped.num_held_host_blocks,
            "deletions": left,
            "complete": is_complete,
        }

    def _namespace(self, item: NamespaceView) -> dict[str, Any]:
        return {
            **self._names(item),
            "tokens": item.num_tokens,
            **self._sized(item.num_blocks),
            "referenced_blocks": item.num_referenced_blocks,
            "pinned_blocks": item.num_pinned_blocks,
        }

    def _prefix(self, item: PrefixView) -> dict[str, Any]:
        return {
            **self._names(item),
            "text": self._decode(item.token_ids)[:MAX_TEXT_LEN],
            "token_ids": item.token_ids,
            "tokens": item.num_tokens,
            **self._sized(item.num_blocks),
            "blocks_below": item.num_blocks_below,
            "hits": item.num_hits,
            "referenced_blocks": item.num_referenced_blocks,
            "pinned_blocks": item.num_pinned_blocks,
        }

    def _names(self, item: NamespaceView | PrefixView) -> dict[str, Any]:
        """A salt is a digest already; its beginning tells namespaces apart and opens none."""
        salt, (rope_class, _) = item.namespace.salt, self._info.rope_classes[item.namespace.rope_class]
        return {"salt": salt[:SHORT_SALT_LEN], "tenant": self._tenants.get(salt), "rope_class": rope_class}

    def _sized(self, num_blocks: int) -> dict[str, int]:
        return {"blocks": num_blocks, "bytes": self._bytes(num_blocks)}

    def _bytes(self, num_blocks: int) -> int:
        return num_blocks * self._info.block_bytes
