"""What of a prompt the cache has: a finding that holds nothing, until an admission takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from engine.kv.block import Block, PrefixNode, Tokens
from engine.kv.tiers import Tier, TierHit


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """A block that starts with ``tokens``, the prompt's next ones; what else it holds differs, or is not wanted."""

    source: Block
    tokens: Tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def can_be_taken_over(self) -> bool:
        """The prompt goes on where the block ends, and nobody writes to it: it needs no copy, its new owner fills it further."""
        node = self.source.node
        return node is not None and len(node.tokens) == len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest run of resident tokens that a prompt starts with. A finding only: nothing is held by it.

    ``path`` are the full blocks from the root on, of which the first ``num_behind`` are not read any more and may lack their
    bytes (none of them without a window); ``nodes`` are the others, shared as they are; ``partial`` follows on them, to be copied
    from. The first ``num_public_blocks`` blocks of the request belong to the public tree, resident or not. ``below`` are the blocks
    that follow on ``path`` in the tiers: the leading ready ones are counted as resident and stand before any partial.
    """

    path: tuple[PrefixNode, ...]
    num_tokens: int
    partial: PartialMatch | None = None
    num_public_blocks: int = 0
    below: tuple[TierHit, ...] = ()
    num_behind: int = 0

    @property
    def nodes(self) -> tuple[PrefixNode, ...]:
        """The full blocks on the device that the request is to hold."""
        return self.path[self.num_behind :]

    @property
    def ready(self) -> tuple[TierHit, ...]:
        """The blocks that a step can load at once."""
        return tuple(takewhile(lambda hit: hit.is_ready, self.below))

    def num_tier_tokens(self, tier: Tier) -> int:
        """Tokens of the ready blocks that this tier is to be thanked for."""
        return sum(len(hit.tokens) for hit in self.ready if hit.tier is tier)

    def continued(self, below: tuple[TierHit, ...]) -> PrefixMatch:
        match = replace(self, below=below)
        ready = match.ready
        if not ready:
            return match
        match = match.without_partial()
        return replace(match, num_tokens=match.num_tokens + sum(len(hit.tokens) for hit in ready))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(node.block for node in self.nodes if node.block is not None)

    @property
    def num_revived_blocks(self) -> int:
        """How many cached blocks cannot be had any more once the match is taken, beside those that the request is to fill."""
        num_revived = sum(block.is_reclaimable for block in self.blocks)
        is_source = self.partial is not None and self.partial.source.is_reclaimable and not self.partial.can_be_taken_over
        return num_revived + is_source

    @property
    def found_nodes(self) -> tuple[PrefixNode, ...]:
        """All nodes that the match uses, be it in part; an open block has none."""
        last = self.partial.source.node if self.partial is not None else None
        return self.nodes if last is None else (*self.nodes, last)

    def without_partial(self) -> PrefixMatch:
        num_partial = self.partial.num_tokens if self.partial is not None else 0
        return replace(self, num_tokens=self.num_tokens - num_partial, partial=None)
