"""Which rotary embedding a model uses, and how a description of it is read: every key is understood or refused by name.

Knows no tensors: the frequencies come from model/rope.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.model_fields import Fields, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding with its scaling. Fields of other types are None.

    ``rope_type``: "none" (nothing is rotated: the model has learned positions); "default"; "linear" (positions / factor); "ntk" (raised base); "dynamic" (base raised by the length);
    "yarn"; "llama3" (wavelength bands); "longrope" (a divisor per frequency, one list for short and one for long sequences).
    The first ``rotary_dim`` elements of a head of ``head_dim`` are rotated. ``is_interleaved``: the checkpoint pairs
    elements 2i and 2i+1, not i and i + rotary_dim / 2. ``original_len`` is the length, in tokens, that the scaling starts from.
    """

    rope_type: str
    theta: float
    head_dim: int
    rotary_dim: int
    is_interleaved: bool = False
    factor: float | None = None
    original_len: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


def no_rope(head_dim: int) -> RopeConfig:
    """Of a model with learned positions. No description can name it: a scaling cannot take rotation away."""
    return RopeConfig(rope_type="none", theta=1.0, head_dim=head_dim, rotary_dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeBase:
    """What a description of scaling is read against: the head, and the lengths that the checkpoint states beside it.

    ``original_max_position_embeddings`` as some checkpoints (Phi-3) write it at the top level; it wins over the scaling's own.
    ``theta`` None: the scaling must or may bring its own.
    """

    theta: float | None
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int | None = None
    is_interleaved: bool = False


def read_rope(fields: Fields, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """From a config.json, in both spellings: ``rope_parameters`` (transformers 5), and ``rope_scaling`` beside ``rope_theta``.

    Raises:
        UnsupportedModelError: an unknown rope_type or key; DamagedModelError: a value that cannot be meant.
    """
    name, values = _values(fields)
    theta = None if fields.take("rope_theta") is None else fields.number("rope_theta")
    rope = Fields(f"config.json: {name}", values)
    base = RopeBase(
        theta=theta,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(fields, rope, head_dim),
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=fields.optional_integer("original_max_position_embeddings"),
        is_interleaved=fields.boolean("rope_interleaved", False),
    )
    return read_scaling(rope, base)


def read_scaling(rope: Fields, base: RopeBase) -> RopeConfig:
    """The scaling dictionary alone: ``rope_parameters``, ``rope_scaling`` or what an operator asks for. Raises as read_rope."""
    rope_type = _rope_type(rope)
    theta = _theta(rope, base.theta)
    if theta is None and rope_type != "default" and rope_type != "linear":
        raise rope.damaged("rope_theta is missing")
    if theta is not None and theta <= 1:
        raise rope.damaged(f"rope_theta must be above 1, got {theta}")
    result = RopeConfig(
        rope_type=rope_type,
        theta=10000.0 if theta is None else theta,
        head_dim=base.head_dim,
        rotary_dim=base.rotary_dim,
        is_interleaved=base.is_interleaved,
        **ROPE_READERS[rope_type](rope, base),
    )
    rope.refuse_rest({})
    if rope_type in ("ntk", "dynamic") and base.rotary_dim <= 2:
        raise rope.unsupported(
            "rope_type", rope_type, f" with {base.rotary_dim} rotary dimensions: its exponent is d / (d - 2)"
        )
    return result


def _values(fields: Fields) -> tuple[str, dict[str, Any]]:
    scaling, parameters = fields.take("rope_scaling") or {}, fields.take("rope_parameters") or {}
    if scaling and parameters and scaling != parameters:
        raise fields.damaged("rope_scaling and rope_parameters are both given and differ")
    name, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    if not isinstance(values, dict):
        raise fields.damaged(f"{name} must be an object, got {shown(values)}")
    return name, values


def _theta(rope: Fields, outer: float | None) -> float | None:
    theta = outer if rope.take("rope_theta") is None else rope.number("rope_theta")
    if outer is not None and theta != outer:
        raise rope.damaged(f"rope_theta is {theta}, but {outer} at the top level")
    return theta


def _rotary_dim(fields: Fields, rope: Fields, head_dim: int) -> int:
    """int(head_dim * partial_rotary_factor), as transformers has it; the factor may stand at either level."""
    outer, inner = (
        None if f.take("partial_rotary_factor") is None else f.number("partial_rotary_factor") for f in (fields, rope)
    )
    if outer is not None and inner is not None and outer != inner:
        raise rope.damaged(f"partial_rotary_factor is {inner}, but {outer} at the top level")
    factor = inner or outer or 1.0
    if factor == 1:
        return head_dim
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise fields.unsupported(
            "partial_rotary_factor",
            factor,
            f": of a head of {head_dim} it rotates {rotary_dim}, which must be even and within it",
        )
    return rotary_dim


def _rope_type(rope: Fields) -> str:
    newer, older = rope.take("rope_type"), rope.take("type")
    if newer is not None and older is not None and newer != older:
        raise rope.damaged(f"rope_type {shown(newer)} and type {shown(older)} differ")
    rope_type = newer or older or "default"
    rope_type = "longrope" if rope_type == "su" else rope_type  # Phi-3's first name for it
    if not isinstance(rope_type, str) or rope_type not in ROPE_READERS:
        raise rope.unsupported("rope_type", rope_type, f" (supported: {', '.join(ROPE_READERS)})")
    return rope_type


def _original_len(rope: Fields, base: RopeBase) -> int:
    """The top level's wins, then the scaling's own, then max_position_embeddings: transformers' order."""
    own = rope.optional_integer("original_max_position_embeddings")
    return base.original_max_position_embeddings or own or base.max_position_embeddings


def _factor(rope: Fields, base: RopeBase, original_len: int) -> float:
    """As given, or else by how much the declared context is longer than the original."""
    given = rope.take("factor") is not None
    return rope.number("factor") if given else base.max_position_embeddings / original_len


def _optional_number(rope: Fields, key: str) -> float | None:
    return None if rope.take(key) in (None, 0) else rope.number(key)  # a 0 counts as not given, as in transformers


def _read_default(rope: Fields, base: RopeBase) -> dict[str, Any]:
    return {}


def _read_linear(rope: Fields, base: RopeBase) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _read_ntk(rope: Fields, base: RopeBase) -> dict[str, Any]:
    return {"factor": rope.number("factor"), "original_len": _original_len(rope, base)}


def _read_dynamic(rope: Fields, base: RopeBase) -> dict[str, Any]:
    """Its length is max_position_embeddings, whatever else is declared; another one would change the result and is refused."""
    own = rope.optional_integer("original_max_position_embeddings")
    if own is not None and own != base.max_position_embeddings:
        hint = f": dynamic scaling starts at max_position_embeddings, {base.max_position_embeddings}"
        raise rope.unsupported("original_max_position_embeddings", own, hint)
    return {"factor": rope.number("factor"), "original_len": base.max_position_embeddings}


def _read_yarn(rope: Fields, base: RopeBase) -> dict[str, Any]:
    original_len = _original_len(rope, base)
    return {
        "original_len": original_len,
        "factor": _factor(rope, base, original_len),
        "beta_fast": _optional_number(rope, "beta_fast") or 32.0,
        "beta_slow": _optional_number(rope, "beta_slow") or 1.0,
        "truncate": rope.boolean("truncate", True),
        "mscale": _optional_number(rope, "mscale"),
        "mscale_all_dim": _optional_number(rope, "mscale_all_dim"),
        "attention_factor": None if rope.take("attention_factor") is None else rope.number("attention_factor"),
    }


def _read_llama3(rope: Fields, base: RopeBase) -> dict[str, Any]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.damaged(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return {
        "factor": rope.number("factor"),
        "original_len": _original_len(rope, base),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _read_longrope(rope: Fields, base: RopeBase) -> dict[str, Any]:
    original_len = _original_len(rope, base)
    if original_len < 2:
        raise rope.damaged(f"original_max_position_embeddings must be at least 2 for longrope, got {original_len}")
    return {
        "original_len": original_len,
        "factor": _factor(rope, base, original_len),
        "short_factor": _divisors(rope, "short_factor", base.rotary_dim // 2),
        "long_factor": _divisors(rope, "long_factor", base.rotary_dim // 2),
        "attention_factor": None if rope.take("attention_factor") is None else rope.number("attention_factor"),
    }


def _divisors(rope: Fields, key: str, count: int) -> tuple[float, ...]:
    values = rope.take(key)
    if values is None:
        raise rope.damaged(f"{key} is missing")
    if not isinstance(values, list) or len(values) != count:
        raise rope.damaged(f"{key} must hold {count} numbers (half the rotary dimensions), got {shown(values)}")
    return tuple(Fields(rope.source, {key: value}).number(key) for value in values)


ROPE_READERS: dict[str, Callable[[Fields, RopeBase], dict[str, Any]]] = {
    "default": _read_default,
    "linear": _read_linear,
    "ntk": _read_ntk,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
}
