"""What to do when there are more requests than blocks: the rules that belong together, as one object for the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sched.admission import AdmissionPolicy, ExpectedDemand, KnownTokens
from engine.sched.victim import CheapestVictim, NewestVictim, VictimPolicy


@dataclass(frozen=True, slots=True)
class PressurePolicy:
    """Who may join, who must go, and how many waiting requests are tried in a step while the first of them has no room."""

    admission: AdmissionPolicy
    victims: VictimPolicy
    max_tries: int


def cheapest_to_bring_back() -> PressurePolicy:
    """Let in what is likely to fit to its end, let small requests overtake a bounded number of times, preempt what loses least."""
    return PressurePolicy(ExpectedDemand(), CheapestVictim(), max_tries=16)


def recompute_newest() -> PressurePolicy:
    """First come, first served, until the cache is full; then the newest goes. The baseline that benchmarks compare with."""
    return PressurePolicy(KnownTokens(), NewestVictim(), max_tries=1)
