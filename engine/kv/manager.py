"""Block tables: which blocks hold a running request's K and V, in order. The one writer of tables, pool and tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv.block import Block, PrefixNode
from engine.kv.eviction import EvictionPolicy, LRUPolicy
from engine.kv.pool import BlockPool
from engine.kv.prefix import PrefixMatch, PrefixTree
from engine.kv.tails import TailSlots
from engine.request import Namespace


@dataclass(slots=True, eq=False)
class _BlockTable:
    """A running request's blocks. The first ``num_committed`` are in the tree; ``tip`` is the node of the last of them."""

    namespace: Namespace
    tip: PrefixNode | None
    blocks: list[Block] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0


class KVCacheManager:
    """Hands out blocks to requests and finds them again by their tokens.

    match_prefix  looks            allocate  takes blocks for tokens to come
    admit         takes a match    commit    publishes what was computed
    free          gives all back; what was committed stays cached until its block is needed
    """

    def __init__(
        self, num_blocks: int, block_size: int, policy: EvictionPolicy | None = None, tails: TailSlots | None = None
    ) -> None:
        self.block_size = block_size
        self.num_evicted_blocks = 0
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(block_size, policy if policy is not None else LRUPolicy())
        self._tables: dict[str, _BlockTable] = {}
        self._tails = tails
        self._clock = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached

    @property
    def num_referenced_blocks(self) -> int:
        return self._pool.num_referenced

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be had now: free ones, and cached ones (each can be reached by evicting leaves)."""
        return self._pool.num_free + self._pool.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """How many blocks a running request lacks to hold ``num_tokens`` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(self._tables[request_id].blocks))

    def match_prefix(self, namespace: Namespace, token_ids: Sequence[int]) -> PrefixMatch:
        return self._tree.match(namespace, token_ids)

    def can_admit(self, match: PrefixMatch, num_tokens: int, num_reserved: int) -> bool:
        """Whether a request of ``num_tokens`` known tokens fits beside ``num_reserved`` blocks promised to others."""
        num_revived = sum(block.ref_count == 0 for block in match.blocks)
        num_needed = self.num_blocks_for(num_tokens) - len(match.nodes)
        return num_needed + num_revived + num_reserved <= self.num_available_blocks

    def admit(self, request_id: str, namespace: Namespace, match: PrefixMatch) -> None:
        """Open a table that starts with the matched blocks, one reference taken on each."""
        assert request_id not in self._tables, f"request {request_id} has a block table already"
        self._clock += 1
        for node, block in zip(match.nodes, match.blocks, strict=True):
            self._pool.retain(block)
            self._tree.touch(node, self._clock)
        self._tables[request_id] = _BlockTable(
            namespace=namespace,
            tip=match.nodes[-1] if match.nodes else None,
            blocks=list(match.blocks),
            block_ids=[block.block_id for block in match.blocks],
            num_committed=len(match.nodes),
        )
        if self._tails is not None:
            self._tails.take(request_id)

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Make the table long enough for ``num_tokens`` tokens. False, and nothing taken, when the blocks are not there."""
        num_missing = self.num_missing_blocks(request_id, num_tokens)
        if num_missing > self.num_available_blocks:
            return False
        table = self._tables[request_id]
        for _ in range(num_missing):
            block = self._take_block()
            table.blocks.append(block)
            table.block_ids.append(block.block_id)
        return True

    def _take_block(self) -> Block:
        if self._pool.num_free == 0:
            victim = self._tree.evict()
            assert victim is not None, "every cached block must be reachable by evicting leaves"
            self.num_evicted_blocks += 1
            self._pool.reclaim(victim)
        return self._pool.allocate()

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Publish the blocks that are full by now. ``token_ids`` are the request's known tokens from the start.

        When another request published the same tokens first, its block takes the place of ours, which is freed.
        """
        table = self._tables[request_id]
        size = self.block_size
        while (table.num_committed + 1) * size <= num_computed_tokens:
            index = table.num_committed
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            node = self._tree.insert(table.namespace, table.tip, tokens, table.blocks[index])
            self._adopt(table, index, node)
            table.tip = node
            table.num_committed += 1

    def _adopt(self, table: _BlockTable, index: int, node: PrefixNode) -> None:
        """Let the table hold the node's block at ``index``, in place of a duplicate if that is what it holds."""
        own, shared = table.blocks[index], node.block
        assert shared is not None
        if shared is own:
            return
        self._pool.retain(shared)
        self._tree.touch(node, self._clock)
        self._pool.release(own)
        table.blocks[index] = shared
        table.block_ids[index] = shared.block_id

    def free(self, request_id: str) -> None:
        """Close the table. Committed blocks that nobody else holds stay cached; the others are free at once."""
        table = self._tables.pop(request_id)
        if self._tails is not None:
            self._tails.give_back(request_id)
        self._clock += 1
        for block in reversed(table.blocks):
            self._pool.release(block)
            if block.ref_count == 0 and block.node is not None:
                self._tree.offer(block.node, self._clock)

    def block_table(self, request_id: str) -> list[int]:
        """The request's block ids in token order. Read only."""
        return self._tables[request_id].block_ids

    def tail_slot(self, request_id: str) -> int | None:
        """Where the request's open block lies, in a quantized format; None in float formats."""
        return self._tails.slot(request_id) if self._tails is not None else None

    def check_integrity(self) -> None:
        """Assert that tables, pool and tree agree. For tests: walks everything."""
        self._pool.check_integrity()
        self._tree.check_integrity()
        if self._tails is not None:
            self._tails.check_integrity(set(self._tables))
        references: dict[int, int] = {}
        for table in self._tables.values():
            assert table.block_ids == [block.block_id for block in table.blocks]
            assert table.num_committed <= len(table.blocks)
            for index, block in enumerate(table.blocks):
                references[block.block_id] = references.get(block.block_id, 0) + 1
                assert (block.node is not None) == (index < table.num_committed), "only committed blocks are in the tree"
        for block in self._pool.blocks:
            assert block.ref_count == references.get(block.block_id, 0), f"block {block.block_id} leaks references"
        assert self.num_free_blocks + self.num_cached_blocks + self.num_referenced_blocks == self.num_blocks
        assert sum(1 for _ in self._tree.nodes()) >= self.num_cached_blocks
