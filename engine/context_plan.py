"""How long a request may be, and how its positions are rotated: the model, the operator and the cache together decide, once."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ConfigError, InsufficientMemoryError
from engine.model_config import ModelConfig
from engine.rope_classes import RopeClass, RopePlan, plan_rope, rope_classes


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """``max_model_len`` is the longest prompt plus output, in tokens; the last of ``rope_classes`` covers it. ``notes`` are for the operator."""

    max_model_len: int
    rope: RopePlan
    rope_classes: tuple[RopeClass, ...]
    notes: tuple[str, ...]


def plan_context(config: EngineConfig, model: ModelConfig, cache_tokens: int) -> ContextPlan:
    """The model's context or what was asked for, if the scaling reaches it and the cache of ``cache_tokens`` can hold it.

    Raises:
        ConfigError: more was asked for than the model and its scaling reach. InsufficientMemoryError: the cache holds no request.
    """
    rope = plan_rope(model, config.rope_scaling, config.rope_policy, config.max_model_len)
    notes = [rope.note] if rope.note is not None else []
    max_model_len = _max_model_len(config, model, rope, cache_tokens, notes)
    classes = rope_classes(rope, max_model_len)
    if len(classes) > 1:
        notes.append("RoPE by request length: " + ", ".join(f"{each.name} to {each.max_len:,}" for each in classes))
    return ContextPlan(max_model_len, rope, classes, tuple(notes))


def _max_model_len(config: EngineConfig, model: ModelConfig, rope: RopePlan, cache_tokens: int, notes: list[str]) -> int:
    limit, reason = rope.max_len, _reach(model, rope)
    if model.sliding_window is not None and model.sliding_window < limit:
        limit, reason = (
            model.sliding_window,
            "the model's sliding window spans (longer contexts need windowed attention, not built yet)",
        )
        notes.append(f"context limited to {limit:,} tokens, which {reason}")
    wanted = config.max_model_len if config.max_model_len is not None else min(rope.default_len, limit)
    if wanted > limit:
        raise ConfigError(f"max_model_len {wanted:,} is more than the {limit:,} tokens that {reason}")
    if wanted > cache_tokens:
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
