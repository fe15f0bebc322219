"""Plain counts and durations that leave the engine. No references to live objects; durations in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The state of the block pool. num_free + num_cached + num_referenced = num_blocks, always.

    ``num_context_tokens`` is the sum over running requests of the tokens whose K and V they read. ``num_host_blocks`` are held in
    host memory; ``disk_bytes`` are all files of the disk cache's folder, headers and other models' blocks included.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_referenced_blocks: int
    block_bytes: int
    block_size: int
    num_context_tokens: int
    num_host_blocks: int = 0
    disk_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        return self.num_host_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size

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


@dataclass(frozen=True, slots=True)
class Admission:
    """A request left the queue for the first time. Said once for each request, never at resumption.

    ``num_cached_tokens`` were found on any tier. Of them, ``num_host_tokens`` and ``num_disk_tokens`` were not on the device;
    ``num_in_flight_tokens`` were computed by another request while this one was held back for it.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_seconds: float
    num_in_flight_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0

    @property
    def num_device_tokens(self) -> int:
        """On the device before the request came."""
        return self.num_cached_tokens - self.num_host_tokens - self.num_disk_tokens - self.num_in_flight_tokens


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did, and how the engine stands after it. All zero but the gauges when no step ran.

    ``num_prompt_tokens`` counts prompt tokens that were covered for the first time, computed or found in the cache.
    ``num_recomputed_tokens`` counts tokens computed again after a preemption; they are never hits. ``num_copied_blocks``
    were begun as copies of partly matching ones; ``num_merged_blocks`` turned out to be duplicates when full, and were freed.
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


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine settled on at start. ``notes`` are lines for the operator, numbers included.

    ``host_cache_bytes`` and ``disk_cache_bytes`` are what the lower tiers may hold.
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

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size
