"""Requests that wait for blocks or for a place in the batch, first come first served; preempted ones go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.request import Request


class WaitingQueue:
    """An ordered set of requests by id."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before all others. Victims are taken newest first, so arrival order is kept."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def popleft(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> Request | None:
        return self._requests.pop(request_id, None)
