"""Rotates the values that attention reads, and rotates its output back, both inside the weights: nothing is left to do in a step.

Within each head, V is multiplied by an orthogonal matrix R, and the columns of the output projection by R as well: attention only
takes weighted sums of V, so (w V R) (O R)^T = w V O^T. A Hadamard matrix spreads an outlier channel over all of them, so that one
scale for a token's whole head serves 4-bit V as well as one for every 32 channels does without it.
"""

from __future__ import annotations

import torch

from engine.model.weights import ModelWeights


def hadamard(size: int) -> torch.Tensor:
    """Orthogonal float32 [size, size]: blocks of the largest Hadamard matrix whose size, a power of two, divides ``size``."""
    block = torch.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)), 0)
    return torch.kron(torch.eye(size // len(block)), block / len(block) ** 0.5)


def rotate_values(weights: ModelWeights, num_kv_heads: int, head_dim: int) -> None:
    """Rotate V and the output projection of every layer, in place. In 16 bits the weights are rounded once more."""
    rotation = hadamard(head_dim).to(weights.embed.device)
    for layer in weights.layers:
        v_rows = layer.qkv[-num_kv_heads * head_dim :].view(num_kv_heads, head_dim, -1)
        v_rows.copy_(torch.einsum("hdi,de->hei", v_rows.float(), rotation))
        if layer.qkv_bias is not None:
            v_bias = layer.qkv_bias[-num_kv_heads * head_dim :].view(num_kv_heads, head_dim)
            v_bias.copy_(v_bias.float() @ rotation)
        columns = layer.o.view(len(layer.o), -1, head_dim)
        columns.copy_(columns.float() @ rotation)
