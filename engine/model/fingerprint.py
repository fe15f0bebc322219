"""A name for what a model computes, equal in every process that loads the same weights the same way.

Blocks that outlive the process are kept under it. Knows weights and the model's shape; does not know blocks or files.
"""

from __future__ import annotations

import hashlib

import torch

from engine.model.weights import ModelWeights
from engine.model_config import ModelConfig

_SAMPLES = 4096  # elements of each tensor


def model_fingerprint(config: ModelConfig, weights: ModelWeights, computed_by: str) -> bytes:
    """SHA-256 over the config, each tensor's shape and evenly spaced elements of it, and ``computed_by``.

    ``computed_by`` names what else decides the last bits of K and V: dtype, device, backend. Sampled from the loaded tensors, a
    few milliseconds for a small model: it does not depend on the path, the file format or time stamps, and a fine-tune of any
    one tensor changes it.
    """
    digest = hashlib.sha256(f"{config!r} {computed_by}".encode())
    for tensor in weights.tensors():
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(_sample(tensor).numpy().tobytes())
    return digest.digest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """uint8, the bytes of at most _SAMPLES elements in order; the first and the last element are among them."""
    flat = tensor.detach().reshape(-1)
    count = min(flat.numel(), _SAMPLES)
    places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).round().long()
    return flat[places.to(flat.device)].cpu().view(torch.uint8)
