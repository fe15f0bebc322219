"""A plain model of the cache: what lies in which memory, followed by its tokens, and which hit that must give.

Every slot holds, beside its token, the number of its *way*: the namespaces and tokens from the start up to it. K and V of one way
may stand for those of an equal one, and for no other. The model looks at memories only, never at the prefix tree or at digests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.kv.disk_worker import ReadDone
from engine.kv.manager import KVCacheManager
from engine.kv.match import PrefixMatch
from engine.kv.tiers import Tier
from engine.request import Namespace
from engine.sched.plan import SampledToken, SampledTokens, StepPlan
from tests.factories import RecordingRunner, WatchedPool, next_token
from tests.fake_disk import FakeDisk

ALPHABET = 4  # so few tokens that what one request says, another may have said before


class Ways:
    """Numbers for ways: a trie, so that nothing collides."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[tuple[int | None, int | Namespace], int] = {}
        self._parents: list[int | None] = []
        self._blocks_before: dict[int, int | None] = {}

    def _next(self, way: int | None, step: int | Namespace) -> int:
        number = self._numbers.setdefault((way, step), len(self._numbers))
        if number == len(self._parents):
            self._parents.append(way)
        return number

    def of(self, namespace: Namespace, tokens: Sequence[int], num_public_tokens: int) -> list[int]:
        """One number for each token. With a salt, whole public blocks belong to the namespace without it."""
        return self._follow(namespace, tokens, num_public_tokens)[0]

    def place(self, namespace: Namespace, tokens: Sequence[int], num_public_tokens: int) -> int:
        """What all that continues these tokens lies below."""
        return self._follow(namespace, tokens, num_public_tokens)[1]

    def _follow(self, namespace: Namespace, tokens: Sequence[int], num_public_tokens: int) -> tuple[list[int], int]:
        num_public = num_public_tokens // self._block_size * self._block_size if namespace.salt else 0
        way = self._next(None, namespace._replace(salt="") if num_public else namespace)
        ways: list[int] = []
        for token in tokens:
            if num_public and len(ways) == num_public:
                way = self._next(way, namespace)
            way = self._next(way, token)
            ways.append(way)
            if len(ways) % self._block_size == 0:
                self._blocks_before[way] = ways[-1 - self._block_size] if len(ways) > self._block_size else None
        return ways, self._next(way, namespace) if num_public and len(ways) == num_public else way

    def is_below(self, way: int, place: int) -> bool:
        above: int | None = way
        while above is not None and above != place:
            above = self._parents[above]
        return above == place

    def is_reached(self, way: int, known: Collection[int], own: Collection[int | None]) -> bool:
        """Whether from a full block's last way one comes back to ``own`` over full blocks that are known. None is the root."""
        above = self._blocks_before[way]
        while above is not None and above not in own and above in known:
            above = self._blocks_before[above]
        return above in own


def said(prompt: Sequence[int], count: int, seed: int, window: int | None = None) -> list[int]:
    """What the fake model says after the prompt. Requests with other seeds go other ways."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((next_token(tokens if window is None else tokens[-window:]) + seed) % ALPHABET)
    return tokens[len(prompt) :]


class WayRunner(RecordingRunner):
    """Slots hold (position, token, way). Whatever a sequence reads must be of its own way. Tokens depend on the seed."""

    def __init__(
        self, block_size: int, pool: WatchedPool, ways_of: Callable[[str], Sequence[int]], window: int | None = None
    ) -> None:
        super().__init__(block_size, pool, window)
        self.slots: dict[int, Any]
        self.ways_of = ways_of
        self.from_disk: set[int] = set()  # host slots that a read has filled and nobody has loaded since

    def execute(self, plan: StepPlan) -> SampledTokens:
        sampled = super().execute(plan)
        self.from_disk -= {store.host_slot for store in plan.stores} | {load.host_slot for load in plan.loads}
        for sequence in plan.sequences:
            ways = self.ways_of(sequence.request_id)
            for position in range(sequence.start, sequence.seq_len):
                slot = self._slot(sequence, position)
                self.slots[slot] = (*self.slots[slot][:2], ways[position])
        for sequence in plan.sequences:
            ways = self.ways_of(sequence.request_id)
            for position in self.positions_read(sequence):
                way = self.slots[self._slot(sequence, position)][2]
                assert way == ways[position], "a sequence reads what another prefix has left"
        return SampledTokens(tuple(self._seeded(s.sample, t) for s, t in zip(plan.sequences, sampled.tokens, strict=True)))

    def _seeded(self, sample: Any, token: SampledToken | None) -> SampledToken | None:
        if token is None:
            return None
        assert token.token_id is not None
        return SampledToken((token.token_id + sample.seed) % ALPHABET)


class WayDisk(FakeDisk):
    """Notes which host slots it has filled."""

    def __init__(self, slots: MutableMapping[int, Any], from_disk: set[int]) -> None:
        super().__init__(slots)
        self.from_disk = from_disk

    def work(self, count: int) -> None:
        num_done = len(self.done)
        super().work(count)
        self.from_disk |= {done.slot for done in self.done[num_done:] if isinstance(done, ReadDone) and done.ok}


class Witness(Protocol):
    def matched(self, namespace: Namespace, tokens: Sequence[int], num_public_tokens: int, match: PrefixMatch) -> None: ...

    def admitting(self, request_id: str, match: PrefixMatch) -> None: ...


class WatchedManager(KVCacheManager):
    """Tells a witness of every match that it finds, and of every one that is taken, before anything changes."""

    witness: Witness

    def match_prefix(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int = 0) -> PrefixMatch:
        match = super().match_prefix(namespace, token_ids, num_public_tokens)
        self.witness.matched(namespace, token_ids, num_public_tokens, match)
        return match

    def admit(self, request_id: str, namespace: Namespace, match: PrefixMatch) -> None:
        self.witness.admitting(request_id, match)
        super().admit(request_id, namespace, match)


@dataclass(frozen=True)
class Hit:
    """How many tokens are found in each memory, the first on the device. ``num_below``: blocks that the tiers have behind those of
    the device, be they readable at once or not."""

    num_full_blocks: int
    device: int
    host: int
    disk: int
    num_below: int

    @property
    def num_tokens(self) -> int:
        return self.device + self.host + self.disk


class Memories:
    """What lies where now, within a step as it will be once the copies that are planned so far have been made."""

    def __init__(self, manager: KVCacheManager, runner: WayRunner) -> None:
        self._manager = manager
        self._window = runner.window
        self._runner = runner
        self._size = manager.block_size
        self._way_of_digest: dict[bytes, int] = {}

    def _cells(self, block_id: int) -> list[Any]:
        slots = range(block_id * self._size, (block_id + 1) * self._size)
        return [self._runner.slots[slot] for slot in slots if slot in self._runner.slots]

    def device(self) -> dict[int, list[int]]:
        """The ways in each block that holds any."""
        assert self._runner.pool is not None
        blocks = {
            block_id: [cell[2] for cell in self._cells(block_id)]
            for block_id in range(self._manager.num_blocks)
            if block_id not in self._runner.pool.emptied
        }
        stored = self._stored()
        for load in self._manager.tiers.loads:
            blocks[load.block_id] = [cell[2] for cell in stored.get(load.host_slot) or self._runner.host[load.host_slot]]
        for copy in self._manager._opener.copies:
            assert len(blocks[copy.source]) >= copy.num_tokens, "more is copied than is there"
            blocks[copy.target] = blocks[copy.source][: copy.num_tokens]
        return {block_id: ways for block_id, ways in blocks.items() if ways}

    def _stored(self) -> dict[int, list[Any]]:
        return {store.host_slot: self._cells(store.block_id) for store in self._manager.tiers.stores}

    def full(self) -> set[int]:
        """The last ways of the device's full blocks."""
        return {ways[-1] for ways in self.device().values() if len(ways) == self._size}

    def host(self) -> dict[int, Tier]:
        """The last way of each block that can be loaded at once, and which memory it counts for."""
        stored, found = self._stored(), {}
        for entry in self._manager.tiers.host:
            if not entry.is_ready:
                continue
            cells = stored.get(entry.slot) or self._runner.host[entry.slot]
            assert len(cells) == self._size
            way = cells[-1][2]
            assert self._way_of_digest.setdefault(entry.digest, way) == way, "one digest stands for two prefixes"
            is_read = entry.slot in self._runner.from_disk and entry.slot not in stored
            found[way] = Tier.DISK if is_read else Tier.HOST
        return found

    def below(self) -> set[int]:
        """The last ways of all blocks that the tiers say they have, files that were spoilt included."""
        tiers = self._manager.tiers
        digests = {entry.digest for entry in tiers.host} | {block.key.digest for block in tiers.disk}
        return {self._way_of_digest[digest] for digest in digests}

    def way_of(self, digest: bytes) -> int:
        return self._way_of_digest[digest]

    def hit(self, ways: Sequence[int]) -> Hit:
        """The longest prefix that is found anywhere; one token at least is left to compute."""
        limit, size = len(ways) - 1, self._size
        device = list(self.device().values())
        full = {block[-1] for block in device if len(block) == size}
        num_full = self.num_full_blocks(ways, full, limit // size)
        in_part = {way for block in device for way in block} if self._manager.allow_partial else set()
        lengths = range(num_full * size, limit + 1)
        if self._window is not None:  # a part of one block behind the full ones
            lengths = lengths[:size]
        longest = max([num_full * size, *(n for n in lengths if n and ways[n - 1] in in_part)])
        end = limit // size
        if self._window is not None:  # up to the next block that the device has
            end = next((i for i in range(num_full, end) if ways[(i + 1) * size - 1] in full), end)
        counts, num_below = self._continue(ways, num_full, end)
        num_ready = sum(counts.values())
        return Hit(num_full, num_full * size if num_ready else longest, counts[Tier.HOST], counts[Tier.DISK], num_below)

    def num_full_blocks(self, ways: Sequence[int], full: Collection[int], limit: int) -> int:
        """The longest prefix of full blocks of which all is there that the token behind it reads."""
        size = self._size
        if self._window is None:
            return max(n for n in range(limit + 1) if n == 0 or ways[n * size - 1] in full)
        window = self._window
        read = ((n, range(max(0, n * size - window + 1) // size, n)) for n in range(limit + 1))
        return max(n for n, blocks in read if all(ways[(i + 1) * size - 1] in full for i in blocks))

    def _continue(self, ways: Sequence[int], start: int, end: int) -> tuple[dict[Tier, int], int]:
        ready, anywhere = self.host(), self.below()
        counts, num_below, is_ready = {Tier.HOST: 0, Tier.DISK: 0}, 0, True
        for index in range(start, end):
            way = ways[(index + 1) * self._size - 1]
            if way not in anywhere:
                break
            num_below += 1
            is_ready = is_ready and way in ready
            if is_ready:
                counts[ready[way]] += self._size
        return counts, num_below


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
