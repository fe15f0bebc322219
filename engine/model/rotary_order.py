"""Orders the rows of q and k so that every model rotates alike: element i of a head with element i + head_dim / 2.

A checkpoint may pair neighbours instead (interleaved), or rotate only the first elements of a head (partial). The same order for
q and k leaves their product as it is, so the kernels and the cache know one layout.
"""

from __future__ import annotations

import torch

from engine.model.weights import ModelWeights
from engine.rope_config import RopeConfig


def order_rotary_rows(weights: ModelWeights, rope: RopeConfig, num_heads: int, num_kv_heads: int) -> None:
    """Reorder the rows of q and k, their biases and their norms, in place."""
    if not rope.is_interleaved and rope.rotary_dim in (0, rope.head_dim):
        return
    order = rotary_order(rope).to(weights.embed.device)
    num_rows = (num_heads + num_kv_heads) * rope.head_dim
    for layer in weights.layers:
        for rows in (
            layer.qkv[:num_rows],
            layer.qkv_bias[:num_rows] if layer.qkv_bias is not None else None,
            layer.q_norm,
            layer.k_norm,
        ):
            if rows is not None:
                heads = rows.view(-1, rope.head_dim, *rows.shape[1:])
                heads.copy_(heads[:, order])


def rotary_order(rope: RopeConfig) -> torch.Tensor:
    """int64 [head_dim]: where each element of a head stands in the checkpoint."""
    rotated = torch.arange(rope.rotary_dim)
    pairs = rotated.view(-1, 2).T if rope.is_interleaved else rotated.view(2, -1)
    rest = torch.arange(rope.rotary_dim, rope.head_dim).view(2, -1)
    return torch.cat((pairs, rest), dim=1).flatten()
