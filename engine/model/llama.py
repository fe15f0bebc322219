"""The whole model on a page: a decoder of the Llama family, or of its relatives by other parts. Batch and cache are arguments."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.backend import AttentionBackend
from engine.model.ops import HeadNorm, HeadShape, Ops
from engine.model.parts import arrange_norms, make_mlp
from engine.model.weights import LayerWeights, ModelWeights
from engine.model_config import ModelConfig


class Model(Protocol):
    """What the runner needs of a model: LlamaModel, or a faster twin of it."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor: ...


class LlamaModel:
    """Llama, SmolLM2, Mistral, Qwen2, Qwen3, GPT-2 and what our trainer makes: by their weights (a bias, QK-norm or table of
    positions is there or is None), and by the norms and the MLP that ``parts`` makes of them."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops, attention: AttentionBackend) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self._attention = attention
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._norms = arrange_norms(config, weights, ops)
        self._mlps = [make_mlp(config, layer, ops) for layer in weights.layers]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """One step over the batch that the attention backend has planned.

        token_ids, positions int64 [rows]; cos, sin float32 [rows, rotary_dim / 2]; sample_rows int64 [samples].
        Returns logits [samples, vocab_size] in the compute dtype; K and V of all rows are in the cache afterwards.
        """
        weights, norms = self.weights, self._norms
        residual = self.embed(token_ids, positions)
        x = norms.first(residual)
        for index, layer in enumerate(weights.layers):
            x = self._attend(index, layer, x, cos, sin)
            if index + 1 == len(weights.layers):  # only rows that sample are of use from here on
                x, residual = x[sample_rows], residual[sample_rows]
            x, residual = norms.join(x, residual, norms.after_attention[index])
            x = self._mlps[index](x)
            x, residual = norms.join(x, residual, norms.after_mlp[index])
        return self.ops.linear(x, weights.lm_head, None)

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], a tensor of its own."""
        x, table = self.weights.embed[token_ids], self.weights.positions
        return x if table is None else x.add_(table[positions])

    def _attend(self, index: int, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        norm = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norm = HeadNorm(layer.q_norm, layer.k_norm, self.config.norm_eps)
        qkv = self.ops.linear(x, layer.qkv, layer.qkv_bias)
        self.ops.rotate(qkv, self._heads, cos, sin, norm)
        out = self._attention.run(index, *self._heads.split(qkv))
        return self.ops.linear(out.view(len(x), -1), layer.o, layer.o_bias)
