"""Prefixes that an operator protects from eviction for a time. Knows nodes, blocks and a clock; not who asks, nor why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.kv.block import PrefixNode
from engine.kv.pool import BlockPool
from engine.kv.prefix import PrefixTree


@dataclass(frozen=True, slots=True)
class PinLimits:
    """How many blocks pins may hold: no more than the budget, and so few that the longest request still fits beside them."""

    num_blocks: int
    budget_blocks: int
    longest_blocks: int

    @property
    def max_blocks(self) -> int:
        return max(0, min(self.budget_blocks, self.num_blocks - self.longest_blocks))

    def refusal(self, num_pinned: int, num_more: int) -> str | None:
        """Why ``num_more`` blocks cannot be pinned beside the ``num_pinned`` that are; None when they can."""
        total = num_pinned + num_more
        if total > self.budget_blocks:
            return f"pins would hold {total} blocks ({num_pinned} do now); the pin budget is {self.budget_blocks} blocks"
        if total > self.num_blocks - self.longest_blocks:
            return (
                f"pins would hold {total} blocks ({num_pinned} do now); the longest request needs {self.longest_blocks} of the"
                f" cache's {self.num_blocks} blocks, which leaves {self.max_blocks} for pins; a shorter --max-model-len leaves more"
            )
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A chain of full blocks: from the root or, in a windowed cache, those that a token behind them reads.

    ``expires_at`` is on the clock of its ``Pins``, in seconds.
    """

    pin_id: str
    nodes: tuple[PrefixNode, ...]
    num_tokens: int
    expires_at: float


class Pins:
    """All pins, by id. A pinned node is not evictable; its block counts as cached while no request uses it, but cannot be had.

    A node under several pins stays until the last of them is gone, and takes its room once. The one writer of ``num_pins``.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree, limits: PinLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._pool = pool
        self._tree = tree
        self._clock = clock
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def seconds_left(self, pin: Pin) -> float:
        return max(0.0, pin.expires_at - self._clock())

    def refusal(self, nodes: tuple[PrefixNode, ...], num_missing: int = 0) -> str | None:
        """Why these nodes, and ``num_missing`` blocks that are yet to be computed, cannot be pinned; None when they can."""
        num_new = sum(node.block is not None and not node.block.num_pins for node in nodes)
        return self.limits.refusal(self._pool.num_pinned, num_new + num_missing)

    def add(self, pin_id: str, nodes: tuple[PrefixNode, ...], num_tokens: int, seconds: float) -> Pin:
        """Pin resident nodes. There must be room for them (``refusal``), and the id must be new."""
        assert pin_id not in self._pins, f"pin {pin_id} exists already"
        assert self.refusal(nodes) is None, "pins must leave room for the longest request"
        pin = self._pins[pin_id] = Pin(pin_id, nodes, num_tokens, self._clock() + seconds)
        for node in nodes:
            assert node.block is not None
            self._pool.pin(node.block)
            self._tree.protect(node)
        return pin

    def remove(self, pin_id: str) -> Pin | None:
        """None when there is no such pin (any more)."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return None
        for node in reversed(pin.nodes):
            assert node.block is not None
            self._pool.unpin(node.block)
            self._tree.unprotect(node)
        return pin

    @property
    def seconds_to_expiry(self) -> float | None:
        """Until the next pin ends by itself; None when there is none."""
        return min((self.seconds_left(pin) for pin in self), default=None)

    def expire(self) -> bool:
        """End the pins whose time has come. Returns whether there were any."""
        now = self._clock()
        ended = [pin.pin_id for pin in self if pin.expires_at <= now]
        for pin_id in ended:
            self.remove(pin_id)
        return bool(ended)

    def check_integrity(self) -> None:
        counts: dict[int, int] = {}
        for pin in self:
            for node in pin.nodes:
                assert node.block is not None, f"pin {pin.pin_id} holds a block that the tree has forgotten"
                assert node.block.node is node
                counts[node.block.block_id] = counts.get(node.block.block_id, 0) + 1
        for block in self._pool.blocks:
            assert block.num_pins == counts.get(block.block_id, 0), f"block {block.block_id} and the pins disagree"
        assert self._pool.num_pinned == len(counts) <= self.limits.max_blocks
