"""Block tables: which blocks hold a running request's K and V, in order. The one writer of tables, pool and tree while steps run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.kv.block import Block, BlockCopy, PrefixNode
from engine.kv.device import DeviceBlocks
from engine.kv.eviction import EvictionPolicy, LRUPolicy
from engine.kv.ghosts import Chain
from engine.kv.history import CacheHistory, FoundTokens
from engine.kv.match import PrefixMatch
from engine.kv.opening import Opener
from engine.kv.operator import CacheOperator
from engine.kv.pins import PinLimits, Pins
from engine.kv.pool import BlockPool
from engine.kv.prefix import PrefixTree, public_namespace
from engine.kv.retention import Retention
from engine.kv.stream import BlockTurn, StreamTable
from engine.kv.table import BlockTable
from engine.kv.tails import TailSlots
from engine.kv.tier_cache import TierCache, no_tiers
from engine.request import Namespace
from engine.stats import PromptSources


class KVCacheManager:
    """Hands out blocks to requests and finds them again by their tokens.

    match_prefix  looks            allocate  takes blocks for tokens to come
    admit         takes a match    commit    publishes what was computed
    free          gives all back; what was computed stays cached until its block is needed

    A step: admissions may ask for copies (``take_copies``), whose sources stay held until the step is over (``finish_step``,
    before its commits). Without ``pin_limits`` nothing can be pinned; without ``retention`` requests hold all their blocks. ``allow_partial`` is False for formats whose blocks cannot be
    shared in part: the quantized ones.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy | None = None,
        *,
        retention: Retention | None = None,
        pool: BlockPool | None = None,
        allow_partial: bool = True,
        tails: TailSlots | None = None,
        tiers: TierCache | None = None,
        pin_limits: PinLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self._retention = retention if retention is not None else Retention(block_size)
        assert self._retention.block_size == block_size
        self.num_merged_blocks = 0
        self._pool = pool if pool is not None else BlockPool(num_blocks)
        assert self._pool.num_blocks == num_blocks
        policy = policy if policy is not None else LRUPolicy()
        self._tree = PrefixTree(self._retention, policy, allow_partial=allow_partial)
        self.tiers = tiers if tiers is not None else no_tiers()
        self.history = CacheHistory(num_blocks, block_size, clock)
        pins = Pins(self._pool, self._tree, pin_limits if pin_limits is not None else PinLimits(num_blocks, 0, 0), clock)
        self.operator = CacheOperator(self._pool, self._tree, self.tiers, pins, self.history)
        self._device = DeviceBlocks(self._pool, self._tree, self.tiers, self.history)
        self._opener = Opener(self._device, self._tree, self.tiers)
        self._tables: dict[str, BlockTable | StreamTable] = {}
        self._tails = tails

    @property
    def allow_partial(self) -> bool:
        return self._tree.allow_partial

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_evicted_blocks(self) -> int:
        """Since the start, like the two others of what has come about."""
        return self._device.num_evicted

    @property
    def num_copied_blocks(self) -> int:
        return self._opener.num_copied

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
        """Blocks that can be had now: free ones, and cached ones that are not pinned (each can be reached by evictions)."""
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
        num_open_blocks = sum(table.num_blocks - table.num_committed for table in self._tables.values())
        num_open_tokens = sum(table.num_tokens - table.num_committed * self.block_size for table in self._tables.values())
        return (self._pool.num_referenced - num_open_blocks) * self.block_size + num_open_tokens

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose K and V requests hold to read, each counted once for each request."""
        return sum(table.num_tokens - table.num_released * self.block_size for table in self._tables.values())

    @property
    def max_request_blocks(self) -> int:
        """The most blocks that a request ever holds at a time; beyond all bounds without a window."""
        return self._retention.max_blocks

    def num_behind(self, num_tokens: int) -> int:
        """How many of a request's first blocks nothing behind its first ``num_tokens`` tokens reads."""
        return self._retention.num_behind(num_tokens)

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a request of so many tokens ever holds at a time."""
        return self._retention.num_blocks_for(num_tokens)

    def num_missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """How many blocks a running request lacks now to go on to ``num_tokens`` tokens."""
        return max(0, -(-num_tokens // self.block_size) - self._tables[request_id].num_blocks)

    def num_growth_blocks(self, request_id: str, num_tokens: int) -> int:
        """By how many blocks a running request is to grow at most until it has ``num_tokens`` tokens, step by step."""
        table = self._tables[request_id]
        return max(0, self._retention.num_blocks_for(num_tokens, table.num_released) - len(table.blocks))

    def num_own_blocks(self, request_id: str) -> int:
        """Blocks that could be had if the running request were freed."""
        return self._retention.num_own(self._tables[request_id].blocks)

    def blocks(self, request_id: str) -> Sequence[Block]:
        """The blocks that a running request holds, in token order. Read only."""
        return self._tables[request_id].blocks

    def match_prefix(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int = 0) -> PrefixMatch:
        """The longest resident prefix. The full blocks of the first ``num_public_tokens`` tokens belong to no salt.

        With a window, a prefix is resident if the device has the blocks within the window of the token behind it. The tiers continue
        it up to the next block that the device has: gaps are not bridged.
        """
        num_public_blocks = self._tree.num_public_blocks(namespace, num_public_tokens)
        match = self._tree.match(namespace, token_ids, num_public_blocks)
        below = self.tiers.match(namespace, match.path, token_ids, num_public_blocks, self.block_size)
        if not below:
            return match
        if self._retention.has_gaps:
            below = below[: self._gap(namespace, token_ids, match, len(below))]
        match = match.continued(below)
        num_full_tokens = (len(match.path) + len(match.ready)) * self.block_size
        return replace(match, num_behind=self._retention.num_behind(num_full_tokens))

    def _gap(self, namespace: Namespace, token_ids: Sequence[int], match: PrefixMatch, limit: int) -> int:
        """How many blocks behind the match the device lacks before the first that it has, up to ``limit``."""
        end = (len(match.path) + limit) * self.block_size
        beyond = self._tree.path(namespace, token_ids[:end], match.num_public_blocks)[len(match.path) :]
        return next((index for index, node in enumerate(beyond) if node.block is not None), limit)

    def num_needed_blocks(self, match: PrefixMatch, num_tokens: int) -> int:
        """How many of the available blocks a request of ``num_tokens`` tokens takes: new ones, and cached ones that it matches."""
        num_held = self._retention.num_blocks_for(num_tokens, match.num_behind)
        return num_held - len(match.nodes) + match.num_revived_blocks

    def admit(self, request_id: str, namespace: Namespace, match: PrefixMatch) -> None:
        """Open a table that starts with the matched blocks, one reference taken on each.

        For blocks from the tiers and for a partial match, blocks are taken at once; their copies are noted for the step.
        """
        assert request_id not in self._tables, f"request {request_id} has a block table already"
        self._device.tick()
        self.history.on_hit(match.found_nodes)
        self._tables[request_id] = self._opener.open(namespace, match)
        if self._tails is not None:
            self._tails.take(request_id)

    def is_stream(self, num_tokens: int) -> bool:
        """Whether a request that may come to so many tokens is a stream: see ``admit_stream``."""
        return self._retention.is_stream(num_tokens)

    def admit_stream(self, request_id: str) -> None:
        """Open the table of a stream: it starts with nothing, and nothing of it is ever published."""
        assert request_id not in self._tables, f"request {request_id} has a block table already"
        assert self._retention.stream is not None
        assert self._tails is None, "streams are for float formats: sealed keys cannot be turned"
        self._device.tick()
        self._tables[request_id] = StreamTable(self._retention.stream)

    def num_to_go(self, num_tokens: int) -> int:
        """How many tokens a stream of so many computed ones can compute in a step."""
        assert self._retention.stream is not None
        return self._retention.stream.num_to_go(num_tokens)

    def take_turns(self) -> tuple[tuple[str, BlockTurn], ...]:
        """The turns that streams have asked for since the last call, by request id."""
        turns: list[tuple[str, BlockTurn]] = []
        for request_id, table in self._tables.items():
            if isinstance(table, StreamTable):
                turns += [(request_id, turn) for turn in table.turns]
                table.turns.clear()
        return tuple(turns)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that admissions have asked for since the last call, in their order."""
        return self._opener.take_copies()

    def finish_step(self) -> None:
        """The step's copies are made: let go of their sources."""
        self.tiers.end_step()
        self.history.tick()
        self._opener.end_step()

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Make the table long enough for ``num_tokens`` tokens. False, and nothing taken, when the blocks are not there."""
        num_missing = self.num_missing_blocks(request_id, num_tokens)
        if num_missing > self.num_available_blocks:
            return False
        if num_missing:
            self.history.tick()
            table = self._tables[request_id]
            for _ in range(num_missing):
                table.append(self._device.take())
        return True

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Publish the blocks that are full by now, note what the open one holds, and let go of those behind the window.

        ``token_ids`` are the request's known tokens from the start. When another request published the same tokens first,
        its block takes the place of ours, which is freed.
        """
        table, tree, size = self._tables[request_id], self._tree, self.block_size
        if isinstance(table, StreamTable):
            self._let_go(table.advance(num_computed_tokens))
            return
        table.num_tokens = num_computed_tokens
        self.history.tick()
        tip = table.tip
        for index in range(table.num_committed, num_computed_tokens // size):
            block = table.block(index)
            node = self._device.publish(tip, tuple(token_ids[index * size : (index + 1) * size]), block)
            if node.block is not block:
                self._adopt(table, index, node)
            tip = table.advance(node, tree)
        if tree.allow_partial:
            table.note_open(tuple(token_ids[table.num_committed * size : num_computed_tokens]))
        table.move_tip(tip, tree)
        self._let_go(table.release(self._retention.num_behind(num_computed_tokens)))

    def _let_go(self, blocks: Sequence[Block]) -> None:
        """Of blocks that a window has left behind. What was left earlier is to be evicted earlier."""
        if blocks:
            self._device.tick()
        for block in blocks:
            self._device.release(block)

    def _adopt(self, table: BlockTable, index: int, node: PrefixNode) -> None:
        """Let the table hold the node's block at ``index``, in place of the duplicate that it holds."""
        own = table.block(index)
        table.replace(index, self._device.share(node))
        self._device.release(own)
        self.num_merged_blocks += 1

    def free(self, request_id: str) -> None:
        """Close the table. Computed blocks that nobody else holds stay cached, the open one too; the others are free at once."""
        table = self._tables.pop(request_id)
        if self._tails is not None:
            self._tails.give_back(request_id)
        self._device.tick()
        if isinstance(table, BlockTable):
            self._publish_open(table)
            self._tree.unhang(table.tip, table.open)
        for block in reversed(table.blocks):
            self._device.release(block)

    def _publish_open(self, table: BlockTable) -> None:
        """Leave the open block as a partial node, unless another block holds its tokens too."""
        block, tokens = table.open.block, table.open.tokens
        table.note_open(())
        if block is not None and not self._tree.covers(table.tip, tokens):
            self._device.publish(table.tip, tokens, block)

    def keep(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int = 0) -> None:
        """Somebody waits for what is cached of these tokens: let it be evicted after what nobody waits for."""
        match = self._tree.match(namespace, token_ids, self._tree.num_public_blocks(namespace, num_public_tokens))
        self._device.keep(match.found_nodes)

    def full_nodes(self) -> Iterator[PrefixNode]:
        """Every published full block, in no order. Read only."""
        return (node for node in self._tree.nodes() if len(node.tokens) == self.block_size)

    def sources(self, namespace: Namespace, prompt: Sequence[int], match: PrefixMatch, found: FoundTokens) -> PromptSources:
        """Where a prompt's tokens come from, as the cache stands now: ``found`` of them were found, the first by ``match``."""
        top = public_namespace(namespace) if match.num_public_blocks else namespace
        chain = Chain(namespace, top, match.num_public_blocks, self.block_size)
        return self.history.label(prompt, found, match.path, chain)

    def block_table(self, request_id: str) -> list[int]:
        """The ids of the blocks that the request holds, in token order. Read only."""
        return self._tables[request_id].block_ids

    def num_released_blocks(self, request_id: str) -> int:
        """How many of the request's blocks, from the first, it does not hold any more."""
        return self._tables[request_id].num_released

    def tail_slot(self, request_id: str) -> int | None:
        """Where the request's open block lies, in a quantized format; None in float formats."""
        return self._tails.slot(request_id) if self._tails is not None else None

    def check_integrity(self) -> None:
        """Assert that tables, pool and tree agree. For tests: walks everything."""
        self._pool.check_integrity()
        nodes = self._tree.check_integrity()
        self.tiers.check_integrity()
        self.operator.pins.check_integrity()
        self.history.ghosts.check_integrity(
            [node for node in nodes if node.block is not None and len(node.tokens) == self.block_size]
        )
        if self._tails is not None:
            self._tails.check_integrity(set(self._tables))
        references: dict[int, int] = {}
        for block in (*(block for table in self._tables.values() for block in table.blocks), *self._opener.sources):
            references[block.block_id] = references.get(block.block_id, 0) + 1
        for block in self._pool.blocks:
            assert block.ref_count == references.get(block.block_id, 0), f"block {block.block_id} leaks references"
        for table in self._tables.values():
            if isinstance(table, BlockTable):
                table.check_integrity(self._tree)
            else:
                table.check_integrity()
            assert len(table.blocks) <= self._retention.max_blocks, "a request holds more than its window needs"
        num_open = sum(isinstance(table, BlockTable) for table in self._tables.values())
        assert sum(len(node.open_blocks) for node in nodes) == num_open, "an open block hangs without a table"
        assert self.num_free_blocks + self.num_cached_blocks + self.num_referenced_blocks == self.num_blocks
        assert sum(node.block is not None for node in nodes) >= self.num_cached_blocks
