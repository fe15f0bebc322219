"""The weights of a model in the arrangement that the layers compute with: q, k, v as one matrix, gate and up as one.

Loading streams: every tensor is decoded chunk by chunk straight into its place in the fused matrix, so that the peak is the
loaded weights and a few megabytes. Knows nothing of attention, batches or caches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from engine.errors import DamagedModelError, InsufficientMemoryError, ModelNotFoundError, UnsupportedModelError
from engine.model.checkpoint import Checkpoint, StoredTensor, copy_rows, same_values
from engine.model.gguf_checkpoint import open_gguf
from engine.model.safetensors_checkpoint import open_folder
from engine.model_config import ModelConfig

EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
POSITIONS, FINAL_NORM = "model.embed_positions.weight", "model.norm"
LAYER_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}
ROTARY_TABLE = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # follows from the config; old checkpoints store it


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. H query heads, KV kv heads, D head_dim, I intermediate size; what the model lacks is None.

    A pre-norm layer has ``input_norm``, a post-norm layer ``post_mlp_norm``. ``up`` is of an MLP without a gate.
    """

    input_norm: torch.Tensor | None  # [hidden]
    input_norm_bias: torch.Tensor | None  # [hidden]
    qkv: torch.Tensor  # [(H + 2 KV) * D, hidden]: the rows of q, then k, then v
    qkv_bias: torch.Tensor | None  # [(H + 2 KV) * D]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: torch.Tensor  # [hidden, H * D]
    o_bias: torch.Tensor | None  # [hidden]
    post_attention_norm: torch.Tensor  # [hidden]
    post_attention_norm_bias: torch.Tensor | None  # [hidden]
    gate_up: torch.Tensor | None  # [2 * I, hidden]: the rows of gate, then up
    gate_up_bias: torch.Tensor | None  # [2 * I]
    up: torch.Tensor | None  # [I, hidden]
    up_bias: torch.Tensor | None  # [I]
    down: torch.Tensor  # [hidden, I]
    down_bias: torch.Tensor | None  # [hidden]
    post_mlp_norm: torch.Tensor | None  # [hidden]
    post_mlp_norm_bias: torch.Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights, of one dtype on one device, each contiguous and (on a CPU) 64-byte aligned.

    ``lm_head`` is the very same tensor as ``embed`` where the model ties them. A post-norm model has no ``final_norm``.
    """

    embed: torch.Tensor  # [V, hidden]
    positions: torch.Tensor | None = None  # [max_position_embeddings, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor | None  # [hidden]
    final_norm_bias: torch.Tensor | None = None  # [hidden]
    lm_head: torch.Tensor  # [V, hidden]

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Each tensor once."""
        yield self.embed
        if self.lm_head is not self.embed:
            yield self.lm_head
        yield from _present((self.final_norm, self.final_norm_bias, self.positions))
        for layer in self.layers:
            yield from _present(getattr(layer, name) for name in LayerWeights.__slots__)


def _present(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors if tensor is not None)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder in Hugging Face layout or a .gguf file, and check that its tensors are those that its config implies.

    Reads headers only, but for a head that is stored although it is tied to the embedding: the two are compared. Raises ModelNotFoundError, DamagedModelError or UnsupportedModelError.
    """
    if path.is_dir():
        checkpoint = open_folder(path)
    elif path.suffix == ".gguf":
        checkpoint = open_gguf(path)
    elif path.exists():
        raise ModelNotFoundError(f"{path} is neither a folder nor a .gguf file")
    else:
        raise ModelNotFoundError(f"no such model folder or file: {path}")
    return replace(checkpoint, tensors=_checked_tensors(checkpoint))


def num_parameters(config: ModelConfig) -> int:
    """What ModelWeights.num_parameters will be, without loading anything."""
    return sum(prod(shape) for _, shape in _expected_tensors(config))


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None],
) -> ModelWeights:
    """Read all tensors. ``progress`` is told (bytes done, bytes in all) of the checkpoint's tensors, the last time equal.

    Raises DamagedModelError where a file turns out shorter than its header said, InsufficientMemoryError where the device
    refuses the memory.
    """
    loader = _Loader(checkpoint, dtype, torch.device(device), progress)
    try:
        return loader.model()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch has no class of its own for it on a CPU
            raise
        need = num_parameters(checkpoint.config) * dtype.itemsize
        raise InsufficientMemoryError(f"the weights need {need / 2**20:.0f} MiB, which {device} does not have free") from error


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Callable[[int, int], None]
    ) -> None:
        self._config = checkpoint.config
        self._tensors = checkpoint.tensors
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._done = 0
        self._total = sum(self._tensors[name].nbytes for name, _ in _expected_tensors(checkpoint.config))

    def model(self) -> ModelWeights:
        embed = self._fused(EMBED)
        return ModelWeights(
            embed=embed,
            positions=self._if_present(POSITIONS),
            layers=tuple(self._layer(i) for i in range(self._config.num_layers)),
            final_norm=self._if_present(f"{FINAL_NORM}.weight"),
            final_norm_bias=self._if_present(f"{FINAL_NORM}.bias"),
            lm_head=embed if self._config.tie_word_embeddings else self._fused(LM_HEAD),
        )

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        qkv = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        gate_up = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up")]
        gated, plain = (gate_up, []) if self._config.mlp == "swiglu" else ([], gate_up[1:])
        o, down = f"{prefix}self_attn.o_proj", f"{prefix}mlp.down_proj"
        norms = {name: f"{prefix}{stored}" for name, stored in LAYER_NORMS.items()}
        return LayerWeights(
            input_norm=self._weight(norms["input_norm"]),
            input_norm_bias=self._bias(norms["input_norm"]),
            qkv=self._fused(*_weights(qkv)),
            qkv_bias=self._bias(*qkv),
            q_norm=self._weight(f"{prefix}self_attn.q_norm"),
            k_norm=self._weight(f"{prefix}self_attn.k_norm"),
            o=self._fused(*_weights([o])),
            o_bias=self._bias(o),
            post_attention_norm=self._fused(*_weights([norms["post_attention_norm"]])),
            post_attention_norm_bias=self._bias(norms["post_attention_norm"]),
            gate_up=self._weight(*gated),
            gate_up_bias=self._bias(*gated),
            up=self._weight(*plain),
            up_bias=self._bias(*plain),
            down=self._fused(*_weights([down])),
            down_bias=self._bias(down),
            post_mlp_norm=self._weight(norms["post_mlp_norm"]),
            post_mlp_norm_bias=self._bias(norms["post_mlp_norm"]),
        )

    def _weight(self, *modules: str) -> torch.Tensor | None:
        return self._if_present(*_weights(modules))

    def _bias(self, *modules: str) -> torch.Tensor | None:
        return self._if_present(*(f"{module}.bias" for module in modules))

    def _if_present(self, *names: str) -> torch.Tensor | None:
        """None where the model has no such tensors: which it has was checked against the config when it was opened."""
        return self._fused(*names) if names and names[0] in self._tensors else None

    def _fused(self, *names: str) -> torch.Tensor:
        """The named tensors below one another, in one allocation."""
        parts = [self._tensors[name] for name in names]
        num_rows = sum(part.shape[0] for part in parts)
        fused = torch.empty((num_rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        assert fused.device.type != "cpu" or fused.data_ptr() % 64 == 0
        start = 0
        for part in parts:
            copy_rows(part, fused[start : start + part.shape[0]], self._report)
            start += part.shape[0]
        return fused

    def _report(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(self._done, self._total)


def _weights(modules: Iterable[str]) -> list[str]:
    return [f"{module}.weight" for module in modules]


def _checked_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Exactly the tensors that the config implies, or an error that names the first that is missing, misshapen or unknown."""
    config, found = checkpoint.config, dict(checkpoint.tensors)
    if config.tie_word_embeddings:
        _drop_tied_head(checkpoint.path, found)
    checked = {}
    for name, shape in _expected_tensors(config):
        if name not in found:
            raise DamagedModelError(f"{checkpoint.path}: tensor {name} is missing")
        tensor = found.pop(name)
        if tensor.shape != shape:
            raise DamagedModelError(
                f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, but the config implies {list(shape)}"
            )
        checked[name] = tensor
    for name, tensor in found.items():
        if not re.fullmatch(ROTARY_TABLE, name):
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {tensor.name} has no place in a {config.architecture} of this config"
            )
    return checked


def _drop_tied_head(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """A head that is tied may yet be stored: beside an equal embedding, or in place of it."""
    head = tensors.pop(LM_HEAD, None)
    if head is None:
        return
    if not same_values(tensors.setdefault(EMBED, head), head):
        raise UnsupportedModelError(f"{path}: tie_word_embeddings is true, but {head.name} differs from the embedding")


def _expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a model of this config has, each once: a tied lm_head is the embedding."""
    yield EMBED, (config.vocab_size, config.hidden_size)
    if config.has_learned_positions:
        yield POSITIONS, (config.max_position_embeddings, config.hidden_size)
    if not config.is_post_norm:
        yield from _norm_shapes(config, FINAL_NORM).items()
    if not config.tie_word_embeddings:
        yield LM_HEAD, (config.vocab_size, config.hidden_size)
    layer = _layer_shapes(config)
    for i in range(config.num_layers):
        for name, shape in layer.items():
            yield f"model.layers.{i}.{name}", shape


def _norm_shapes(config: ModelConfig, module: str) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{module}.{kind}": (config.hidden_size,) for kind in kinds}


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, q_rows, kv_rows = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = ("post_attention_norm", "post_mlp_norm") if config.is_post_norm else ("input_norm", "post_attention_norm")
    shapes = {name: shape for norm in norms for name, shape in _norm_shapes(config, LAYER_NORMS[norm]).items()}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    up = ("mlp.gate_proj", "mlp.up_proj") if config.mlp == "swiglu" else ("mlp.up_proj",)
    matrices = [
        ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_rows, config.o_bias),
        *((name, config.intermediate_size, hidden, config.mlp_bias) for name in up),
        ("mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias),
    ]
    for name, num_rows, num_columns, bias in matrices:
        shapes[f"{name}.weight"] = (num_rows, num_columns)
        if bias:
            shapes[f"{name}.bias"] = (num_rows,)
    return shapes
