"""What an operator may ask of the cache between two steps, the answers, and the one object that applies them.

Commands and answers are plain messages. Knows the manager; knows nothing of HTTP, keys or text.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.kv.manager import KVCacheManager
from engine.kv.operator import DropResult
from engine.kv.pins import Pin
from engine.kv.survey import NamespaceView, PrefixView
from engine.request import Namespace


class ShowCache(msgspec.Struct, frozen=True, tag="show"):
    """``num_prefixes`` of each ranking, with at most ``num_token_ids`` of each prefix's token ids."""

    num_prefixes: int
    num_token_ids: int


class PinPrefix(msgspec.Struct, frozen=True, tag="pin"):
    """Protect the full blocks of these tokens from eviction for ``seconds``; the first ``num_public_tokens`` are public."""

    pin_id: str
    namespace: Namespace
    token_ids: tuple[int, ...]
    num_public_tokens: int
    seconds: float


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    pin_id: str


class DropPrefix(msgspec.Struct, frozen=True, tag="drop"):
    """Forget what is cached under these tokens, and of their own blocks those that nothing else continues.

    In a salted namespace, public blocks stay; in the one without a salt, what continues them in any namespace goes too.
    """

    namespace: Namespace
    token_ids: tuple[int, ...]
    num_public_tokens: int


class ShowDeletions(msgspec.Struct, frozen=True, tag="deletions"):
    """How far the disk is with what was dropped."""


class ResetCache(msgspec.Struct, frozen=True, tag="reset"):
    """Forget all that is not in use and not pinned, in every namespace and tier."""


Command = ShowCache | PinPrefix | Unpin | DropPrefix | ResetCache | ShowDeletions


class PinView(msgspec.Struct, frozen=True):
    """``num_blocks`` counts all blocks of the pin; those it shares with other pins take their room once."""

    pin_id: str
    num_tokens: int
    num_blocks: int
    seconds_left: float


class CacheView(msgspec.Struct, frozen=True, tag="view"):
    """``num_disk_files`` and ``disk_bytes`` are all in the disk cache's folder, other models' included."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_referenced_blocks: int
    num_pinned_blocks: int
    num_host_blocks: int
    num_disk_files: int
    disk_bytes: int
    pin_limit_blocks: int
    pins: tuple[PinView, ...]
    namespaces: tuple[NamespaceView, ...]
    by_bytes: tuple[PrefixView, ...]
    by_hits: tuple[PrefixView, ...]


class Pinned(msgspec.Struct, frozen=True, tag="pinned"):
    pin: PinView
    num_pinned_blocks: int


class NotResident(msgspec.Struct, frozen=True, tag="not_resident"):
    """Nothing was pinned: only the first ``num_resident_tokens`` of these tokens are on the device. Compute them, ask again."""

    num_resident_tokens: int


class Unpinned(msgspec.Struct, frozen=True, tag="unpinned"):
    """``pin`` is None when there was no such pin (any more)."""

    pin: PinView | None


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """What went, and what stayed although it was meant: used by running requests, pinned, or continued by something that stays.

    Without a word more, blocks are the device's. What went is not found any more, on no tier; ``num_held_host_blocks`` of the host's
    keep their place in memory until a disk job or a waiting request lets go of them, and ``num_deleting`` disk jobs (see
    ``Deletions``) are yet to be done.
    """

    num_blocks: int
    num_referenced_blocks: int
    num_pinned_blocks: int
    num_continued_blocks: int
    num_host_blocks: int = 0
    num_held_host_blocks: int = 0
    num_continued_host_blocks: int = 0
    num_disk_blocks: int = 0
    num_disk_bytes: int = 0
    num_continued_disk_blocks: int = 0
    num_deleting: int = 0


def in_all(answers: Sequence[Dropped]) -> Dropped:
    """Several drops, in their order, as one."""
    sums = {name: sum(getattr(answer, name) for answer in answers) for name in Dropped.__struct_fields__}
    return Dropped(**sums | {"num_deleting": answers[-1].num_deleting})


class Deletions(msgspec.Struct, frozen=True, tag="deletions_now"):
    """``num_pending`` disk jobs are to be done until all that was dropped is off the disk: files to be deleted, or first to be
    written to their end, and looks for what other servers have written. ``num_failed``: files or looks that failed; what is left
    there is not found by this server, but will be by the next start.
    """

    num_pending: int
    num_failed: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    message: str


Result = CacheView | Pinned | NotResident | Unpinned | Dropped | Deletions | Refused


class CacheControl:
    """Applies commands to a manager. Call it between steps only."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._operator = manager.operator

    @property
    def seconds_to_expiry(self) -> float | None:
        """Until something changes by itself: the next pin's end."""
        return self._operator.pins.seconds_to_expiry

    def expire(self) -> bool:
        """End the pins whose time has come. Returns whether anything changed."""
        return self._operator.pins.expire()

    def apply(self, command: Command) -> Result:
        if isinstance(command, ShowCache):
            return self._show(command)
        if isinstance(command, PinPrefix):
            return self._pin(command)
        if isinstance(command, Unpin):
            pin = self._operator.pins.remove(command.pin_id)
            return Unpinned(self._view(pin) if pin is not None else None)
        if isinstance(command, DropPrefix):
            return self._dropped(self._operator.drop(command.namespace, command.token_ids, command.num_public_tokens))
        if isinstance(command, ShowDeletions):
            return Deletions(self._manager.tiers.num_deleting, self._manager.tiers.num_undeleted)
        assert isinstance(command, ResetCache)
        return self._dropped(self._operator.reset())

    def _show(self, command: ShowCache) -> CacheView:
        manager, operator = self._manager, self._operator
        survey = operator.survey(command.num_prefixes, command.num_token_ids)
        return CacheView(
            num_blocks=manager.num_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_cached_blocks=manager.num_cached_blocks,
            num_referenced_blocks=manager.num_referenced_blocks,
            num_pinned_blocks=manager.num_pinned_blocks,
            num_host_blocks=manager.tiers.host.num_used,
            num_disk_files=len(manager.tiers.disk),
            disk_bytes=manager.tiers.disk.num_bytes,
            pin_limit_blocks=operator.pins.limits.max_blocks,
            pins=tuple(self._view(pin) for pin in operator.pins),
            namespaces=survey.namespaces,
            by_bytes=survey.by_bytes,
            by_hits=survey.by_hits,
        )

    def _pin(self, command: PinPrefix) -> Pinned | NotResident | Refused:
        manager, pins = self._manager, self._operator.pins
        match = self._operator.match(command.namespace, command.token_ids, command.num_public_tokens)
        num_wanted = len(command.token_ids) // manager.block_size
        num_behind = manager.num_behind(num_wanted * manager.block_size)
        nodes = match.path[num_behind:]
        refusal = pins.refusal(nodes, num_missing=num_wanted - num_behind - len(nodes))
        if refusal is not None:
            return Refused(refusal)
        if len(match.path) < num_wanted:
            return NotResident(len(match.path) * manager.block_size)
        pin = pins.add(command.pin_id, nodes, num_wanted * manager.block_size, command.seconds)
        return Pinned(self._view(pin), manager.num_pinned_blocks)

    def _view(self, pin: Pin) -> PinView:
        return PinView(pin.pin_id, pin.num_tokens, len(pin.nodes), self._operator.pins.seconds_left(pin))

    def _dropped(self, result: DropResult) -> Dropped:
        device, tiers = result.device, result.tiers
        return Dropped(
            num_blocks=device.num_dropped,
            num_referenced_blocks=device.num_referenced,
            num_pinned_blocks=device.num_pinned,
            num_continued_blocks=device.num_continued,
            num_host_blocks=tiers.num_host_blocks,
            num_held_host_blocks=tiers.num_held_host_blocks,
            num_continued_host_blocks=tiers.num_continued_host_blocks,
            num_disk_blocks=tiers.num_disk_blocks,
            num_disk_bytes=tiers.num_disk_bytes,
            num_continued_disk_blocks=tiers.num_continued_disk_blocks,
            num_deleting=self._manager.tiers.num_deleting,
        )
