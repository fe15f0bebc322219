"""The fast twin of LlamaModel on a CPU over a quantized cache: as ``cpu_decoder`` for the float formats."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.sealed_cpu import SealedCPUAttention, SealedDecodePlan
from engine.model.cpu_decoder import layer_arrays
from engine.model.cpu_sealed_decode_kernels import sealed_decode_layer
from engine.model.llama import LlamaModel

Array = NDArray[np.float32]


class SealedCPUDecoder:
    """Same ``forward`` as LlamaModel, float32 only. Gives the same bits as the plain model over CPUOps."""

    def __init__(self, model: LlamaModel, attention: SealedCPUAttention) -> None:
        self._model = model
        self._attention = attention
        self._layers = tuple(layer_arrays(layer) for layer in model.weights.layers)
        norms = [layer.input_norm for layer in model.weights.layers[1:]] + [model.weights.final_norm]
        self._next_norms = tuple(norm.numpy() for norm in norms)

    def forward(self, token_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor) -> torch.Tensor:
        """See ``LlamaModel.forward``."""
        decode = self._attention.decode
        if decode is None or not self._attention.is_decode_only:
            return self._model.forward(token_ids, cos, sin, sample_rows)
        ops, weights = self._model.ops, self._model.weights
        residual = weights.embed[token_ids]
        x = ops.rms_norm(residual, weights.layers[0].input_norm, self._model.config.rms_norm_eps)
        self._run_layers(decode, x.numpy(), residual.numpy(), cos.numpy(), sin.numpy())
        return ops.linear(x[sample_rows], weights.lm_head, None)

    def _run_layers(self, decode: SealedDecodePlan, x: Array, residual: Array, cos: Array, sin: Array) -> None:
        config, attention = self._model.config, self._attention
        eps, plan = np.float32(config.rms_norm_eps), decode.arguments
        q_size = config.num_heads * config.head_dim
        widths = len(self._layers[0].qkv), q_size, 2 * config.intermediate_size, config.intermediate_size
        room = tuple(np.empty((len(x), width), np.float32) for width in widths)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            cache = tuple(attention.cache_arguments(index))
            sealed_decode_layer(x, residual, tuple(layer), next_norm, eps, cos, sin, cache, plan, room)
