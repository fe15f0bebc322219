"""From a CacheConfig to tiers that run, and their end: host memory, the folder on the disk, its thread, the flush at a stop."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.config import CacheConfig
from engine.errors import ConfigError, InsufficientMemoryError
from engine.kv.block import PrefixNode
from engine.kv.block_file import HEADER_BYTES, BlockFolder
from engine.kv.digest import Digester
from engine.kv.disk_worker import DiskWorker, NoDisk
from engine.kv.flush import Flush, FlushResult
from engine.kv.format import KVFormat
from engine.kv.offload import HostBuffer
from engine.kv.storage import KVStorage
from engine.kv.tier_cache import TierCache
from engine.kv.tiers import DiskTier, HostTier

logger = logging.getLogger("octavo.cache")

_MAX_STAGING_BYTES = 1024**3


@dataclass(slots=True)
class DiskCache:
    """What has to be ended at a stop."""

    folder: BlockFolder
    worker: DiskWorker
    flush: Flush


@dataclass(slots=True)
class Tiers:
    """The index for the manager, the bytes for the runner, and the disk's end. ``notes`` are lines for the operator."""

    cache: TierCache
    buffer: HostBuffer
    disk: DiskCache | None
    notes: tuple[str, ...]

    @property
    def host_bytes(self) -> int:
        return self.buffer.bytes.nbytes

    @property
    def disk_bytes(self) -> int:
        """What the files may take."""
        return self.cache.disk.max_bytes

    def close(self, nodes: Iterable[PrefixNode], seconds: float, clock: Callable[[], float] = time.monotonic) -> FlushResult:
        """Write what is worth it to the disk, for that long at most, and let go of the folder. ``nodes``: the device's full blocks."""
        if self.disk is None:
            return FlushResult(0, 0)
        deadline = clock() + seconds
        self.disk.worker.close()
        self.cache.poll()
        self._delete_dropped()
        result = self.disk.flush.run(nodes, lambda: clock() > deadline)
        self.disk.folder.close()
        if result.num_left:
            logger.warning(
                "disk cache: %d blocks stored at the stop, %d not: no time or no room", result.num_written, result.num_left
            )
        return result

    def _delete_dropped(self) -> None:
        """Finish what the thread had no time for: what was dropped is not to be found by the next start."""
        assert self.disk is not None
        for key in self.cache.deleting:
            try:
                self.disk.folder.delete(key)
            except OSError as error:
                logger.warning("disk cache: cannot delete %s: %s", self.disk.folder.path(key).name, error.strerror or error)


def open_tiers(
    config: CacheConfig, storage: KVStorage, model_fingerprint: Callable[[], bytes], max_model_len: int, host_available: int
) -> Tiers:
    """Build the tiers. ``host_available`` bytes of memory are left beside weights and device blocks.

    Raises:
        InsufficientMemoryError: the host cache does not fit, or holds no block.
        ConfigError: the folder cannot be used, or the disk cache holds no block.
    """
    fmt = storage.format
    num_slots, notes = _num_slots(config, fmt, max_model_len, host_available)
    buffer = HostBuffer(storage, num_slots)
    if config.disk_path is None:
        cache = TierCache(Digester(bytes(32)), HostTier(num_slots), DiskTier(0), NoDisk())  # digests never leave the process
        return Tiers(cache, buffer, None, notes)
    if config.disk_bytes < HEADER_BYTES + fmt.block_bytes:
        raise ConfigError(f"a disk cache of {config.disk_bytes:,} bytes cannot hold one block of {fmt.block_bytes:,} bytes")
    digester = Digester(hashlib.sha256(model_fingerprint() + repr(fmt).encode()).digest())
    folder, tier = _open_folder(Path(config.disk_path), digester.fingerprint, config.disk_bytes)
    rows = buffer.rows()
    worker = DiskWorker(folder, rows)
    cache = TierCache(digester, HostTier(num_slots), tier, worker)
    flush = Flush(cache, digester, folder, rows, buffer.read_block)
    return Tiers(cache, buffer, DiskCache(folder, worker, flush), notes)


def _num_slots(config: CacheConfig, fmt: KVFormat, max_model_len: int, available: int) -> tuple[int, tuple[str, ...]]:
    """How many blocks of host memory. A disk alone gets enough to pass the longest request through, at most 1 GiB."""
    if config.host_bytes > available:
        raise InsufficientMemoryError(
            f"a host cache of {config.host_bytes:,} bytes does not fit: {available:,} bytes are available; lower --host-cache"
        )
    if config.host_bytes:
        if config.host_bytes < fmt.block_bytes:
            raise InsufficientMemoryError(
                f"a host cache of {config.host_bytes:,} bytes cannot hold one block of {fmt.block_bytes:,} bytes; raise --host-cache"
            )
        num_slots = config.host_bytes // fmt.block_bytes
        return num_slots, _passage_notes(config, fmt, num_slots, max_model_len)
    if config.disk_path is None:
        return 0, ()
    longest = -(-max_model_len // fmt.block_size) * fmt.block_bytes
    staging = max(fmt.block_bytes, min(longest, _MAX_STAGING_BYTES))
    note = f"blocks pass through {staging / 2**20:,.0f} MiB of host memory on their way to and from the disk (--host-cache sets it)"
    return staging // fmt.block_bytes, (note,)


def _passage_notes(config: CacheConfig, fmt: KVFormat, num_slots: int, max_model_len: int) -> tuple[str, ...]:
    """A request takes from the disk what passes through host memory at once, and computes the rest."""
    num_longest = -(-max_model_len // fmt.block_size)
    if config.disk_path is None or num_slots >= num_longest:
        return ()
    tokens, enough = num_slots * fmt.block_size, num_longest * fmt.block_bytes
    return (
        f"a request gets at most {tokens:,} tokens from the disk, which is what --host-cache holds; {enough / 2**20:,.0f} MiB pass them all",
    )


def _open_folder(path: Path, fingerprint: bytes, max_bytes: int) -> tuple[BlockFolder, DiskTier]:
    """The folder and what is in it. Files beyond the bound, the oldest ones, are deleted now."""
    tier = DiskTier(max_bytes)
    try:
        folder = BlockFolder(path, fingerprint)
        for block in folder.scan():
            tier.add(block)
        for key in tier.overflow():
            folder.delete(key)
    except OSError as error:
        raise ConfigError(f"cannot keep a disk cache in {path}: {error.strerror or error}") from error
    return folder, tier
