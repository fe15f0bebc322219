"""Requests that wait for blocks or for a place in the batch, and in which order they are served.

By priority, lower first. Within a priority, preempted requests come first, by arrival; then the tenant that was served least, and
of its requests the oldest. Knows neither blocks nor steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from engine.request import Request, RequestStatus
from engine.sched.fairness import ServedTokens

MAX_OVERTAKEN = 64
"""So often may a later request go before one that has no room yet; then all behind it wait."""


class _Lane:
    """The waiting requests of one priority. Tenants without any are not kept."""

    def __init__(self) -> None:
        self.preempted: dict[str, Request] = {}
        self.tenants: dict[str, dict[str, Request]] = {}

    def __bool__(self) -> bool:
        return bool(self.preempted or self.tenants)

    def add(self, request: Request) -> None:
        if request.status is RequestStatus.PREEMPTED:
            self.preempted[request.request_id] = request
        else:
            self.tenants.setdefault(request.tenant, {})[request.request_id] = request

    def by_arrival(self) -> list[Request]:
        """The preempted ones."""
        return sorted(self.preempted.values(), key=lambda request: request.arrival_time)

    def remove(self, request: Request) -> None:
        if self.preempted.pop(request.request_id, None) is None:
            of_tenant = self.tenants[request.tenant]
            del of_tenant[request.request_id]
            if not of_tenant:
                del self.tenants[request.tenant]


class WaitingQueue:
    """A set of requests by id, iterated in order of service."""

    def __init__(self, served: ServedTokens) -> None:
        self._served = served
        self._requests: dict[str, Request] = {}
        self._lanes: dict[int, _Lane] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._lanes.setdefault(request.priority, _Lane()).add(request)

    def remove(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            lane = self._lanes[request.priority]
            lane.remove(request)
            if not lane:
                del self._lanes[request.priority]
        return request

    def preempted(self) -> Iterator[Request]:
        """Those that have been running before, in order of service. The queue must not change meanwhile."""
        for priority in sorted(self._lanes):
            yield from self._lanes[priority].by_arrival()

    def __iter__(self) -> Iterator[Request]:
        """The order of service. The request at hand may be removed and its tenant charged: what comes next heeds it."""
        for priority in sorted(self._lanes):
            lane = self._lanes[priority]
            yield from lane.by_arrival()
            yield from self._by_tenant(lane)

    def _by_tenant(self, lane: _Lane) -> Iterator[Request]:
        numbers = count()

        def head(tenant: str, request: Request) -> tuple[int, float, int, str, Request]:
            return self._served.of(tenant), request.arrival_time, next(numbers), tenant, request

        queues = {tenant: iter(list(requests.values())) for tenant, requests in lane.tenants.items()}
        heads = [head(tenant, next(queue)) for tenant, queue in queues.items()]
        heapq.heapify(heads)
        while heads:
            _, _, _, tenant, request = heapq.heappop(heads)
            yield request
            following = next(queues[tenant], None)
            if following is not None:
                heapq.heappush(heads, head(tenant, following))


class Overtaking:
    """Who had no room in one step, and whether those behind may still be tried: a bound on how much small requests gain on large.

    ``max_tries`` requests may be found without room before the step tries no more. Nobody goes before a preempted request, before
    one that was overtaken ``MAX_OVERTAKEN`` times, or before one of a more important priority.
    """

    def __init__(self, max_tries: int) -> None:
        self._max_tries = max_tries
        self._passed: list[Request] = []
        self._is_over = False

    def pass_over(self, request: Request) -> None:
        """There is no room for the request now."""
        self._passed.append(request)
        bound = request.status is RequestStatus.PREEMPTED or request.num_overtaken >= MAX_OVERTAKEN
        self._is_over = self._is_over or bound or len(self._passed) >= self._max_tries

    def may_try(self, request: Request) -> bool:
        return not self._passed or (not self._is_over and request.priority == self._passed[0].priority)

    def note_admission(self) -> None:
        """A request behind those passed over was let in."""
        for request in self._passed:
            request.num_overtaken += 1
