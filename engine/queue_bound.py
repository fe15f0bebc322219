"""How many requests may wait for their first step: a bound that holds whatever arrives between two looks at the engine.

Lives in the API process. Knows counts, not requests.
"""

from __future__ import annotations

from engine.errors import InvalidRequestError, QueueFullError


class Place:
    """One request's place among those that wait. Held from its acceptance until it is admitted or gone."""

    def __init__(self, bound: QueueBound) -> None:
        self._bound = bound
        self._is_held = True

    def leave(self) -> None:
        """Give the place to another one. May be called again."""
        if self._is_held:
            self._is_held = False
            self._bound.num_waiting -= 1


class QueueBound:
    """Hands out at most ``max_queue`` places."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.num_waiting = 0

    def reserve(self, count: int) -> tuple[Place, ...]:
        """Places for ``count`` requests that come together: for all of them or for none.

        Raises:
            InvalidRequestError: there are never so many.
            QueueFullError: there are not so many now.
        """
        if count > self.max_queue:
            raise InvalidRequestError(
                f"{count} prompts and choices at once are more than may wait ({self.max_queue}, --max-queue); send fewer",
                param="prompt",
            )
        if self.num_waiting + count > self.max_queue:
            raise QueueFullError(
                f"{self.num_waiting} requests wait already and {self.max_queue} may (--max-queue); {count} more must come later"
            )
        self.num_waiting += count
        return tuple(Place(self) for _ in range(count))
