"""Block tables: which blocks hold a running request's K and V, in order. The one writer of tables, pool and tree while steps run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv.block import Block, BlockCopy, OpenBlock, PrefixNode, Tokens
from engine.kv.eviction import EvictionPolicy, LRUPolicy
from engine.kv.ghosts import Chain
from engine.kv.history import CacheHistory, FoundTokens
from engine.kv.operator import CacheOperator
from engine.kv.pins import PinLimits, Pins
from engine.kv.pool import BlockPool
from engine.kv.prefix import PartialMatch, PrefixMatch, PrefixTree, public_namespace
from engine.kv.tails import TailSlots
from engine.kv.tier_cache import TierCache, no_tiers
from engine.kv.tiers import TierHit
from engine.request import Namespace
from engine.stats import PromptSources


@dataclass(slots=True, eq=False)
class _BlockTable:
    """A running request's blocks. The first ``num_committed`` are in the tree; ``tip`` is the node of the last of them.

    While there is none, and below the last public block, the tip is a root or a branch. ``open`` hangs at the tip.
    ``num_tokens`` are computed by now, or will be copied.
    """

    namespace: Namespace
    num_public_blocks: int
    tip: PrefixNode
    blocks: list[Block]
    block_ids: list[int]
    num_committed: int
    num_tokens: int
    open: OpenBlock = field(default_factory=OpenBlock)

    def append(self, block: Block) -> None:
        self.blocks.append(block)
        self.block_ids.append(block.block_id)

    def note_open(self, tokens: Tokens) -> None:
        """The block behind the committed ones holds these tokens by now."""
        self.open.tokens = tokens
        self.open.block = self.blocks[self.num_committed] if tokens else None


class KVCacheManager:
    """Hands out blocks to requests and finds them again by their tokens.

    match_prefix  looks            allocate  takes blocks for tokens to come
    admit         takes a match    commit    publishes what was computed
    free          gives all back; what was computed stays cached until its block is needed

    A step: admissions may ask for copies (``take_copies``), whose sources stay held until the step is over (``finish_step``,
    before its commits). Without ``pin_limits`` nothing can be pinned. ``allow_partial`` is False for formats whose blocks cannot be
    shared in part: the quantized ones.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy | None = None,
        *,
        pool: BlockPool | None = None,
        allow_partial: bool = True,
        tails: TailSlots | None = None,
        tiers: TierCache | None = None,
        pin_limits: PinLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.num_evicted_blocks = 0
        self.num_copied_blocks = 0
        self.num_merged_blocks = 0
        self._pool = pool if pool is not None else BlockPool(num_blocks)
        assert self._pool.num_blocks == num_blocks
        self._tree = PrefixTree(block_size, policy if policy is not None else LRUPolicy(), allow_partial=allow_partial)
        self.tiers = tiers if tiers is not None else no_tiers()
        self.history = CacheHistory(num_blocks, block_size, clock)
        pins = Pins(self._pool, self._tree, pin_limits if pin_limits is not None else PinLimits(num_blocks, 0, 0), clock)
        self.operator = CacheOperator(self._pool, self._tree, self.tiers, pins, self.history)
        self._tables: dict[str, _BlockTable] = {}
        self._copies: list[BlockCopy] = []
        self._copy_sources: list[Block] = []
        self._tails = tails
        self._clock = 0

    @property
    def allow_partial(self) -> bool:
        return self._tree.allow_partial

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
        """Blocks that can be had now: free ones, and cached ones that are not pinned (each is reached by evicting leaves)."""
        return self._pool.num_available

    @property
    def num_pinned_blocks(self) -> int:
        return self._pool.num_pinned

    @property
    def num_block_references(self) -> int:
        """A block counts once for each table that holds it."""
        return sum(len(table.blocks) for table in self._tables.values())

    @property
    def num_filled_slots(self) -> int:
        """Tokens in the blocks that tables hold, each block counted once: committed ones are full and may be shared."""
        num_open_blocks = sum(len(table.blocks) - table.num_committed for table in self._tables.values())
        num_open_tokens = sum(table.num_tokens - table.num_committed * self.block_size for table in self._tables.values())
        return (self._pool.num_referenced - num_open_blocks) * self.block_size + num_open_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """How many blocks a running request lacks to hold ``num_tokens`` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(self._tables[request_id].blocks))

    def match_prefix(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int = 0) -> PrefixMatch:
        """The longest resident prefix. The full blocks of the first ``num_public_tokens`` tokens belong to no salt."""
        num_public_blocks = self._tree.num_public_blocks(namespace, num_public_tokens)
        match = self._tree.match(namespace, token_ids, num_public_blocks)
        below = self.tiers.match(namespace, match.nodes, token_ids, num_public_blocks, self.block_size)
        return match.continued(below) if below else match

    def can_admit(self, match: PrefixMatch, num_tokens: int, num_reserved: int) -> bool:
        """Whether a request of ``num_tokens`` known tokens fits beside ``num_reserved`` blocks promised to others."""
        num_revived = sum(block.is_reclaimable for block in match.blocks)
        partial = match.partial
        if partial is not None and partial.source.is_reclaimable and not partial.can_be_taken_over:
            num_revived += 1
        num_needed = self.num_blocks_for(num_tokens) - len(match.nodes)
        return num_needed + num_revived + num_reserved <= self.num_available_blocks

    def admit(self, request_id: str, namespace: Namespace, match: PrefixMatch) -> None:
        """Open a table that starts with the matched blocks, one reference taken on each.

        For blocks from the tiers and for a partial match, blocks are taken at once; their copies are noted for the step.
        """
        assert request_id not in self._tables, f"request {request_id} has a block table already"
        self._clock += 1
        self.history.tick()
        blocks = list(match.blocks)
        self.history.on_hit(match.found_nodes)
        for node, block in zip(match.nodes, blocks, strict=True):
            self._pool.retain(block)
            self._tree.touch(node, self._clock)
        table = _BlockTable(
            namespace=namespace,
            num_public_blocks=match.num_public_blocks,
            tip=self._tree.tip(namespace, match.nodes, match.num_public_blocks),
            blocks=blocks,
            block_ids=[block.block_id for block in blocks],
            num_committed=len(blocks),
            num_tokens=match.num_tokens,
        )
        self._tree.hang(table.tip, table.open)
        self._tables[request_id] = table
        if self._tails is not None:
            self._tails.take(request_id)
        self._load(table, match.ready)
        if match.partial is not None:
            self._open(table, match.partial)

    def _load(self, table: _BlockTable, hits: Sequence[TierHit]) -> None:
        """Let the table go on with blocks from the tiers. They are in the tree at once: their bytes come before the step computes."""
        entries = self.tiers.reserve(hits)
        tip = table.tip
        for hit, entry in zip(hits, entries, strict=True):
            block = self._take_block()
            self.tiers.load(entry, block.block_id)
            table.append(block)
            node = self._publish(tip, hit.tokens, block)
            assert node.block is block, "a block was loaded that is there"
            node.digest, node.last_used = hit.digest, self._clock
            tip = self._advance(table, node)
        self._move_tip(table, tip)

    def _open(self, table: _BlockTable, partial: PartialMatch) -> None:
        """Let the table's open block start with the matched tokens."""
        block = partial.source
        if partial.can_be_taken_over:
            self._pool.retain(block)
            assert block.node is not None
            self._tree.remove(block.node)
        else:
            block = self._copy(partial)
        table.append(block)
        table.note_open(partial.tokens)

    def _copy(self, partial: PartialMatch) -> Block:
        """A block that will hold the matched tokens once the step's copies are made. The source is held until then."""
        source = partial.source
        self._pool.retain(source)
        if source.node is not None:
            self._tree.touch(source.node, self._clock)
        target = self._take_block()
        self._copies.append(BlockCopy(source.block_id, target.block_id, partial.num_tokens))
        self._copy_sources.append(source)
        self.num_copied_blocks += 1
        return target

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that admissions have asked for since the last call, in their order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def finish_step(self) -> None:
        """The step's copies are made: let go of their sources."""
        self.tiers.end_step()
        self.history.tick()
        sources, self._copy_sources = self._copy_sources, []
        for source in sources:
            self._release(source)

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Make the table long enough for ``num_tokens`` tokens. False, and nothing taken, when the blocks are not there."""
        num_missing = self.num_missing_blocks(request_id, num_tokens)
        if num_missing > self.num_available_blocks:
            return False
        if num_missing:
            self.history.tick()
            table = self._tables[request_id]
            for _ in range(num_missing):
                table.append(self._take_block())
        return True

    def _take_block(self) -> Block:
        if self._pool.num_free == 0:
            victim = self._tree.pop_victim()
            assert victim is not None, "every cached block must be reachable by evicting leaves"
            self.num_evicted_blocks += 1
            self.history.on_evict(victim)
            if len(victim.tokens) == self.block_size:
                self.tiers.offload(victim)
            self._forget(victim)
        return self._pool.allocate()

    def _release(self, block: Block) -> None:
        self._pool.release(block)
        if block.ref_count == 0 and block.node is not None:
            self.history.on_release(block.node)
            self._tree.offer(block.node, self._clock)

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Publish the blocks that are full by now, and note what the open one holds.

        ``token_ids`` are the request's known tokens from the start. When another request published the same tokens first,
        its block takes the place of ours, which is freed.
        """
        table = self._tables[request_id]
        tip, size = table.tip, self.block_size
        table.num_tokens = num_computed_tokens
        self.history.tick()
        while (table.num_committed + 1) * size <= num_computed_tokens:
            index = table.num_committed
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            node = self._publish(tip, tokens, table.blocks[index])
            self._adopt(table, index, node)
            tip = self._advance(table, node)
        if self._tree.allow_partial:
            table.note_open(tuple(token_ids[table.num_committed * size : num_computed_tokens]))
        self._move_tip(table, tip)

    def _advance(self, table: _BlockTable, node: PrefixNode) -> PrefixNode:
        """One more of the table's blocks is in the tree, as ``node``; returns where the next one will hang."""
        table.num_committed += 1
        return node if table.num_committed != table.num_public_blocks else self._tree.branch(node, table.namespace)

    def _move_tip(self, table: _BlockTable, tip: PrefixNode) -> None:
        if tip is not table.tip:
            self._tree.hang(tip, table.open)
            self._tree.unhang(table.tip, table.open)
            table.tip = tip

    def _publish(self, parent: PrefixNode, tokens: Tokens, block: Block) -> PrefixNode:
        """Insert the block, and free the partial one that it makes useless. (In this order: a parent without children may go.)"""
        useless = self._tree.superseded(parent, tokens) if parent.children else None
        node = self._tree.insert(parent, tokens, block)
        if node.block is block:
            self.history.on_publish(node)
        if useless is not None:
            self._forget(useless)
        return node

    def _forget(self, node: PrefixNode) -> None:
        block = self._tree.remove(node)
        if block.ref_count == 0:
            self._pool.reclaim(block)

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
        self.num_merged_blocks += 1

    def free(self, request_id: str) -> None:
        """Close the table. Computed blocks that nobody else holds stay cached, the open one too; the others are free at once."""
        table = self._tables.pop(request_id)
        if self._tails is not None:
            self._tails.give_back(request_id)
        self._clock += 1
        self.history.tick()
        self._publish_open(table)
        self._tree.unhang(table.tip, table.open)
        for block in reversed(table.blocks):
            self._release(block)

    def _publish_open(self, table: _BlockTable) -> None:
        """Leave the open block as a partial node, unless another block holds its tokens too."""
        block, tokens = table.open.block, table.open.tokens
        table.note_open(())
        if block is not None and not self._tree.covers(table.tip, tokens):
            self._publish(table.tip, tokens, block)

    def full_nodes(self) -> Iterator[PrefixNode]:
        """Every published full block, in no order. Read only."""
        return (node for node in self._tree.nodes() if len(node.tokens) == self.block_size)

    def sources(self, namespace: Namespace, prompt: Sequence[int], match: PrefixMatch, found: FoundTokens) -> PromptSources:
        """Where a prompt's tokens come from, as the cache stands now: ``found`` of them were found, the first by ``match``."""
        top = public_namespace(namespace) if match.num_public_blocks else namespace
        chain = Chain(namespace, top, match.num_public_blocks, self.block_size)
        return self.history.label(prompt, found, match.nodes, chain)

    def block_table(self, request_id: str) -> list[int]:
        """The request's block ids in token order. Read only."""
        return self._tables[request_id].block_ids

    def tail_slot(self, request_id: str) -> int | None:
        """Where the request's open block lies, in a quantized format; None in float formats."""
        return self._tails.slot(request_id) if self._tails is not None else None

    def check_integrity(self) -> None:
        """Assert that tables, pool and tree agree. For tests: walks everything."""
        self._pool.check_integrity()
        nodes = self._tree.check_integrity()
        self.tiers.check_integrity()
        self.operator.pins.check_integrity()
        self.history.ghosts.check_integrity([node for node in nodes if len(node.tokens) == self.block_size])
        if self._tails is not None:
            self._tails.check_integrity(set(self._tables))
        references: dict[int, int] = {}
        for block in (*(block for table in self._tables.values() for block in table.blocks), *self._copy_sources):
            references[block.block_id] = references.get(block.block_id, 0) + 1
        for block in self._pool.blocks:
            assert block.ref_count == references.get(block.block_id, 0), f"block {block.block_id} leaks references"
        for table in self._tables.values():
            self._check_table(table)
        assert sum(len(node.open_blocks) for node in nodes) == len(self._tables), "an open block hangs without a table"
        assert self.num_free_blocks + self.num_cached_blocks + self.num_referenced_blocks == self.num_blocks
        assert sum(node.block is not None for node in nodes) >= self.num_cached_blocks

    def _check_table(self, table: _BlockTable) -> None:
        assert table.block_ids == [block.block_id for block in table.blocks]
        assert table.num_committed <= len(table.blocks)
        for index, block in enumerate(table.blocks):
            assert (block.node is not None) == (index < table.num_committed), "only committed blocks are in the tree"
        nodes = [block.node for block in table.blocks[: table.num_committed] if block.node is not None]
        assert all(len(node.tokens) == self.block_size for node in nodes)
        assert table.tip is self._tree.tip(table.namespace, nodes, table.num_public_blocks)
        assert table.open in table.tip.open_blocks
        assert len(table.open.tokens) < self.block_size
        assert (table.open.block is None) == (not table.open.tokens)
        if table.open.block is not None:
            assert self.allow_partial
            assert table.open.block is table.blocks[table.num_committed]
