"""Copies of whole blocks between the device's pool and host memory, as a step's plan names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Device to host, all bytes of the block. Done before anything else in a step: the block may get new content in it."""

    block_id: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Host to device, all bytes of the block. Done after the step's stores and before anything is computed."""

    host_slot: int
    block_id: int
