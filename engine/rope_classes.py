"""The RoPE classes of a server: which rotation a request gets for its length, once, at admission.

A class covers requests up to a length (prompt and output). All positions of a request are rotated as its class says, so no
request's rotation ever depends on another's length, and its blocks are shared within its class alone. Knows no tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.model_config import ModelConfig
from engine.model_fields import Fields
from engine.rope_config import RopeBase, RopeConfig, read_scaling

LADDER_TYPES = ("ntk", "dynamic", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeClass:
    """One rotation, for requests of at most ``max_len`` tokens that no smaller class covers.

    ``length`` is what the frequencies are computed for, where the type looks at a length.
    """

    name: str
    rope: RopeConfig
    length: int
    max_len: int


@dataclass(frozen=True, slots=True)
class RopePlan:
    """What is served: the scaling, whether short requests get less of it, and the longest context. ``note`` is for the operator.

    ``default_len`` is served unless a length is asked for; ``max_len`` is the longest that the scaling reaches.
    """

    rope: RopeConfig
    is_ladder: bool
    default_len: int
    max_len: int
    note: str | None = None


def plan_rope(model: ModelConfig, scaling: str | None, policy: str, wanted_len: int | None) -> RopePlan:
    """From the checkpoint's scaling, the operator's (JSON as in a config.json), a policy and a context length asked for.

    A context beyond the trained one of an unscaled model is reached by YaRN, on the ladder.

    Raises:
        ConfigError: the length is past what the scaling reaches, the policy does not fit, or the JSON is not understood.
    """
    trained = model.max_position_embeddings
    if model.has_learned_positions:
        return _learned_positions(model, scaling, policy, wanted_len)
    rope = model.rope if scaling is None else _read_operator_scaling(model, scaling)
    note, is_extended = None, False
    if (
        scaling is None
        and rope.rope_type == "default"
        and policy != "static"
        and wanted_len is not None
        and wanted_len > trained
    ):
        factor = 2 ** math.ceil(math.log2(wanted_len / trained))
        rope, is_extended = _yarn(rope, trained, factor), True
        note = f"context of {wanted_len:,} tokens is past the {trained:,} the model was trained for: YaRN by up to {factor}, by request length"
    is_ladder = policy == "ladder" or (
        policy == "auto" and rope.rope_type in LADDER_TYPES and (scaling is not None or is_extended)
    )
    if is_ladder and rope.rope_type not in LADDER_TYPES:
        raise ConfigError(f"--rope-policy ladder needs one of {', '.join(LADDER_TYPES)}; the scaling is {rope.rope_type}")
    default_len, max_len = context_lengths(rope, trained)
    return RopePlan(rope, is_ladder, default_len, max_len, note)


def _learned_positions(model: ModelConfig, scaling: str | None, policy: str, wanted_len: int | None) -> RopePlan:
    """The table is all there is: no scaling makes rows that were never trained."""
    table_len = model.max_position_embeddings
    wall = f"the model's positions are a learned table of {table_len:,} rows, which no scaling extends"
    if scaling is not None:
        raise ConfigError(f"--rope-scaling does not apply: {wall}")
    if policy == "ladder":
        raise ConfigError(f"--rope-policy ladder does not apply: {wall}")
    if wanted_len is not None and wanted_len > table_len:
        raise ConfigError(f"max_model_len {wanted_len:,} is out of reach: {wall}")
    return RopePlan(model.rope, False, table_len, table_len)


def context_lengths(rope: RopeConfig, max_position_embeddings: int) -> tuple[int, int]:
    """The context served unless another is asked for, and the longest that the scaling reaches.

    The factor counts once: from ``original_len`` where the scaling has one, and max_position_embeddings may state the product already.
    A linear factor has no length of its own, and some checkpoints state the context before it, some after.
    """
    if rope.rope_type in ("ntk", "dynamic", "yarn"):
        assert rope.original_len is not None
        assert rope.factor is not None
        reached = max(max_position_embeddings, int(rope.original_len * rope.factor))
        return reached, reached
    if rope.rope_type == "linear":
        assert rope.factor is not None
        return max_position_embeddings, max(max_position_embeddings, int(max_position_embeddings * rope.factor))
    return max_position_embeddings, max_position_embeddings


def rope_classes(plan: RopePlan, max_model_len: int) -> tuple[RopeClass, ...]:
    """The classes of a server, by growing length; the last covers ``max_model_len``, the first all that no scaling is needed for."""
    classes: list[RopeClass] = []
    for rope_class in _rungs(plan):
        is_last = rope_class.max_len >= max_model_len
        classes.append(replace(rope_class, max_len=min(rope_class.max_len, max_model_len)))
        if is_last:
            return tuple(classes)
    classes[-1] = replace(classes[-1], max_len=max_model_len)
    return tuple(classes)


def choose_rope_class(classes: Sequence[tuple[str, int]], num_tokens: int) -> int:
    """The smallest of the classes (name, longest request) that covers a request of that many tokens, prompt and output."""
    fitting = (index for index, (_, max_len) in enumerate(classes) if num_tokens <= max_len)
    chosen = next(fitting, None)
    assert chosen is not None, f"{num_tokens} tokens fit no RoPE class of {classes}; the length was not checked"
    return chosen


def _rungs(plan: RopePlan) -> Iterator[RopeClass]:
    rope = plan.rope
    if rope.rope_type == "longrope":
        assert rope.original_len is not None
        yield RopeClass("longrope-short", rope, rope.original_len, rope.original_len)
        yield RopeClass("longrope-long", rope, rope.original_len + 1, max(plan.max_len, rope.original_len + 1))
    elif rope.rope_type == "dynamic":
        yield from _dynamic_rungs(rope)
    elif plan.is_ladder:
        yield from _ladder_rungs(rope)
    else:
        name = rope.rope_type if rope.factor is None else f"{rope.rope_type}-{rope.factor:g}"
        yield RopeClass(name, rope, plan.max_len, plan.max_len)


def _dynamic_rungs(rope: RopeConfig) -> Iterator[RopeClass]:
    """The base for 1, 2, 4, ... times the original length: the least that the admitted length needs, in powers of two."""
    assert rope.original_len is not None
    for exponent in range(64):
        length = rope.original_len << exponent
        yield RopeClass(f"dynamic-{1 << exponent}", rope, length, length)


def _ladder_rungs(rope: RopeConfig) -> Iterator[RopeClass]:
    """Unscaled up to the original length, then factors 2, 4, 8, ... and the declared one last."""
    assert rope.original_len is not None
    assert rope.factor is not None
    plain = RopeConfig(
        rope_type="default",
        theta=rope.theta,
        head_dim=rope.head_dim,
        rotary_dim=rope.rotary_dim,
        is_interleaved=rope.is_interleaved,
    )
    yield RopeClass("default", plain, rope.original_len, rope.original_len)
    factor = 2.0
    while factor < rope.factor:
        yield _rung(rope, factor)
        factor *= 2
    if rope.factor > 1:
        yield _rung(rope, rope.factor)


def _rung(rope: RopeConfig, factor: float) -> RopeClass:
    """A declared attention factor belongs to the declared scaling; the smaller ones get their logarithmic share, as YaRN's formula has it."""
    assert rope.original_len is not None
    assert rope.factor is not None
    attention_factor = rope.attention_factor
    if attention_factor is not None and factor != rope.factor:
        attention_factor = 1 + (attention_factor - 1) * math.log(factor) / math.log(rope.factor)
    scaled = replace(rope, factor=factor, attention_factor=attention_factor)
    length = int(rope.original_len * factor)
    return RopeClass(f"{rope.rope_type}-{factor:g}", scaled, length, length)


def _yarn(rope: RopeConfig, original_len: int, factor: float) -> RopeConfig:
    return replace(
        rope, rope_type="yarn", factor=float(factor), original_len=original_len, beta_fast=32.0, beta_slow=1.0, truncate=True
    )


def _read_operator_scaling(model: ModelConfig, text: str) -> RopeConfig:
    """``--rope-scaling``: replaces the checkpoint's scaling; the base and the heads stay as they are unless rope_theta is given."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--rope-scaling is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--rope-scaling must be a JSON object, got {text}")
    fields = Fields("--rope-scaling", values)
    has_theta = fields.take("rope_theta") is not None
    base = RopeBase(
        theta=fields.number("rope_theta") if has_theta else model.rope.theta,
        head_dim=model.rope.head_dim,
        rotary_dim=model.rope.rotary_dim,
        max_position_embeddings=model.max_position_embeddings,
        is_interleaved=model.rope.is_interleaved,
    )
    return read_scaling(fields, base)
