"""Waiting requests whose prefix is on its way from the disk: held back without holding up those behind them."""

from __future__ import annotations

from engine.kv.prefix import PrefixMatch
from engine.kv.tier_cache import Promotion, TierCache


class Promotions:
    """One promotion for each request and admission: whatever it brought, the request then starts with what is there."""

    def __init__(self, tiers: TierCache) -> None:
        self._tiers = tiers
        self._by_request: dict[str, Promotion] = {}

    def holds(self, request_id: str) -> bool:
        """Whether the request still waits for the disk. Cheap: it need not be matched again until then."""
        promotion = self._by_request.get(request_id)
        return promotion is not None and not promotion.is_done

    def start(self, request_id: str, match: PrefixMatch) -> bool:
        """Read what the match found on the disk. False, and nothing to wait for, if there is nothing or it has been tried."""
        if len(match.ready) == len(match.below) or request_id in self._by_request:
            return False
        promotion = self._by_request[request_id] = self._tiers.promote(match.below)
        return not promotion.is_done

    def forget(self, request_id: str) -> None:
        """The request is admitted, or gone. What is being read for it will still be of use to others."""
        self._by_request.pop(request_id, None)
