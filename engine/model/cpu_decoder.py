"""The fast twin of LlamaModel on a CPU: a step that only decodes runs one compiled call per layer instead of some thirty.

That saves 5 to 7 ms of a 40 ms step of SmolLM2 on two cores. Steps with prefill go to the plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.llama import LlamaModel
from engine.model.weights import LayerWeights

Array = NDArray[np.float32]


class LayerArrays(NamedTuple):
    """A layer's weights as the kernel takes them. Absent ones are empty. ``norm`` comes after attention."""

    qkv: Array
    qkv_bias: Array
    q_norm: Array
    k_norm: Array
    o: Array
    o_bias: Array
    norm: Array
    gate_up: Array
    gate_up_bias: Array
    down: Array
    down_bias: Array


class CompiledAttention(Protocol):
    """What the decoder needs of a CPU attention backend: the arguments of a decode kernel, in the kernel's own order."""

    @property
    def is_decode_only(self) -> bool: ...

    def decode_arguments(self) -> tuple[Any, ...] | None:
        """The planned step's; None when nothing in it decodes."""

    def cache_arguments(self, layer: int) -> tuple[Any, ...]: ...


class CPUDecoder:
    """Same ``forward`` as LlamaModel, float32 only, for models with ``ModelConfig.has_llama_block``. Gives the same bits as the
    plain model over CPUOps.

    ``decode_layer`` is the kernel that goes with the attention: ``cpu_decode_kernels`` for float formats, ``cpu_sealed_decode_kernels``.
    """

    def __init__(self, model: LlamaModel, attention: CompiledAttention, decode_layer: Callable[..., None]) -> None:
        self._model = model
        self._attention = attention
        self._decode_layer = decode_layer
        self._layers = tuple(_layer_arrays(layer) for layer in model.weights.layers)
        norms = [layer.input_norm for layer in model.weights.layers] + [model.weights.final_norm]
        self._first_norm, *self._next_norms = (_present(norm) for norm in norms)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sample_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``LlamaModel.forward``."""
        plan = self._attention.decode_arguments()
        if plan is None or not self._attention.is_decode_only:
            return self._model.forward(token_ids, positions, cos, sin, sample_rows)
        ops, weights = self._model.ops, self._model.weights
        residual = weights.embed[token_ids]
        x = ops.rms_norm(residual, self._first_norm, self._model.config.norm_eps)
        self._run_layers(plan, x.numpy(), residual.numpy(), cos.numpy(), sin.numpy())
        return ops.linear(x[sample_rows], weights.lm_head, None)

    def _run_layers(self, plan: tuple[Any, ...], x: Array, residual: Array, cos: Array, sin: Array) -> None:
        config = self._model.config
        eps, q_size = np.float32(config.norm_eps), config.num_heads * config.head_dim
        widths = len(self._layers[0].qkv), q_size, 2 * config.intermediate_size, config.intermediate_size
        room = tuple(np.empty((len(x), width), np.float32) for width in widths)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            cache = self._attention.cache_arguments(index)
            self._decode_layer(x, residual, tuple(layer), next_norm.numpy(), eps, cos, sin, cache, plan, room)


def _layer_arrays(layer: LayerWeights) -> LayerArrays:
    return LayerArrays(
        qkv=layer.qkv.numpy(),
        qkv_bias=_or_empty(layer.qkv_bias),
        q_norm=_or_empty(layer.q_norm),
        k_norm=_or_empty(layer.k_norm),
        o=layer.o.numpy(),
        o_bias=_or_empty(layer.o_bias),
        norm=layer.post_attention_norm.numpy(),
        gate_up=_present(layer.gate_up).numpy(),
        gate_up_bias=_or_empty(layer.gate_up_bias),
        down=layer.down.numpy(),
        down_bias=_or_empty(layer.down_bias),
    )


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "not a Llama's block"
    return tensor


def _or_empty(tensor: torch.Tensor | None) -> Array:
    return np.empty(0, np.float32) if tensor is None else tensor.numpy()
