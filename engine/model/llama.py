"""The whole model on a page: a pre-norm decoder of the Llama family. Batch and cache are arguments."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.backend import AttentionBackend
from engine.model.ops import HeadNorm, HeadShape, Ops
from engine.model.weights import LayerWeights, ModelWeights
from engine.model_config import ModelConfig


class Model(Protocol):
    """What the runner needs of a model: LlamaModel, or a faster twin of it."""

    def forward(
        self, token_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor: ...


class LlamaModel:
    """Llama, SmolLM2, Mistral, Qwen2 and Qwen3 by their weights: a bias or QK-norm is there or is None."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops, attention: AttentionBackend) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self._attention = attention
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)

    def forward(self, token_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor) -> torch.Tensor:
        """One step over the batch that the attention backend has planned.

        token_ids int64 [rows]; cos, sin float32 [rows, rotary_dim / 2]; sample_rows int64 [samples].
        Returns logits [samples, vocab_size] in the compute dtype; K and V of all rows are in the cache afterwards.
        """
        weights, eps, ops = self.weights, self.config.rms_norm_eps, self.ops
        residual = weights.embed[token_ids]
        x = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        for index, layer in enumerate(weights.layers):
            x = self._attend(index, layer, x, cos, sin)
            is_last = index + 1 == len(weights.layers)
            if is_last:  # only rows that sample are of use from here on
                x, residual = x[sample_rows], residual[sample_rows]
            x = ops.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = self._mlp(layer, x)
            next_norm = weights.final_norm if is_last else weights.layers[index + 1].input_norm
            x = ops.add_rms_norm(x, residual, next_norm, eps)
        return ops.linear(x, weights.lm_head, None)

    def _attend(self, index: int, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        norm = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norm = HeadNorm(layer.q_norm, layer.k_norm, self.config.rms_norm_eps)
        qkv = self.ops.linear(x, layer.qkv, layer.qkv_bias)
        self.ops.rotate(qkv, self._heads, cos, sin, norm)
        out = self._attention.run(index, *self._heads.split(qkv))
        return self.ops.linear(out.view(len(x), -1), layer.o, layer.o_bias)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.ops.linear(x, layer.gate_up, layer.gate_up_bias)
        return self.ops.linear(self.ops.silu_mul(gate_up), layer.down, layer.down_bias)
