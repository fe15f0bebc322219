"""How long a request may be, and how its positions are rotated: the model, the operator and the cache together decide, once."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ConfigError, InsufficientMemoryError
from engine.kv.retention import Retention
from engine.model_config import ModelConfig
from engine.rope_classes import RopeClass, RopePlan, plan_rope, rope_classes


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
    rope = plan_rope(model, config.rope_scaling, config.rope_policy, config.max_model_len)
    notes = [rope.note] if rope.note is not None else []
    wanted = _wanted_len(config, model, rope)
    retention = _retention(config, model, wanted)
    max_model_len = _fit(wanted, retention, cache_tokens, notes)
    classes = rope_classes(rope, max_model_len)
    if len(classes) > 1:
        notes.append("RoPE by request length: " + ", ".join(f"{each.name} to {each.max_len:,}" for each in classes))
    return ContextPlan(max_model_len, rope, classes, retention, tuple(notes))


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
    if scaling.factor is None or rope.max_len == trained:
        return "the model was trained for"
    return f"{scaling.rope_type} scaling reaches ({scaling.original_len or trained:,} x {scaling.factor:g})"
