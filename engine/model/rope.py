"""Rotary position embedding: one function for each type, and the table of cos/sin rows that a batch points into.

Each function is ``config -> (inv_freq, attention_factor)``: float32 [rotary_dim / 2] angles per position, and the multiplier on
cos and sin. Same arithmetic, in the same float32 steps, as transformers' ``modeling_rope_utils``, so that results can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from engine.errors import UnsupportedModelError
from engine.model_config import RopeConfig

RopeFunction = Callable[[RopeConfig], tuple[torch.Tensor, float]]


def default_rope(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """theta^(-2i/d) (RoFormer, arXiv 2104.09864)."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / config.rotary_dim
    return 1.0 / (config.theta**exponents), 1.0


def linear_rope(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Position interpolation (arXiv 2306.15595): all positions divided by the factor."""
    assert config.factor is not None
    return default_rope(config)[0] / config.factor, 1.0


def llama3_rope(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Llama 3.1: short wavelengths as they are, long ones divided by the factor, a smooth passage between."""
    inv_freq, _ = default_rope(config)
    factor, original = config.factor, config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    assert factor is not None
    assert original is not None
    assert low is not None
    assert high is not None
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, blended, scaled), 1.0


ROPE_FUNCTIONS: dict[str, RopeFunction] = {"default": default_rope, "linear": linear_rope, "llama3": llama3_rope}


class RopeTable:
    """cos and sin rows of every RoPE class, one below the other. A batch carries row numbers, so no kernel knows of scaling.

    cos, sin: float32 [num_classes * max_len, rotary_dim / 2].
    """

    def __init__(self, configs: tuple[RopeConfig, ...], max_len: int, device: torch.device) -> None:
        self.max_len = max_len
        rows = [_rows(config, max_len) for config in configs]
        self.cos = torch.cat([cos for cos, _ in rows]).to(device)
        self.sin = torch.cat([sin for _, sin in rows]).to(device)

    def row(self, rope_class: int, position: int) -> int:
        assert position < self.max_len, f"position {position} is past the table of {self.max_len} rows"
        return rope_class * self.max_len + position


def _rows(config: RopeConfig, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    if config.rope_type not in ROPE_FUNCTIONS:
        raise UnsupportedModelError(f"RoPE type {config.rope_type!r} is not built; there are {', '.join(ROPE_FUNCTIONS)}")
    inv_freq, attention_factor = ROPE_FUNCTIONS[config.rope_type](config)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq[None, :]
    return angles.cos() * attention_factor, angles.sin() * attention_factor
