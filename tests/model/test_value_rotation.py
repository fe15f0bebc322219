"""Rotating V inside the weights changes nothing that the model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention.backend import choose_backend
from engine.attention.metadata import AttentionWork, WorkItem
from engine.kv.format import KVFormat
from engine.kv.storage import KVStorage
from engine.model.llama import LlamaModel
from engine.model.ops import TorchOps
from engine.model.rope import RopeTable
from engine.model.value_rotation import hadamard, rotate_values
from engine.model.weights import load_weights, open_checkpoint
from engine.rope_classes import RopeClass
from tests.model.tiny_models import make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 6, 24, 64, 80, 128])
def test_the_matrix_is_orthogonal_and_flat(size: int) -> None:
    rotation = hadamard(size)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(size))
    block = size & -size
    torch.testing.assert_close(rotation[:block, :block].abs(), torch.full((block, block), block**-0.5))


@pytest.mark.parametrize("name", ["llama-biases", "llama-mha", "qwen3", "qwen2"])
def test_the_logits_stay(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rotated in (False, True):
        weights = load_weights(checkpoint, dtype=torch.float32, device=CPU, progress=lambda done, total: None)
        if rotated:
            rotate_values(weights, config.num_kv_heads, config.head_dim)
        shape = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        storage = KVStorage(KVFormat(dtype="float32", block_size=16, **shape), 1, CPU)
        attention = choose_backend("reference", storage, config.num_heads, torch.float32)
        attention.plan(AttentionWork((WorkItem(0, 9, 0, (0,), 0, 9),), tuple(range(9)), 16))
        rope = RopeTable((RopeClass("", config.rope, 9, 9),), CPU)
        model = LlamaModel(config, weights, TorchOps(), attention)
        logits = model.forward(torch.arange(3, 12), torch.arange(9), rope.cos[:9], rope.sin[:9], torch.arange(9))
        seen.append((logits, storage.v(1)[0, :, :9]))
    (plain, plain_v), (rotated_logits, rotated_v) = seen
    torch.testing.assert_close(rotated_logits, plain, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(plain_v @ hadamard(config.head_dim), rotated_v, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(plain_v, rotated_v, atol=1e-2)
