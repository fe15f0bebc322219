"""From an EngineConfig to an engine that runs: opens the model, plans the memory, builds and warms the parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.attention.backend import AttentionBackend, choose_backend
from engine.config import CacheConfig, EngineConfig
from engine.context_plan import ContextPlan, plan_context
from engine.core import EngineCore
from engine.errors import ConfigError, InsufficientMemoryError
from engine.kernel_cache import use_kernel_cache
from engine.kv.format import ELEMENT_BYTES, SEALED_TYPES, KVFormat
from engine.kv.manager import KVCacheManager
from engine.kv.offload import HostBuffer
from engine.kv.pins import PinLimits
from engine.kv.storage import KVStorage
from engine.kv.tails import TailSlots
from engine.memory import available_bytes, plan_num_blocks
from engine.model.checkpoint import Checkpoint
from engine.model.fingerprint import model_fingerprint
from engine.model.llama import LlamaModel, Model
from engine.model.ops import TorchOps
from engine.model.rope import RopeTable
from engine.model.rotary_order import order_rotary_rows
from engine.model.value_rotation import rotate_values
from engine.model.weights import ModelWeights, load_weights, num_parameters, open_checkpoint
from engine.model_config import ModelConfig
from engine.request import SamplingParams
from engine.rope_classes import RopeClass
from engine.runner.model_runner import ModelRunner
from engine.sched.plan import SampleSpec, ScheduledSequence, StepPlan
from engine.sched.scheduler import Scheduler
from engine.stats import EngineInfo
from engine.tier_setup import Tiers, open_tiers

OnProgress = Callable[[str, float | None], None]

CPU_PREFILL_BESIDE_DECODES = 64
"""Tokens of prompts in a step that also decodes. ``make itl-bench`` shows what it gives and what it costs."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    core: EngineCore
    info: EngineInfo
    runner: ModelRunner
    tiers: Tiers

    def close(self, flush_seconds: float) -> None:
        """Keep what is cached on the disk, if there is a disk cache, for that long at most. No step may follow."""
        self.tiers.close(self.core.scheduler.manager.full_nodes(), flush_seconds)


def load_engine(config: EngineConfig, on_progress: OnProgress = lambda stage, share: None) -> LoadedEngine:
    """Build everything. ``on_progress`` hears of each stage and, where it is known, the share of it that is done.

    Raises:
        StartupError: the model cannot be served as asked; the message says why in one line.
    """
    use_kernel_cache()
    on_progress("opening the model", None)
    checkpoint = open_checkpoint(Path(config.model_path))
    model_config = checkpoint.config
    device = _device(config)
    notes: list[str] = []
    dtype = _compute_dtype(config, checkpoint, device, notes)
    plan_context(config, model_config, sys.maxsize)  # what no cache could mend is refused before the weights are loaded
    weights = _load_weights(checkpoint, dtype, device, on_progress)
    order_rotary_rows(weights, model_config.rope, model_config.num_heads, model_config.num_kv_heads)
    fmt = kv_format(config.cache, model_config, dtype, device)
    tails = _tail_slots(config, fmt)
    num_blocks = plan_num_blocks(config.cache, fmt.block_bytes, available_bytes(device), _tail_bytes(tails, fmt))
    context = plan_context(config, model_config, num_blocks * fmt.block_size)
    max_model_len = context.max_model_len
    notes.extend(context.notes)
    storage = KVStorage(fmt, num_blocks, device, num_tail_slots=tails.num_slots if tails is not None else 0)
    if fmt.rotates_values:
        rotate_values(weights, fmt.num_kv_heads, fmt.head_dim)
    attention = choose_backend(config.attention_backend, storage, model_config.num_heads, getattr(torch, dtype))
    tiers = _open_tiers(config, storage, model_config, weights, attention, context, on_progress)
    notes.extend(tiers.notes)
    runner = build_runner(
        model_config, weights, attention, tiers.buffer, context.rope_classes, device, context.retention.window
    )
    on_progress("warming up (compiles kernels at the first start)", None)
    _warm_up(runner, min(fmt.block_size, max_model_len), tails)
    core = _build_core(config, model_config, runner, fmt, num_blocks, context, tails, tiers)
    info = _info(config, model_config, weights, fmt, num_blocks, max_model_len, device, attention, tuple(notes))
    info = replace(
        info,
        host_cache_bytes=tiers.host_bytes,
        disk_cache_bytes=tiers.disk_bytes,
        tail_bytes=_tail_bytes(tails, fmt),
        rope_classes=tuple((each.name, each.max_len) for each in context.rope_classes),
        sliding_window=context.retention.window,
        stream_len=context.retention.stream.max_tokens if context.retention.stream is not None else None,
        position_table_len=model_config.max_position_embeddings if model_config.has_learned_positions else None,
    )
    return LoadedEngine(core, info, runner, tiers)


def _device(config: EngineConfig) -> torch.device:
    if config.device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {config.device!r}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch finds no CUDA device here; use --device cpu")
    if config.device == "cuda" and config.attention_backend == "cpu":
        raise ConfigError("the cpu attention backend cannot run on cuda; use auto or reference")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return torch.device(config.device)


def _compute_dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device, notes: list[str]) -> str:
    dtype = checkpoint.config.dtype
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu" and dtype != "float32":
        stored = " and ".join(checkpoint.matrix_types)
        notes.append(
            f"weights are {stored}; computing in float32, as 16-bit matrix products are slow on CPUs (--dtype changes it)"
        )
        return "float32"
    return dtype


def _load_weights(checkpoint: Checkpoint, dtype: str, device: torch.device, on_progress: OnProgress) -> ModelWeights:
    needed, available = num_parameters(checkpoint.config) * ELEMENT_BYTES[dtype], available_bytes(device)
    if needed > available:
        raise InsufficientMemoryError(
            f"the weights take {needed:,} bytes in {dtype}, but {available:,} are available on {device}; use a smaller model or dtype"
        )

    def progress(done: int, total: int) -> None:
        on_progress("loading weights", done / total)

    return load_weights(checkpoint, dtype=getattr(torch, dtype), device=device, progress=progress)


def kv_format(cache: CacheConfig, model: ModelConfig, dtype: str, device: torch.device) -> KVFormat:
    """The layout of the blocks of a model that computes in ``dtype``."""
    kv_dtype = dtype if cache.kv_dtype == "auto" else cache.kv_dtype
    tail_dtype = "float32" if device.type == "cpu" else dtype  # the CPU kernels compute in float32
    return KVFormat(
        dtype=kv_dtype,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=cache.block_size,
        tail_dtype=tail_dtype if kv_dtype in SEALED_TYPES else None,
    )


def _tail_slots(config: EngineConfig, fmt: KVFormat) -> TailSlots | None:
    """One for each request of a step; float formats need none."""
    scheduler = config.scheduler
    return TailSlots(min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)) if fmt.is_quantized else None


def _tail_bytes(tails: TailSlots | None, fmt: KVFormat) -> int:
    return tails.num_slots * fmt.tail_slot_bytes if tails is not None else 0


def build_runner(
    model: ModelConfig,
    weights: ModelWeights,
    attention: AttentionBackend,
    host: HostBuffer,
    classes: Sequence[RopeClass],
    device: torch.device,
    window: int | None = None,
) -> ModelRunner:
    rope = RopeTable(classes, device)
    return ModelRunner(_build_model(model, weights, attention), rope, attention, host, device, window)


def _open_tiers(
    config: EngineConfig,
    storage: KVStorage,
    model: ModelConfig,
    weights: ModelWeights,
    attention: AttentionBackend,
    context: ContextPlan,
    on_progress: OnProgress,
) -> Tiers:
    device, dtype = storage.bytes.device, weights.embed.dtype
    pool_bytes = storage.bytes.nbytes if device.type == "cpu" else 0  # reserved, but not touched yet

    def fingerprint() -> bytes:
        on_progress("reading the disk cache's folder", None)
        rope = f"{context.rope.rope!r} ladder={context.rope.is_ladder}"
        return model_fingerprint(model, weights, f"{dtype} {device.type} {attention.name} {rope}")

    longest = context.retention.num_blocks_for(context.max_model_len) * storage.format.block_size
    return open_tiers(config.cache, storage, fingerprint, longest, available_bytes(torch.device("cpu")) - pool_bytes)


def _build_model(config: ModelConfig, weights: ModelWeights, attention: AttentionBackend) -> Model:
    """The plain model, with the CPU's fast parts where they apply; numba is loaded only then."""
    if weights.embed.device.type != "cpu" or weights.embed.dtype != torch.float32:
        return LlamaModel(config, weights, TorchOps(), attention)
    import numba

    from engine.attention.cpu import CPUAttention
    from engine.attention.sealed_cpu import SealedCPUAttention
    from engine.model.cpu_decode_kernels import decode_layer
    from engine.model.cpu_decoder import CPUDecoder
    from engine.model.cpu_ops import CPUOps
    from engine.model.cpu_sealed_decode_kernels import sealed_decode_layer

    numba.set_num_threads(min(torch.get_num_threads(), numba.get_num_threads()))  # one choice for both, OMP_NUM_THREADS's too
    model = LlamaModel(config, weights, CPUOps(), attention)
    if not config.has_llama_block:
        return model
    if isinstance(attention, SealedCPUAttention):
        return CPUDecoder(model, attention, sealed_decode_layer)
    if isinstance(attention, CPUAttention) and attention.format.dtype == "float32":
        return CPUDecoder(model, attention, decode_layer)
    return model


def _warm_up(runner: ModelRunner, max_tokens: int, tails: TailSlots | None) -> None:
    """One decode alone, then a decode beside a prefill: every kernel is compiled before the first request. Block 0 takes the writes."""
    greedy = SampleSpec(SamplingParams(temperature=0.0), seed=0, position=0)
    slots = (None, None) if tails is None else (0, tails.num_slots - 1)
    single = ScheduledSequence("", (0,), 0, (0,), 0, greedy, slots[0])
    several = ScheduledSequence("", (0,) * min(4, max_tokens), 0, (0,), 0, greedy, slots[1])
    runner.execute(StepPlan((single,)))
    runner.execute(StepPlan((single, several)))


def _build_core(
    config: EngineConfig,
    model: ModelConfig,
    runner: ModelRunner,
    fmt: KVFormat,
    num_blocks: int,
    context: ContextPlan,
    tails: TailSlots | None,
    tiers: Tiers,
) -> EngineCore:
    longest_blocks = context.retention.num_blocks_for(context.max_model_len)
    pin_limits = PinLimits(num_blocks, _pin_budget(config.cache, fmt, num_blocks), longest_blocks)
    manager = KVCacheManager(
        num_blocks,
        fmt.block_size,
        retention=context.retention,
        allow_partial=not fmt.is_quantized,
        tails=tails,
        tiers=tiers.cache,
        pin_limits=pin_limits,
        clock=time.monotonic,
    )
    beside_decodes = config.scheduler.max_prefill_beside_decodes
    scheduler = Scheduler(
        manager,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        eos_token_ids=model.eos_token_ids,
        clock=time.monotonic,
        max_prefill_beside_decodes=CPU_PREFILL_BESIDE_DECODES
        if beside_decodes is None and config.device == "cpu"
        else beside_decodes,
    )
    return EngineCore(scheduler, runner, block_bytes=fmt.block_bytes, clock=time.monotonic)


def _pin_budget(cache: CacheConfig, fmt: KVFormat, num_blocks: int) -> int:
    """In blocks."""
    if cache.pin_budget_bytes is not None:
        return cache.pin_budget_bytes // fmt.block_bytes
    return int(cache.pin_budget_fraction * num_blocks)


def _info(
    config: EngineConfig,
    model: ModelConfig,
    weights: ModelWeights,
    fmt: KVFormat,
    num_blocks: int,
    max_model_len: int,
    device: torch.device,
    attention: AttentionBackend,
    notes: tuple[str, ...],
) -> EngineInfo:
    return EngineInfo(
        model_name=config.model_name,
        architecture=model.architecture,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.nbytes,
        device=device.type,
        dtype=str(weights.embed.dtype).removeprefix("torch."),
        kv_dtype=fmt.dtype,
        attention_backend=attention.name,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        block_size=fmt.block_size,
        num_blocks=num_blocks,
        block_bytes=fmt.block_bytes,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        eos_token_ids=model.eos_token_ids,
        notes=notes,
    )
