"""Who was served how much: a counter for each tenant, so that one tenant's flood does not starve another.

The rule is VTC's (Sheng et al., "Fairness in Serving Large Language Models"): whoever was served least is next, and a tenant that
comes back does not find its absence saved up for it. Knows tenants by name and tokens by number.
"""

from __future__ import annotations

_NUM_SPARE = 64
"""Counters of absent tenants that are kept before looking for those that have lost their meaning."""


class ServedTokens:
    """Prompt tokens computed and tokens generated, by tenant. A tenant is active while one of its requests waits or runs."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_requests: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        return self._served[tenant]

    def enter(self, tenant: str) -> None:
        """One more request. A newly active tenant starts no lower than the active one that was served least."""
        if not self._num_requests:
            self._served.clear()  # nobody has been kept waiting by anybody
        if tenant not in self._num_requests:
            floor = min((self._served[other] for other in self._num_requests), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self._forget_absent(floor)
        self._num_requests[tenant] = self._num_requests.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """One of the tenant's requests has ended."""
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Negative for what was charged and then not served."""
        self._served[tenant] += num_tokens

    def _forget_absent(self, floor: int) -> None:
        """An absent tenant's counter below the floor would be lifted to it anyway."""
        if len(self._served) > 2 * len(self._num_requests) + _NUM_SPARE:
            kept = self._served.items()
            self._served = {name: count for name, count in kept if count > floor or name in self._num_requests}
