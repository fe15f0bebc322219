"""Plain counts and durations that leave the engine. No references to live objects; durations in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The state of the block pool. num_free + num_cached + num_referenced = num_blocks, always.

    ``num_context_tokens`` is the sum over running requests of the tokens whose K and V they read.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_referenced_blocks: int
    block_bytes: int
    block_size: int
    num_context_tokens: int

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
    """A request left the queue for the first time. Said once for each request, never at resumption."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did, and how the engine stands after it. All zero but the gauges when no step ran.

    ``num_prompt_tokens`` counts prompt tokens that were covered for the first time, computed or found in the cache.
    ``num_recomputed_tokens`` counts tokens computed again after a preemption; they are never hits.
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


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine settled on at start. ``notes`` are lines for the operator, numbers included.

    ``tail_bytes`` is what the open blocks of all requests may take, beside the pool, in a quantized format.
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
    tail_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """The blocks and, in a quantized format, the open blocks beside them."""
        return self.num_blocks * self.block_bytes + self.tail_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size
