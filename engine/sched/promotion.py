"""Waiting requests whose prefix is on its way from the disk: held back without holding up those behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.kv.match import PrefixMatch
from engine.kv.tier_cache import Promotion, TierCache

PATIENCE_SECONDS = 5.0  # a disk that takes longer is no help: what it has brought by then is used, the rest is computed


@dataclass(slots=True)
class _Wait:
    promotion: Promotion
    deadline: float
    is_given_up: bool = False


class Promotions:
    """One promotion for each request and admission: whatever it brought, the request then starts with what is there."""

    def __init__(self, tiers: TierCache, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._clock = clock
        self._waits: dict[str, _Wait] = {}

    def give_up_overdue(self) -> None:
        """Hold nobody back who has waited too long. Between two calls, time changes nothing."""
        now = self._clock() if self._waits else 0.0
        for wait in self._waits.values():
            wait.is_given_up = wait.is_given_up or now >= wait.deadline

    def holds(self, request_id: str) -> bool:
        """Whether the request still waits for the disk. Cheap: it need not be matched again until then."""
        wait = self._waits.get(request_id)
        return wait is not None and not wait.is_given_up and not wait.promotion.is_done

    def start(self, request_id: str, match: PrefixMatch) -> bool:
        """Read what the match found on the disk. False, and nothing to wait for, if there is nothing or it has been tried."""
        if len(match.ready) == len(match.below) or request_id in self._waits:
            return False
        promotion = self._tiers.promote(match.below)
        self._waits[request_id] = _Wait(promotion, self._clock() + PATIENCE_SECONDS)
        return not promotion.is_done

    def forget(self, request_id: str) -> None:
        """The request is admitted, or gone. What is being read for it will still be of use to others."""
        self._waits.pop(request_id, None)
