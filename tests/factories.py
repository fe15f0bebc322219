"""Small real parts for tests: requests, managers, schedulers, and a runner that computes tokens without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core import EngineCore
from engine.kv.block import Block, BlockCopy
from engine.kv.manager import KVCacheManager
from engine.kv.match import PrefixMatch
from engine.kv.moves import BlockLoad
from engine.kv.pool import BlockPool
from engine.request import Namespace, Request, SamplingParams
from engine.sched.plan import SampledToken, SampledTokens, ScheduledSequence, StepPlan
from engine.sched.pressure import PressurePolicy
from engine.sched.scheduler import Scheduler

EOS = 999_999


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    salt: str = "",
    priority: int = 0,
    arrival_time: float = 0.0,
    **sampling: object,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
    return Request(
        request_id,
        tuple(prompt),
        params,
        seed=0,
        namespace=Namespace(salt=salt),
        arrival_time=arrival_time,
        tenant=salt,
        priority=priority,
    )


class WatchedPool(BlockPool):
    """A pool that tells which blocks lost what they held: RecordingRunner forgets their slots, so that reading one is an error."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.emptied: set[int] = set()

    def allocate(self) -> Block:
        block = super().allocate()
        self.emptied.add(block.block_id)
        return block

    def release(self, block: Block) -> None:
        super().release(block)
        if block.ref_count == 0 and block.node is None:
            self.emptied.add(block.block_id)

    def reclaim(self, block: Block) -> None:
        super().reclaim(block)
        self.emptied.add(block.block_id)

    def take_emptied(self) -> set[int]:
        emptied, self.emptied = self.emptied, set()
        return emptied


def make_manager(num_blocks: int, block_size: int, **options: object) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, pool=WatchedPool(num_blocks), **options)  # type: ignore[arg-type]


def can_admit(manager: KVCacheManager, match: PrefixMatch, num_tokens: int, num_reserved: int) -> bool:
    """Whether a request of ``num_tokens`` known tokens fits beside ``num_reserved`` blocks promised to others."""
    return manager.num_needed_blocks(match, num_tokens) + num_reserved <= manager.num_available_blocks


def make_scheduler(
    *,
    num_blocks: int = 40,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    clock: Callable[[], float] = lambda: 0.0,
    max_prefill_beside_decodes: int | None = None,
    pressure: PressurePolicy | None = None,
    **options: object,
) -> Scheduler:
    """``options`` are the manager's."""
    return Scheduler(
        make_manager(num_blocks, block_size, **options),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_ids=(EOS,),
        clock=clock,
        max_prefill_beside_decodes=max_prefill_beside_decodes,
        pressure=pressure,
    )


def next_token(tokens: Sequence[int]) -> int:
    """What the fake model says after these tokens: depends on all of them, so a wrong context shows at once."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
    return value


class RecordingRunner:
    """A runner whose "cache" holds the token that was computed in each slot, and which reads its context back through the
    block table. If blocks are shared, copied, freed or reused wrongly, the context and so the token comes out wrong.

    With a watched pool, blocks that were freed or evicted since the last step hold nothing any more: reading one is an error.
    """

    def __init__(self, block_size: int, pool: WatchedPool | None = None, window: int | None = None) -> None:
        self.block_size = block_size
        self.pool = pool
        self.window = window  # what a query sees, and all that a token depends on
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.num_computed = 0
        self.num_copies = 0
        self.num_loads = 0
        self.host: dict[int, list[tuple[int, int] | None]] = {}  # host slot -> the contents of a block's slots

    def execute(self, plan: StepPlan) -> SampledTokens:
        self._check_write_targets(plan)
        for store in plan.stores:
            self.host[store.host_slot] = [self.slots.get(slot) for slot in self._block_slots(store.block_id)]
        for block_id in self.pool.take_emptied() if self.pool is not None else ():
            for slot in self._block_slots(block_id):
                self.slots.pop(slot, None)
        for load in plan.loads:
            self._load(load)
        for copy in plan.copies:
            self._copy(copy)
        out: list[SampledToken | None] = []
        for sequence in plan.sequences:
            for position, token in enumerate(sequence.token_ids, sequence.start):
                self.slots[self._slot(sequence, position)] = (position, token)
                self.num_computed += 1
            context = [self._read(sequence, position) for position in self.positions_read(sequence)]
            context = context[-self.window :] if self.window is not None else context
            out.append(SampledToken(next_token(context)) if sequence.sample is not None else None)
        return SampledTokens(tuple(out))

    def _block_slots(self, block_id: int) -> range:
        return range(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _load(self, load: BlockLoad) -> None:
        self.num_loads += 1
        for slot, content in zip(self._block_slots(load.block_id), self.host[load.host_slot], strict=True):
            assert content is not None, "a block was stored that was not full"
            self.slots[slot] = content

    def _copy(self, copy: BlockCopy) -> None:
        assert 0 < copy.num_tokens < self.block_size
        self.num_copies += 1
        pairs = zip(self._block_slots(copy.source), self._block_slots(copy.target), strict=True)
        for source, target in list(pairs)[: copy.num_tokens]:
            self.slots[target] = self.slots[source]

    def positions_read(self, sequence: ScheduledSequence) -> range:
        return range(max(0, sequence.start + 1 - self.window) if self.window is not None else 0, sequence.seq_len)

    def _slot(self, sequence: ScheduledSequence, position: int) -> int:
        index = position // self.block_size - sequence.first_block
        assert index >= 0, "a block is asked for that was let go of"
        return sequence.block_table[index] * self.block_size + position % self.block_size

    def _read(self, sequence: ScheduledSequence, position: int) -> int:
        stored_position, token = self.slots[self._slot(sequence, position)][:2]
        assert stored_position == position, "a block holds another position than its table says"
        return token

    def _check_write_targets(self, plan: StepPlan) -> None:
        written = [self._slot(s, position) for s in plan.sequences for position in range(s.start, s.seq_len)]
        assert len(set(written)) == len(written), "two sequences write to one slot"
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "two copies go to one block"
        for block_id in {*targets, *(slot // self.block_size for slot in written)} if self.pool is not None else ():
            assert self.pool.blocks[block_id].node is None, "a published block is written to"


def make_core(scheduler: Scheduler, window: int | None = None) -> tuple[EngineCore, RecordingRunner]:
    pool = scheduler.manager._pool
    runner = RecordingRunner(scheduler.manager.block_size, pool if isinstance(pool, WatchedPool) else None, window)
    return EngineCore(scheduler, runner, block_bytes=64, clock=lambda: 0.0), runner


def expected_tokens(prompt: Sequence[int], count: int, window: int | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens if window is None else tokens[-window:]))
    return tokens[len(prompt) :]
