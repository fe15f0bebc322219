"""The scenarios that are measured, as token ids, from a seed.

Lengths depend on the seed alone, so that repetitions can be compared; the ids depend on the salt and the repetition too,
so that no prefix cache knows them from before. Ids are uniform over the vocabulary: the speed of a dense model does not
depend on which tokens it reads. Knows nothing of HTTP or time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadtest.client import CompletionRequest


@dataclass(frozen=True, slots=True)
class Scenario:
    """``num_requests`` sent at once, each a shared prefix and tokens of its own. Length ranges include both ends.

    ``warm``: the prefix has been served once, untimed, before the requests are sent.
    """

    name: str
    num_requests: int
    own_len: tuple[int, int]
    output_len: tuple[int, int]
    prefix_len: int = 0
    warm: bool = False

    @property
    def shares_prefix(self) -> bool:
        """Whether cached tokens are to be expected; without, they would make a repetition meaningless."""
        return self.prefix_len > 0


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("single", 1, (128, 128), (128, 128)),
        Scenario("batch8", 8, (128, 512), (64, 128)),
        Scenario("batch16", 16, (128, 512), (64, 128)),
        Scenario("prefix16", 16, (32, 32), (32, 32), prefix_len=1024),
        Scenario("prefix16_warm", 16, (32, 32), (32, 32), prefix_len=1024, warm=True),
        Scenario("prefill2048", 1, (2048, 2048), (1, 1)),
    )
}


@dataclass(frozen=True, slots=True)
class Workload:
    """What one repetition sends: the primers one after another, untimed, then the requests at once."""

    primers: tuple[CompletionRequest, ...]
    requests: tuple[CompletionRequest, ...]


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """Makes workloads. Equal sources make equal workloads; two runs against one server need different salts."""

    vocab_size: int
    seed: int
    salt: int

    def build(self, scenario: Scenario, repetition: int) -> Workload:
        lengths = random.Random(f"{self.seed} {scenario.name} lengths")
        ids = random.Random(f"{self.seed} {scenario.name} ids {self.salt} {repetition}")
        prefix = self._tokens(ids, scenario.prefix_len)
        requests = tuple(
            CompletionRequest(
                prefix + self._tokens(ids, lengths.randint(*scenario.own_len)), lengths.randint(*scenario.output_len)
            )
            for _ in range(scenario.num_requests)
        )
        primers = (CompletionRequest(prefix + self._tokens(ids, scenario.own_len[0]), 1),) if scenario.warm else ()
        return Workload(primers, requests)

    def _tokens(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(self.vocab_size), k=count))
