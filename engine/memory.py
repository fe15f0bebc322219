"""How much memory there is, and how many KV blocks go into it."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import CacheConfig
from engine.errors import ConfigError, InsufficientMemoryError

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on the device: free memory of a GPU; on a CPU the system's or the container's, the smaller."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_system_available_bytes(), _container_available_bytes())


def _system_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo names no MemAvailable; give --kv-cache-memory")


def _container_available_bytes() -> int:
    """What a cgroup v2 limit leaves; without a limit, more than any machine has."""
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not (limit.is_file() and used.is_file()) or (text := limit.read_text().strip()) == "max":
        return 2**63
    return max(0, int(text) - int(used.read_text()))


def plan_num_blocks(cache: CacheConfig, block_bytes: int, available: int, tail_bytes: int = 0) -> int:
    """How many blocks the cache gets. ``available`` bytes are left beside the weights; ``tail_bytes`` of the cache's are for tails.

    Raises:
        InsufficientMemoryError: not even one block, or more than there is.
    """
    wanted = cache.memory_bytes if cache.memory_bytes is not None else int(available * cache.fraction)
    if wanted > available:
        raise InsufficientMemoryError(
            f"the KV cache of {wanted:,} bytes does not fit: {available:,} bytes are available beside the weights; lower --kv-cache-memory"
        )
    if wanted < block_bytes + tail_bytes:
        tails = (
            f" beside {tail_bytes:,} bytes for the open blocks of all requests; lower --max-num-seqs or" if tail_bytes else ";"
        )
        raise InsufficientMemoryError(
            f"the KV cache of {wanted:,} bytes cannot hold one block of {block_bytes:,} bytes ({cache.block_size} tokens){tails}"
            " raise --kv-cache-memory or --kv-cache-fraction"
        )
    return (wanted - tail_bytes) // block_bytes
