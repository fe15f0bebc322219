"""When a waiting request may join the running ones. Looks at block counts; takes nothing and changes nothing.

What is let in too early grows into its neighbours' room and has one of them preempted; what is let in too late leaves room
unused. The same rule holds for a request that was preempted and wants to come back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.kv.manager import KVCacheManager
from engine.kv.match import PrefixMatch
from engine.request import Request
from engine.sched.lengths import HORIZON, FloatArray, OutputLengths
from engine.sched.victim import is_protected

MARGIN = 1.3
"""Standard deviations of the blocks in demand that are kept beside their mean. More: fewer preemptions, fewer running.

Whoever is let in is let in at a moment that looks good, so demand turns out higher than its mean: 1.0 recomputes nearly as much
as no foresight at all, 2.0 costs a tenth of the throughput (``make pressure-bench``)."""


def lasting_blocks(manager: KVCacheManager) -> int:
    """The blocks that no pin can take, now or later: they hold one request of the longest length at least."""
    return manager.num_blocks - manager.operator.pins.limits.max_blocks


class Gate(Protocol):
    """One step's decisions, to be asked in order of service. While nothing runs, whoever is asked first fits."""

    def fits(self, request: Request, match: PrefixMatch) -> bool:
        """Whether the request may join now, starting from the match."""

    def book(self, request: Request, match: PrefixMatch) -> None:
        """Set aside what it needs: it fits, and is about to be admitted."""


class AdmissionPolicy(Protocol):
    def open(self, running: Collection[Request], manager: KVCacheManager) -> Gate:
        """The gate for one step."""

    def note_finished(self, request: Request) -> None:
        """Learn from a request that has ended."""


class KnownTokens:
    """Let in what fits with the tokens that are known by now and one more for each: fills the cache, whatever comes after."""

    def open(self, running: Collection[Request], manager: KVCacheManager) -> Gate:
        return _KnownTokensGate(running, manager)

    def note_finished(self, request: Request) -> None:
        """Nothing to learn."""


class _KnownTokensGate:
    def __init__(self, running: Collection[Request], manager: KVCacheManager) -> None:
        self._manager = manager
        missing = sum(manager.num_growth_blocks(request.request_id, request.num_tokens + 1) for request in running)
        self._room = manager.num_available_blocks - missing

    def fits(self, request: Request, match: PrefixMatch) -> bool:
        return self._manager.num_needed_blocks(match, request.num_tokens) <= self._room

    def book(self, request: Request, match: PrefixMatch) -> None:
        self._room -= self._manager.num_needed_blocks(match, request.num_tokens + 1)


class ExpectedDemand:
    """Let in what fits with its known tokens, and beside what all are likely to need later.

    At each point of ``HORIZON`` the blocks in demand are a sum over requests: each has grown by so many tokens, or has ended and
    given its own blocks back. The mean and ``margin`` standard deviations must fit at all of them. A protected request is let
    in only if all protected ones could grow to their limits side by side, so that none of them is ever preempted again.
    """

    def __init__(self, margin: float = MARGIN) -> None:
        self._margin = margin
        self._lengths = OutputLengths()

    def open(self, running: Collection[Request], manager: KVCacheManager) -> Gate:
        return _ExpectedDemandGate(tuple(running), manager, self._lengths, self._margin)

    def note_finished(self, request: Request) -> None:
        self._lengths.note(request)


class _ExpectedDemandGate:
    def __init__(self, running: Sequence[Request], manager: KVCacheManager, lengths: OutputLengths, margin: float) -> None:
        self._running = running
        self._manager = manager
        self._lengths = lengths
        self._margin = margin
        self._known_tokens = _KnownTokensGate(running, manager)
        self._num_promised = sum(self._num_longest(request) for request in running if is_protected(request))
        self._demand: _Demand | None = None  # made when first asked for: in most steps nobody gets that far

    def fits(self, request: Request, match: PrefixMatch) -> bool:
        promised = self._num_promised + (self._num_longest(request) if is_protected(request) else 0)
        if promised > lasting_blocks(self._manager) or not self._known_tokens.fits(request, match):
            return False
        if self._demand is None:
            self._demand = self._demand_of_running()
        return not self._demand.num_requests or self._demand_with(request, match).fits(self._margin)

    def book(self, request: Request, match: PrefixMatch) -> None:
        self._demand = self._demand_with(request, match)
        self._num_promised += self._num_longest(request) if is_protected(request) else 0
        self._known_tokens.book(request, match)

    def _demand_with(self, request: Request, match: PrefixMatch) -> _Demand:
        assert self._demand is not None
        lasting = match.without_partial()  # what a partial match is copied from is needed for this step only
        return self._demand.plus(self._alive(request), self._manager.num_needed_blocks(lasting, request.num_tokens))

    def _num_longest(self, request: Request) -> int:
        return self._manager.num_blocks_for(request.max_num_tokens)

    def _alive(self, request: Request) -> FloatArray:
        alive: FloatArray = self._lengths.alive([request])[0]
        return alive

    def _demand_of_running(self) -> _Demand:
        manager, running = self._manager, self._running
        room = np.full(len(HORIZON), float(manager.num_available_blocks))
        if not running:
            return _Demand(manager.block_size, manager.max_request_blocks, -room, np.zeros_like(room), 0)
        alive = self._lengths.alive(running)
        tokens = np.array([request.num_tokens for request in running])[:, None]
        held = np.array([len(manager.blocks(request.request_id)) for request in running])[:, None]
        released = np.array([manager.num_released_blocks(request.request_id) for request in running])[:, None]
        own = np.array([manager.num_own_blocks(request.request_id) for request in running])[:, None]
        needed = (tokens + HORIZON) / manager.block_size + 0.5 - released  # half of the last block is empty on average
        grown = np.minimum(needed, manager.max_request_blocks) - held
        mean = (alive * grown - (1 - alive) * own).sum(axis=0) - room
        variance = (alive * (1 - alive) * (grown + own) ** 2).sum(axis=0)
        return _Demand(manager.block_size, manager.max_request_blocks, mean, variance, len(running))


@dataclass(frozen=True, slots=True)
class _Demand:
    """Blocks that will be in demand beyond those that can be had now, at each point of ``HORIZON``.

    No request holds more than ``max_blocks`` at a time.
    """

    block_size: int
    max_blocks: int
    mean: FloatArray
    variance: FloatArray
    num_requests: int

    def plus(self, alive: FloatArray, num_needed: int) -> _Demand:
        """With a request that takes ``num_needed`` blocks now and gives them back at its end."""
        grown = np.minimum(num_needed + HORIZON / self.block_size, max(num_needed, self.max_blocks))
        mean, variance = self.mean + alive * grown, self.variance + alive * (1 - alive) * grown**2
        return _Demand(self.block_size, self.max_blocks, mean, variance, self.num_requests + 1)

    def fits(self, margin: float) -> bool:
        return bool(np.all(self.mean + margin * np.sqrt(self.variance) <= 0))
