"""Rotary position embedding: one function for each type, and the table of cos/sin rows that a batch points into.

Each function is ``(config, length) -> (inv_freq, attention_factor)``: float32 [rotary_dim / 2] angles per position, and the
multiplier on cos and sin. ``length`` is the longest sequence, in tokens, that these angles are meant for; only dynamic and
longrope look at it. Same arithmetic as transformers' ``modeling_rope_utils``, so that results can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from engine.rope_classes import RopeClass
from engine.rope_config import RopeConfig

RopeFunction = Callable[[RopeConfig, int], tuple[torch.Tensor, float]]


def rope_frequencies(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """What the module's docstring says, for the config's own type."""
    return ROPE_FUNCTIONS[config.rope_type](config, length)


def no_rope(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """No angles: every element of a head is left alone."""
    return torch.empty(0), 1.0


def default_rope(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """theta^(-2i/d) (RoFormer, arXiv 2104.09864)."""
    return _inv_freq(config.theta, config.rotary_dim), 1.0


def linear_rope(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """Position interpolation (arXiv 2306.15595): all positions divided by the factor."""
    assert config.factor is not None
    return _inv_freq(config.theta, config.rotary_dim) / config.factor, 1.0


def ntk_rope(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """The base raised so that the lowest frequency is divided by the factor (NTK-aware; YaRN, arXiv 2309.00071, section 3.1)."""
    assert config.factor is not None
    return _raised(config, config.factor), 1.0


def dynamic_rope(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """The base raised by what the length needs (YaRN, section 3.3); up to the original length nothing changes."""
    assert config.factor is not None
    assert config.original_len is not None
    stretch = max(length, config.original_len) / config.original_len
    return _raised(config, config.factor * stretch - (config.factor - 1)), 1.0


def yarn_rope(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """Fast frequencies as they are, slow ones divided by the factor, a ramp between (YaRN, section 3.2 and 3.4)."""
    assert config.factor is not None
    assert config.truncate is not None
    low, high = _yarn_turning_points(config)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)  # d - 1 though there are d / 2, as all implementations have it
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = _inv_freq(config.theta, config.rotary_dim)
    return inv_freq / config.factor * ramp + inv_freq * (1 - ramp), _yarn_attention_factor(config)


def _yarn_turning_points(config: RopeConfig) -> tuple[float, float]:
    """The indices i of the frequencies that turn beta_fast and beta_slow times within the original length."""
    assert config.original_len is not None
    assert config.beta_fast is not None
    assert config.beta_slow is not None
    scale, turns = config.rotary_dim / (2 * math.log(config.theta)), config.original_len / (2 * math.pi)
    return scale * math.log(turns / config.beta_fast), scale * math.log(turns / config.beta_slow)


def _yarn_attention_factor(config: RopeConfig) -> float:
    assert config.factor is not None
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:  # DeepSeek's pair: only both together mean anything
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def llama3_rope(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: short wavelengths as they are, long ones divided by the factor, a smooth passage between."""
    inv_freq = _inv_freq(config.theta, config.rotary_dim)
    factor, original = config.factor, config.original_len
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


def longrope(config: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """A divisor for each frequency, from one list up to the original length and from another beyond it (arXiv 2402.13753)."""
    assert config.original_len is not None
    divisors = config.long_factor if length > config.original_len else config.short_factor
    assert divisors is not None
    inv_freq = _inv_freq(config.theta, config.rotary_dim) / torch.tensor(divisors, dtype=torch.float32)
    return inv_freq, _longrope_attention_factor(config)


def _longrope_attention_factor(config: RopeConfig) -> float:
    assert config.factor is not None
    assert config.original_len is not None
    if config.attention_factor is not None:
        return config.attention_factor
    return 1.0 if config.factor <= 1 else math.sqrt(1 + math.log(config.factor) / math.log(config.original_len))


def _raised(config: RopeConfig, stretch: float) -> torch.Tensor:
    d = config.rotary_dim
    return _inv_freq(config.theta * stretch ** (d / (d - 2)), d)


def _inv_freq(theta: float, rotary_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    return 1.0 / (theta**exponents)


ROPE_FUNCTIONS: dict[str, RopeFunction] = {
    "none": no_rope,
    "default": default_rope,
    "linear": linear_rope,
    "ntk": ntk_rope,
    "dynamic": dynamic_rope,
    "yarn": yarn_rope,
    "llama3": llama3_rope,
    "longrope": longrope,
}


class RopeTable:
    """cos and sin rows of every RoPE class, one below the other. A batch carries row numbers, so no kernel knows of scaling.

    cos, sin: float32 [sum of the classes' max_len, head_dim / 2]. What a partial rotation leaves alone has cos 1 and sin 0.
    """

    def __init__(self, classes: Sequence[RopeClass], device: torch.device) -> None:
        rows = [_rows(each) for each in classes]
        self.cos = torch.cat([cos for cos, _ in rows]).to(device)
        self.sin = torch.cat([sin for _, sin in rows]).to(device)
        self._device = device
        self._classes = tuple(classes)
        self._lengths = [each.max_len for each in classes]
        self._starts = [sum(self._lengths[:i]) for i in range(len(classes))]

    def row(self, rope_class: int, position: int) -> int:
        length = self._lengths[rope_class]
        assert position < length, f"position {position} is past the {length} rows of RoPE class {rope_class}"
        return self._starts[rope_class] + position

    def turn(self, rope_class: int, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [head_dim / 2], of turning a rotated key by ``distance`` positions, forwards or back; its size stays."""
        each = self._classes[rope_class]
        inv_freq, _ = rope_frequencies(each.rope, each.length)
        angles = torch.zeros(each.rope.head_dim // 2, dtype=torch.float64)
        angles[: len(inv_freq)] = inv_freq.double() * distance
        return angles.cos().float().to(self._device), angles.sin().float().to(self._device)


def _rows(rope_class: RopeClass) -> tuple[torch.Tensor, torch.Tensor]:
    rope, num_rows = rope_class.rope, rope_class.max_len
    inv_freq, attention_factor = rope_frequencies(rope, rope_class.length)
    angles = torch.arange(num_rows, dtype=torch.float32)[:, None] * inv_freq[None, :]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    rest = (num_rows, (rope.head_dim - rope.rotary_dim) // 2)
    return torch.cat([cos, torch.ones(rest)], dim=1), torch.cat([sin, torch.zeros(rest)], dim=1)
