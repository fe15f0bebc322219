"""How long a request may be, and how its positions are rotated: the model, the operator and the cache together decide, once."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ConfigError, InsufficientMemoryError
from engine.kv.format import SEALED_TYPES
from engine.kv.retention import Retention
from engine.kv.stream import StreamShape
from engine.model_config import ModelConfig
from engine.rope_classes import RopeClass, RopePlan, plan_rope, rope_classes

DEFAULT_SINKS = 4
MAX_STREAM_LEN = 2**20
"""The most tokens of a stream: their ids are kept in host memory, their K and V are not."""


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """``max_model_len`` is the longest prompt plus output, in tokens; the last of ``rope_classes`` covers it. ``retention`` says which
    blocks such a request holds. ``notes`` are for the operator."""

    max_model_len: int
    rope: RopePlan
    rope_classes: tuple[RopeClass, ...]
    retention: Retention
    notes: tuple[str, ...]


def plan_context(config: EngineConfig, model: ModelConfig, cache_tokens: int) -> ContextPlan:
    """The model's context or what was asked for, if the scaling reaches it and the cache of ``cache_tokens`` can hold it.

    Raises:
        ConfigError: more was asked for than the model and its scaling reach. InsufficientMemoryError: the cache holds no request.
    """
    if config.window is not None:
        return _plan_streams(config, model, cache_tokens)
    rope = plan_rope(model, config.rope_scaling, config.rope_policy, config.max_model_len)
    notes = [rope.note] if rope.note is not None else []
    wanted = _wanted_len(config, model, rope)
    retention = _retention(config, model, wanted)
    max_model_len = _fit(wanted, retention, cache_tokens, notes)
    classes = rope_classes(rope, max_model_len)
    if len(classes) > 1:
        notes.append("RoPE by request length: " + ", ".join(f"{each.name} to {each.max_len:,}" for each in classes))
    return ContextPlan(max_model_len, rope, classes, retention, tuple(notes))


def _plan_streams(config: EngineConfig, model: ModelConfig, cache_tokens: int) -> ContextPlan:
    """Positions are places in the cache: the scaling has to reach these, whatever a request's length."""
    shape, max_model_len = _stream_shape(config, model), config.max_model_len or MAX_STREAM_LEN
    rope = plan_rope(model, config.rope_scaling, config.rope_policy, None)
    if max_model_len > MAX_STREAM_LEN:
        raise ConfigError(f"max_model_len {max_model_len:,} is more than the {MAX_STREAM_LEN:,} tokens that a stream may have")
    if max_model_len <= shape.max_tokens:
        raise ConfigError(
            f"attention sinks and window take {shape.max_tokens:,} tokens in whole blocks, and no request may become longer than"
            f" {max_model_len:,}; raise --max-model-len or leave out --window"
        )
    if shape.max_tokens > rope.max_len:
        raise ConfigError(
            f"attention sinks and window take {shape.max_tokens:,} tokens in whole blocks, more than the {rope.max_len:,} that"
            f" {_reach(model, rope)}"
        )
    if shape.max_tokens > cache_tokens:
        raise InsufficientMemoryError(
            f"attention sinks and window take {shape.max_tokens:,} tokens in whole blocks; the KV cache holds {cache_tokens:,}"
        )
    sinks, window = shape.num_sink_blocks * shape.block_size, shape.num_window_blocks * shape.block_size
    note = (
        f"requests of more than {shape.max_tokens:,} tokens, up to {max_model_len:,}, read their first {sinks:,} and the last"
        f" {window - (shape.num_leaving - 1) * shape.block_size:,} to {window:,}"
    )
    retention = Retention(config.cache.block_size, stream=shape)
    return ContextPlan(max_model_len, rope, rope_classes(rope, shape.max_tokens), retention, (note,))


def _stream_shape(config: EngineConfig, model: ModelConfig) -> StreamShape:
    """In whole blocks: what is asked for is rounded up."""
    assert config.window is not None
    if model.sliding_window is not None:
        raise ConfigError(
            f"--window is for models without a sliding window; this one has one of {model.sliding_window:,} tokens"
        )
    if model.has_learned_positions:
        raise ConfigError("--window turns cached keys to other positions, which learned positions do not allow: it needs RoPE")
    if config.cache.kv_dtype in SEALED_TYPES:
        raise ConfigError(f"--window turns cached keys, which a cache in {config.cache.kv_dtype} cannot: use a float format")
    sinks, size = DEFAULT_SINKS if config.attention_sinks is None else config.attention_sinks, config.cache.block_size
    return StreamShape(size, -(-sinks // size), max(2, -(-config.window // size)))


def _wanted_len(config: EngineConfig, model: ModelConfig, rope: RopePlan) -> int:
    wanted = config.max_model_len if config.max_model_len is not None else rope.default_len
    if wanted > rope.max_len:
        raise ConfigError(f"max_model_len {wanted:,} is more than the {rope.max_len:,} tokens that {_reach(model, rope)}")
    return wanted


def _retention(config: EngineConfig, model: ModelConfig, max_model_len: int) -> Retention:
    """With the model's window, where requests can be longer than that."""
    window, max_step_tokens = model.sliding_window, config.scheduler.max_num_batched_tokens
    if window is None or window >= max_model_len:
        return Retention(config.cache.block_size)
    return Retention(config.cache.block_size, window, max_step_tokens)


def _fit(wanted: int, retention: Retention, cache_tokens: int, notes: list[str]) -> int:
    if wanted > cache_tokens and retention.max_blocks * retention.block_size > cache_tokens:
        notes.append(
            f"context shortened from {wanted:,} to {cache_tokens:,} tokens: that is what the KV cache holds; raise --kv-cache-memory for more"
        )
        wanted = cache_tokens
    if wanted < 2:
        raise InsufficientMemoryError(f"the KV cache holds {cache_tokens} token; a request needs 2 at least")
    return wanted


def _reach(model: ModelConfig, rope: RopePlan) -> str:
    """What the limit is made of, for the message: the numbers, so that a factor counted twice would show."""
    trained, scaling = model.max_position_embeddings, rope.rope
    if model.has_learned_positions:
        return "the model's learned position table has rows for, and no scaling extends it"
    if scaling.factor is None or rope.max_len == trained:
        return "the model was trained for"
    return f"{scaling.rope_type} scaling reaches ({scaling.original_len or trained:,} x {scaling.factor:g})"
