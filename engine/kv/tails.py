"""Tail slots: in a quantized format, where the open last block of each running request lies until it fills."""

from __future__ import annotations


class TailSlots:
    """A slot for each running request. Slots are numbers; their bytes are KVStorage's."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._taken: dict[str, int] = {}

    def take(self, request_id: str) -> None:
        assert request_id not in self._taken, f"request {request_id} has a tail slot already"
        assert self._free, f"{self.num_slots} tail slots for more requests than that"
        self._taken[request_id] = self._free.pop()

    def give_back(self, request_id: str) -> None:
        self._free.append(self._taken.pop(request_id))

    def slot(self, request_id: str) -> int:
        return self._taken[request_id]

    def check_integrity(self, request_ids: set[str]) -> None:
        """Assert that these requests, and no others, have slots, each its own."""
        assert self._taken.keys() == request_ids, "a tail slot leaks, or a request lacks one"
        assert sorted([*self._free, *self._taken.values()]) == list(range(self.num_slots))
