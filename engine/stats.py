"""Plain counts and durations that leave the engine. No references to live objects; durations in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Ages = tuple[tuple[float, int], ...]
"""Durations in seconds, each with how often it was seen."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The state of the block pool. num_free + num_cached + num_referenced = num_blocks, always.

    ``num_context_tokens`` is the sum over running requests of the tokens whose K and V they read. ``num_block_references``
    counts a block once for each running request that holds it; ``num_filled_slots`` are the tokens in referenced blocks, a
    shared one counted once. ``num_pinned_blocks`` are referenced or cached. ``num_host_blocks`` are held in host memory;
    ``disk_bytes`` are all files of the disk cache's folder, headers and other models' blocks included.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_referenced_blocks: int
    block_bytes: int
    block_size: int
    num_context_tokens: int
    num_block_references: int = 0
    num_filled_slots: int = 0
    num_pinned_blocks: int = 0
    num_host_blocks: int = 0
    disk_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        return self.num_host_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size

    @property
    def device_bytes(self) -> int:
        """Bytes of the blocks that hold something, in use or cached."""
        return (self.num_referenced_blocks + self.num_cached_blocks) * self.block_bytes

    @property
    def sharing_factor(self) -> float:
        """References over the distinct blocks that they are to; 1 while nothing runs."""
        return self.num_block_references / self.num_referenced_blocks if self.num_referenced_blocks else 1.0

    @property
    def internal_waste(self) -> float:
        """Share of the slots of referenced blocks that hold no token (yet); 0 while nothing runs."""
        num_slots = self.num_referenced_blocks * self.block_size
        return 1 - self.num_filled_slots / num_slots if num_slots else 0.0

    @property
    def effective_bytes_per_token(self) -> float:
        """Bytes of the blocks that running requests hold, over their context tokens; 0 while nothing runs."""
        if not self.num_context_tokens:
            return 0.0
        return self.num_referenced_blocks * self.block_bytes / self.num_context_tokens

    @property
    def efficiency(self) -> float:
        """Format bytes over effective bytes: above 1 when sharing outweighs waste; 1 while nothing runs."""
        effective = self.effective_bytes_per_token
        return self.bytes_per_token / effective if effective else 1.0

    @property
    def usage(self) -> float:
        """Share of the blocks that running requests hold, 0 to 1. Cached blocks can be taken at any time and do not count."""
        return self.num_referenced_blocks / self.num_blocks


class TokenSource(str, Enum):
    """Where a prompt token's K and V came from, or why they had to be computed. The values are the metric's words."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    IN_FLIGHT = "in_flight"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other_namespace"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSources:
    """Each token of a prompt under one label, decided at its request's first admission. The counts sum to the prompt.

    Found, and so not computed: ``device``, ``host``, ``disk``, and ``in_flight``: another request computed them
    while this one was held back for it. Computed: ``evicted`` were cached in this namespace before (``evicted_seconds`` ago,
    for the first of them), ``other_namespace`` are cached for others only, ``unseen`` are neither known to be the one nor the
    other: new, forgotten for long, in a block that is not full, or the one token that is always left to compute.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    in_flight: int = 0
    evicted: int = 0
    other_namespace: int = 0
    unseen: int = 0
    evicted_seconds: float | None = None

    def count(self, source: TokenSource) -> int:
        count: int = getattr(self, source.value)
        return count

    @property
    def num_tokens(self) -> int:
        return sum(self.count(source) for source in TokenSource)

    @property
    def num_cached_tokens(self) -> int:
        return self.device + self.host + self.disk + self.in_flight


@dataclass(frozen=True, slots=True)
class Admission:
    """A request left the queue for the first time. Said once for each request, never at resumption.

    ``num_cached_tokens`` were found on any tier, or computed by another request while this one was held back for it.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_seconds: float
    sources: PromptSources
    rope_class: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did, and how the engine stands after it. All zero but the gauges when no step ran.

    ``num_prompt_tokens`` counts prompt tokens that were covered for the first time, computed or found in the cache.
    ``num_recomputed_tokens`` counts tokens computed again after a preemption, ``num_regrown_tokens`` those computed again in a larger
    RoPE class; they are never hits. ``num_copied_blocks``
    were begun as copies of partly matching ones; ``num_merged_blocks`` turned out to be duplicates when full, and were freed.
    ``reuse_gaps``: how long cached blocks had lain unused when a request found them again; ``evict_idles``: when they were
    evicted.
    """

    num_scheduled_tokens: int
    num_prompt_tokens: int
    num_sampled_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    num_evicted_blocks: int
    num_running: int
    num_waiting: int
    step_seconds: float
    cache: CacheStats
    num_copied_blocks: int = 0
    num_merged_blocks: int = 0
    num_regrown_tokens: int = 0
    reuse_gaps: Ages = ()
    evict_idles: Ages = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine settled on at start. ``notes`` are lines for the operator, numbers included.

    ``host_cache_bytes`` and ``disk_cache_bytes`` are what the lower tiers may hold; ``tail_bytes`` is what the open blocks of all
    requests may take, beside the pool, in a quantized format. ``rope_classes`` are the name and the longest request of each.
    ``sliding_window`` in tokens, where requests may be longer: they hold the blocks within it only. Requests of more than
    ``stream_len`` tokens hold so many: their first and their last ones.
    ``position_table_len`` is that of a model with learned positions: nothing reaches past it.
    """

    model_name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    device: str
    dtype: str
    kv_dtype: str
    attention_backend: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    block_bytes: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    tail_bytes: int = 0
    rope_classes: tuple[tuple[str, int], ...] = ()
    position_table_len: int | None = None
    sliding_window: int | None = None
    stream_len: int | None = None

    def is_stream(self, num_tokens: int) -> bool:
        """Whether a request that may come to so many tokens holds its first and its last ones only."""
        return self.stream_len is not None and num_tokens > self.stream_len

    def num_places(self, num_tokens: int) -> int:
        """How many positions a request of so many tokens takes: a stream's are places in its cache."""
        return num_tokens if self.stream_len is None else min(num_tokens, self.stream_len)

    @property
    def holds_all(self) -> bool:
        """Whether every request holds all its tokens, so that the cache bounds its length."""
        return self.sliding_window is None and self.stream_len is None

    @property
    def cache_bytes(self) -> int:
        """The blocks and, in a quantized format, the open blocks beside them."""
        return self.num_blocks * self.block_bytes + self.tail_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size

    def limited_by(self, limit: int) -> str:
        """What limits requests to ``limit`` tokens, where it is not simply the context asked for: the end of a message."""
        if self.holds_all and limit == self.num_blocks * self.block_size:
            return f", all that the KV cache holds ({self.num_blocks} blocks of {self.block_size})"
        if limit == self.position_table_len:
            return ", the rows of its learned position table, past which no position exists and no scaling reaches"
        return ""
