"""The interface of an attention backend, and the choice of one at start."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.metadata import AttentionWork
from engine.kv.storage import KVStorage


class AttentionBackend(Protocol):
    """Writes and reads the cache. Chosen once at start, an object handed to the model."""

    name: str

    def plan(self, work: AttentionWork) -> None:
        """Prepare a step: host work that all layers share. Holds until the next plan()."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store this step's K and V, then attend.

        q [rows, num_heads, head_dim], k and v [rows, num_kv_heads, head_dim], keys and queries rotated; views are welcome.
        Returns [rows, num_heads, head_dim], contiguous, in q's dtype. Query head h reads KV head h // (num_heads / num_kv_heads).
        """


def choose_backend(name: str, storage: KVStorage, num_heads: int, dtype: torch.dtype) -> AttentionBackend:
    """ "auto" takes the CPU kernels on a CPU and the reference elsewhere. The model computes in ``dtype``, whatever the cache's."""
    from engine.attention.cpu import CPUAttention
    from engine.attention.reference import ReferenceAttention
    from engine.attention.sealed_cpu import SealedCPUAttention
    from engine.attention.sealed_reference import SealedReferenceAttention

    on_cpu = storage.bytes.device.type == "cpu"
    if name == "cpu" or (name == "auto" and on_cpu):
        return (
            SealedCPUAttention(storage, num_heads) if storage.format.is_quantized else CPUAttention(storage, num_heads, dtype)
        )
    return SealedReferenceAttention(storage) if storage.format.is_quantized else ReferenceAttention(storage, dtype)
