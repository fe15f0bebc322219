"""The bytes of the host tier, and their copies from and to the device's pool. Knows torch; does not know what the blocks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import InsufficientMemoryError
from engine.kv.moves import BlockLoad, BlockStore
from engine.kv.storage import KVStorage


class HostBuffer:
    """A uint8 tensor [num_slots, block_bytes] in host memory, page-locked beside a GPU. A block is one copy, whatever its format.

    Raises:
        InsufficientMemoryError: the memory cannot be had.
    """

    def __init__(self, storage: KVStorage, num_slots: int) -> None:
        self.storage = storage
        self._is_cuda = storage.bytes.is_cuda
        shape = (num_slots, storage.format.block_bytes)
        try:
            self.bytes = torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_cuda and num_slots > 0)
        except RuntimeError as error:
            raise InsufficientMemoryError(
                f"cannot reserve {shape[0] * shape[1]:,} bytes of host memory for the KV cache; lower --host-cache"
            ) from error

    def rows(self) -> list[memoryview]:
        """The bytes of each slot, writable, without a copy."""
        return [row.data for row in self.bytes.numpy()]

    def move(self, stores: Sequence[BlockStore], loads: Sequence[BlockLoad]) -> None:
        """Make the copies, stores first. They are complete when this returns: another thread may read the slots then."""
        for store in stores:
            self.bytes[store.host_slot].copy_(self.storage.bytes[store.block_id], non_blocking=True)
        for load in loads:
            self.storage.bytes[load.block_id].copy_(self.bytes[load.host_slot], non_blocking=True)
        if self._is_cuda and (stores or loads):
            torch.cuda.current_stream().synchronize()

    def read_block(self, block_id: int) -> memoryview:
        """A device block's bytes as they are now: on a CPU a view, else a copy."""
        return self.storage.bytes[block_id].cpu().numpy().data
