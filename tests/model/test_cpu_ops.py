"""The fused numba operations against their torch twins."""

from __future__ import annotations

import pytest
import torch

from engine.model.cpu_ops import CPUOps
from engine.model.ops import HeadNorm, HeadShape, TorchOps

FAST, SLOW = CPUOps(), TorchOps()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 16, 17, 150])
@pytest.mark.parametrize(("width", "depth"), [(64, 64), (37, 50), (3, 5), (960, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows: int, width: int, depth: int, with_bias: bool) -> None:
    x, weight, bias = randn(rows, depth), randn(width, depth), randn(width) if with_bias else None
    torch.testing.assert_close(FAST.linear(x, weight, bias), SLOW.linear(x, weight, bias), atol=2e-4, rtol=1e-4)


def test_a_row_has_the_same_bits_in_any_batch_of_two_or_more() -> None:
    for width, depth in ((960, 576), (39, 100)):
        x, weight = randn(150, depth), randn(width, depth)
        whole = FAST.linear(x, weight, None)
        for rows in (2, 3, 5, 16, 70):
            assert torch.equal(FAST.linear(x[:rows].clone(), weight, None), whole[:rows])
            assert torch.equal(FAST.linear(x[-rows:].clone(), weight, None), whole[-rows:])


def test_nan_comes_through() -> None:
    x = randn(2, 64)
    x[1, 3] = float("nan")
    out = FAST.linear(x, randn(8, 64), None)
    assert out[1].isnan().all()
    assert not out[0].isnan().any()
    assert FAST.rms_norm(x, randn(64), 1e-5)[1].isnan().any()


@pytest.mark.parametrize("rows", [1, 5])
def test_norms(rows: int) -> None:
    x, weight = randn(rows, 576), randn(576)
    torch.testing.assert_close(FAST.rms_norm(x, weight, 1e-5), SLOW.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)
    residuals = [randn(rows, 576) * 3 for _ in range(2)]
    outs = [ops.add_rms_norm(x.clone(), r, weight, 1e-5) for ops, r in zip((FAST, SLOW), residuals, strict=True)]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(residuals[0], residuals[1], atol=0, rtol=0)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("shape", [HeadShape(9, 3, 64), HeadShape(2, 1, 6)])
def test_rotate(with_norm: bool, shape: HeadShape) -> None:
    rows = 5
    qkv = randn(rows, shape.q_size + 2 * shape.kv_size)
    angles = randn(rows, shape.head_dim // 2)
    norm = HeadNorm(randn(shape.head_dim), randn(shape.head_dim) + 1, 1e-6) if with_norm else None
    fast, slow = qkv.clone(), qkv.clone()
    FAST.rotate(fast, shape, angles.cos(), angles.sin(), norm)
    SLOW.rotate(slow, shape, angles.cos(), angles.sin(), norm)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    assert torch.equal(fast[:, shape.q_size + shape.kv_size :], qkv[:, shape.q_size + shape.kv_size :]), "v is left alone"


def test_silu_mul_over_the_whole_range() -> None:
    gate = torch.cat((torch.linspace(-120, 120, 4001), torch.linspace(-1e-3, 1e-3, 101)))
    gate_up = torch.stack((gate, torch.ones_like(gate))).view(1, -1)
    torch.testing.assert_close(FAST.silu_mul(gate_up), SLOW.silu_mul(gate_up), atol=1e-7, rtol=2e-6)
