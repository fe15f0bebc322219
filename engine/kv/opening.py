"""How a block table begins: with what its request's prefix match found, wherever its bytes lie.

    |  full blocks on the device  |  full blocks in the tiers  |  a block that matches in part  |
    |  shared as they are         |  loaded in the step        |  taken over, or copied         |

Notes the copies that the step has to make, and holds their sources until it is over. Knows no tokens to come.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.block import Block, BlockCopy
from engine.kv.device import DeviceBlocks
from engine.kv.match import PartialMatch, PrefixMatch
from engine.kv.prefix import PrefixTree
from engine.kv.table import BlockTable
from engine.kv.tier_cache import TierCache
from engine.kv.tiers import TierHit
from engine.request import Namespace


class Opener:
    """Opens tables. One for all of them: a step's copies have one order."""

    def __init__(self, device: DeviceBlocks, tree: PrefixTree, tiers: TierCache) -> None:
        self.num_copied = 0
        self.copies: list[BlockCopy] = []
        self.sources: list[Block] = []
        self._device = device
        self._tree = tree
        self._tiers = tiers

    def open(self, namespace: Namespace, match: PrefixMatch) -> BlockTable:
        """A table that holds a reference to each block of the match. What is loaded or copied gets its block at once."""
        blocks = [self._device.share(node) for node in match.nodes]
        table = BlockTable(
            namespace=namespace,
            num_public_blocks=match.num_public_blocks,
            tip=self._tree.tip(namespace, match.path, match.num_public_blocks),
            blocks=blocks,
            block_ids=[block.block_id for block in blocks],
            num_committed=len(match.path),
            num_tokens=match.num_tokens,
            num_released=match.num_behind,
        )
        self._tree.hang(table.tip, table.open)
        num_passed = max(0, match.num_behind - len(match.path))
        self._load(table, match.ready[:num_passed], match.ready[num_passed:])
        if match.partial is not None:
            table.append(self._part(match.partial))
            table.note_open(match.partial.tokens)
        return table

    def _load(self, table: BlockTable, passed: Sequence[TierHit], hits: Sequence[TierHit]) -> None:
        """Let the table go on with blocks from the tiers. They are in the tree at once: their bytes come before the step computes.

        Those ``passed`` lie behind the request's window: their bytes stay where they are.
        """
        entries = self._tiers.reserve(hits)
        blocks = [self._device.take() for _ in hits]  # before the tip moves: what hangs below it may be evicted for them
        tip = table.tip
        for hit in passed:
            tip = table.advance(self._tree.pave(tip, hit.tokens), self._tree)
        for hit, entry, block in zip(hits, entries, blocks, strict=True):
            self._tiers.load(entry, block.block_id)
            table.append(block)
            node = self._device.publish(tip, hit.tokens, block)
            assert node.block is block, "a block was loaded that is there"
            node.digest, node.last_used = hit.digest, self._device.now
            tip = table.advance(node, self._tree)
        table.move_tip(tip, self._tree)

    def _part(self, partial: PartialMatch) -> Block:
        """A block that holds the matched tokens and can be filled further, once the step's copies are made."""
        source = partial.source
        if partial.can_be_taken_over:
            assert source.node is not None
            return self._device.take_over(source.node)
        self._device.hold(source)
        target = self._device.take()
        self.copies.append(BlockCopy(source.block_id, target.block_id, partial.num_tokens))
        self.sources.append(source)
        self.num_copied += 1
        return target

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies, self.copies = tuple(self.copies), []
        return copies

    def end_step(self) -> None:
        """The step's copies are made: let go of their sources."""
        sources, self.sources = self.sources, []
        for source in sources:
            self._device.release(source)
