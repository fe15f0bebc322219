"""What EngineCore needs of a runner. Apart from the real one, so that the scheduler's tests and a simulator need no torch."""

from __future__ import annotations

from typing import Protocol

from engine.sched.plan import SampledTokens, StepPlan


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> SampledTokens:
        """Compute the plan's tokens and draw one token for each sequence that samples."""
