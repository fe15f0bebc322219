"""RoPE frequencies against transformers' own functions, and that the layouts of a checkpoint's heads come out as one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import UnsupportedModelError
from engine.model.rope import RopeTable, rope_frequencies
from engine.model.rotary_order import rotary_order
from engine.model_fields import Fields
from engine.rope_classes import RopeClass
from engine.rope_config import RopeConfig, read_rope

MAX_LEN = 1024
HEADS = ((64, 1.0), (32, 1.0), (64, 0.5), (6, 1.0), (4, 0.5), (2, 1.0))
LENGTHS = (1, 100, 1024, 1025, 5000)


def yarn(**more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, **more}


def longrope(dim: int, **more: Any) -> dict[str, Any]:
    short, long = [1.0 + 0.1 * i for i in range(dim // 2)], [2.0 + i for i in range(dim // 2)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **more}


def scalings(dim: int) -> list[dict[str, Any]]:
    """Every type, with each of its keys, and lengths and factors at their edges."""
    bands = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raised = [{"rope_type": "dynamic", "factor": factor} for factor in (0.5, 1.0, 2.0, 8.0)] if dim > 2 else []
    return [
        {"rope_type": "default"},
        *({"rope_type": "linear", "factor": factor} for factor in (0.5, 1.0, 4.0)),
        *raised,
        *(
            {**bands, "factor": factor, "original_max_position_embeddings": n}
            for factor, n in ((8.0, 8192), (0.5, 64), (32.0, 256))
        ),
        *(
            yarn(factor=factor, original_max_position_embeddings=n)
            for factor, n in product((0.5, 1.0, 16.0, 40.0), (8, 200, 4096))
        ),
        yarn(),
        yarn(factor=None, original_max_position_embeddings=256),
        yarn(attention_factor=1.0),
        yarn(mscale=0.707, mscale_all_dim=1.0),
        yarn(mscale=0.707),
        yarn(mscale=0, mscale_all_dim=1.0),
        yarn(beta_fast=8, beta_slow=2, truncate=False),
        yarn(beta_fast=0, beta_slow=None),
        yarn(beta_fast=1, beta_slow=1, truncate=False, original_max_position_embeddings=512),
        longrope(dim),
        longrope(dim, original_max_position_embeddings=256),
        longrope(dim, factor=32.0, original_max_position_embeddings=256),
        longrope(dim, attention_factor=1.25, original_max_position_embeddings=256),
    ]


CASES = [
    (head_dim, partial, theta, scaling)
    for head_dim, partial in HEADS
    for theta in (1e4, 5e5)
    for scaling in scalings(int(head_dim * partial))
]


def our_config(head_dim: int, partial: float, theta: float, scaling: dict[str, Any], **top: Any) -> RopeConfig:
    parameters = {**scaling, "rope_theta": theta, "partial_rotary_factor": partial}
    return read_rope(Fields("config.json", {"rope_parameters": parameters, **top}), head_dim, MAX_LEN)


@pytest.mark.parametrize("length", LENGTHS)
def test_frequencies_and_attention_factors_are_those_of_transformers(length: int) -> None:
    for head_dim, partial, theta, scaling in CASES:
        case = f"{head_dim} {partial} {theta} {scaling} at {length}"
        expected, expected_factor = theirs(head_dim, partial, theta, scaling, length)
        inv_freq, factor = rope_frequencies(our_config(head_dim, partial, theta, scaling), length)
        assert torch.isfinite(inv_freq).all(), case
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0.0, msg=lambda text, case=case: f"{case}: {text}")
        assert factor == pytest.approx(expected_factor, rel=1e-12), case


def theirs(head_dim: int, partial: float, theta: float, scaling: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    parameters = {**scaling, "rope_theta": theta, "partial_rotary_factor": partial}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_LEN,
        rope_parameters=dict(parameters),
    )
    if scaling["rope_type"] == "default":
        dim = int(head_dim * partial)
        return 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim), 1.0
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=length)


def test_ntk_is_a_raised_base_and_dynamic_reaches_it_by_length() -> None:
    """NTK-aware by s divides the lowest frequency by s and keeps the highest; dynamic by 1 at s times the length is the same."""
    plain, _ = rope_frequencies(our_config(64, 1.0, 1e4, {"rope_type": "default"}), MAX_LEN)
    ntk, factor = rope_frequencies(our_config(64, 1.0, 1e4, {"rope_type": "ntk", "factor": 4.0}), MAX_LEN)
    assert factor == 1.0
    assert float(ntk[0]) == 1.0
    assert float(plain[-1] / ntk[-1]) == pytest.approx(4.0, rel=1e-5)
    dynamic, _ = rope_frequencies(our_config(64, 1.0, 1e4, {"rope_type": "dynamic", "factor": 1.0}), 4 * MAX_LEN)
    torch.testing.assert_close(dynamic, ntk, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rope_type", ["ntk", "dynamic"])
def test_two_rotary_dimensions_have_no_raised_base(rope_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="2 rotary dimensions"):
        our_config(2, 1.0, 1e4, {"rope_type": rope_type, "factor": 2.0})


def test_the_length_at_the_top_level_wins_as_in_phi_3() -> None:
    top = our_config(8, 1.0, 1e4, longrope(8, original_max_position_embeddings=999), original_max_position_embeddings=256)
    assert (top.original_len, top.factor) == (256, 4.0)
    assert our_config(8, 1.0, 1e4, {**longrope(8), "rope_type": "su"}).rope_type == "longrope"


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "is_interleaved"), [(8, 8, True), (8, 4, False), (12, 8, True), (4, 2, True)]
)
def test_every_layout_rotates_as_halves_once_its_rows_are_ordered(head_dim: int, rotary_dim: int, is_interleaved: bool) -> None:
    """q . k of a plain rotation in the checkpoint's own layout equals that of halves after the reordering, at any positions."""
    rope = RopeConfig(rope_type="default", theta=100.0, head_dim=head_dim, rotary_dim=rotary_dim, is_interleaved=is_interleaved)
    order = rotary_order(rope)
    assert sorted(order.tolist()) == list(range(head_dim))
    table = RopeTable((RopeClass("", rope, 32, 32),), torch.device("cpu"))
    q, k = torch.randn(2, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for at_q, at_k in ((0, 0), (31, 3), (7, 30)):
        expected = plain_rotation(q, at_q, rope) @ plain_rotation(k, at_k, rope)
        ours = halves(q[order], table, at_q) @ halves(k[order], table, at_k)
        assert float(ours) == pytest.approx(float(expected), abs=1e-5)


def plain_rotation(x: torch.Tensor, position: int, rope: RopeConfig) -> torch.Tensor:
    """Pair by pair, element by element, as the layout says."""
    result = x.clone()
    half = rope.rotary_dim // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rope.is_interleaved else (i, i + half)
        angle = torch.tensor(position * rope.theta ** (-2 * i / rope.rotary_dim), dtype=torch.float64)
        result[a], result[b] = x[a] * angle.cos() - x[b] * angle.sin(), x[b] * angle.cos() + x[a] * angle.sin()
    return result


def halves(x: torch.Tensor, table: RopeTable, position: int) -> torch.Tensor:
    first, second = x.chunk(2)
    cos, sin = table.cos[position].double(), table.sin[position].double()
    return torch.cat((first * cos - second * sin, second * cos + first * sin))
