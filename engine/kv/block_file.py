"""A folder of blocks, one file each: written whole or not at all, verified on reading, shared by servers without harm.

    DIR/<model>/<digest>-<above>.kv     header, then the block's bytes as they lie in the pool; -<branch> may follow on <above>
    DIR/writer-<id>.lock                 held by a living server for as long as it runs
    DIR/writer-<id>-<n>.tmp              a file in the making; a later start removes it once its writer's lock is free

Knows files and bytes. Does not know which blocks are wanted, threads or the engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from engine.kv.tiers import PREFIX_BYTES, BlockKey, StoredBlock

MAGIC = b"OCTAVOKV"
VERSION = 1
_FIELDS = struct.Struct("<8sI32s32sQ")  # magic, version, fingerprint, digest, payload length
_CHECKSUM_BYTES = 32
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})(?:-([0-9a-f]{16}))?\.kv")
_MODEL = re.compile(r"[0-9a-f]{16}")
_LOCK = re.compile(r"(writer-[0-9a-f]{32})\.lock")

WriteAll = Callable[[int, "list[bytes | memoryview]"], None]


class UnusableFileError(Exception):
    """A file that cannot stand for its block. The message says why; ``is_gone`` when there is no file at all."""

    def __init__(self, reason: str, *, is_gone: bool = False) -> None:
        super().__init__(reason)
        self.is_gone = is_gone


def file_header(fingerprint: bytes, digest: bytes, payload: memoryview) -> bytes:
    """The header of a block's file; its last 32 bytes are the SHA-256 of all that comes before them and of the payload."""
    fields = _FIELDS.pack(MAGIC, VERSION, fingerprint, digest, payload.nbytes)
    checksum = hashlib.sha256(fields)
    checksum.update(payload)
    return fields + checksum.digest()


def check_file(header: bytes, fingerprint: bytes, digest: bytes, payload: memoryview) -> None:
    """Raises UnusableFileError unless the header is that of this very block with this very payload."""
    magic, version, found_fingerprint, found_digest, length = _FIELDS.unpack(header[: _FIELDS.size])
    if magic != MAGIC:
        raise UnusableFileError("not a block of an Octavo cache")
    if version != VERSION:
        raise UnusableFileError(f"format version {version}, this server reads {VERSION}")
    if found_fingerprint != fingerprint:
        raise UnusableFileError("written for another model or block format")
    if found_digest != digest:
        raise UnusableFileError("holds another block than its name says")
    if length != payload.nbytes:
        raise UnusableFileError(f"says it holds {length} bytes, a block has {payload.nbytes}")
    if file_header(fingerprint, digest, payload) != header:
        raise UnusableFileError("its checksum is wrong")


def write_all(fd: int, buffers: list[bytes | memoryview]) -> None:
    """os.writev, again and again until everything is written."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while views:
        written = os.writev(fd, views)
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if views:
            views[0] = views[0][written:]


class BlockFolder:
    """The folder as one server sees it, for one model and block format (the ``fingerprint``).

    Raises:
        OSError: at construction, when the folder cannot be made, or written to.
    """

    def __init__(self, root: Path, fingerprint: bytes, *, write: WriteAll = write_all) -> None:
        self.root = root
        self._fingerprint = fingerprint
        self._write_all = write
        self._num_written = 0
        self._model = root / self.model.hex()
        self._model.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock: int | None
        self._writer, self._lock = _take_lock(root)
        _remove_stale(root)

    @property
    def model(self) -> bytes:
        """The part of a key that says whose blocks these are."""
        return self._fingerprint[:PREFIX_BYTES]

    def path(self, key: BlockKey) -> Path:
        name = "-".join(part.hex() for part in (key.digest, key.above, key.branch) if part)
        return self.root / key.model.hex() / f"{name}.kv"

    def write(self, key: BlockKey, payload: memoryview) -> StoredBlock:
        """Store a block of this model. The file appears whole, or the OSError says why not and nothing is left behind.

        Not flushed to the platter: after a power failure a damaged file is found out by its checksum.
        """
        self._num_written += 1
        temporary = self.root / f"{self._writer}-{self._num_written}.tmp"
        header = file_header(self._fingerprint, key.digest, payload)
        self._model.mkdir(mode=0o700, parents=True, exist_ok=True)  # someone may have emptied the folder
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._write_all(fd, [header, payload])
                _stamp(fd, time.time_ns())
            finally:
                os.close(fd)
            os.rename(temporary, self.path(key))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return StoredBlock(key, HEADER_BYTES + payload.nbytes)

    def read_into(self, key: BlockKey, target: memoryview) -> None:
        """Fill ``target`` with the block.

        Raises:
            UnusableFileError: it is gone, unreadable or not what it should be; what is in ``target`` then must not be used.
        """
        path = self.path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # not to wait for ever on what is no file
            try:
                header = _read_exactly(fd, target)
                check_file(header, self._fingerprint, key.digest, target)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise UnusableFileError("the file is gone", is_gone=True) from None
        except OSError as error:
            raise UnusableFileError(f"cannot be read: {error.strerror or error}") from error

    def mark_used(self, keys: Iterable[BlockKey]) -> None:
        """Note in the files' time stamps that they were used now, the last one last: the order that ``scan`` finds."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # deleted by another server, or another user's
                _stamp(self.path(key), time.time_ns())

    def delete(self, key: BlockKey) -> None:
        """Remove the file, if it is still there."""
        self.path(key).unlink(missing_ok=True)

    def scan(self) -> list[StoredBlock]:
        """Every model's block files, the least recently used first. Files that another server deletes meanwhile are left out."""
        found = [item for model in _entries(self.root) if _MODEL.fullmatch(model.name) for item in _model_blocks(model)]
        found.sort(key=lambda item: item[0])
        return [block for _, block in found]

    def close(self) -> None:
        """Give the lock back. Safe to call twice."""
        if self._lock is not None:
            (self.root / f"{self._writer}.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _stamp(file: int | Path, time_ns: int) -> None:
    """Set the time of use. The kernel's own stamps are milliseconds apart: too coarse to keep an order."""
    os.utime(file, ns=(time_ns, time_ns))


def _read_exactly(fd: int, target: memoryview) -> bytes:
    """Header and payload in one call; returns the header."""
    header, excess = bytearray(HEADER_BYTES), bytearray(1)
    expected = HEADER_BYTES + target.nbytes
    size = os.fstat(fd).st_size
    if size != expected:
        raise UnusableFileError(f"{size} bytes long, {expected} expected")
    num_read = os.readv(fd, [header, target, excess])
    if num_read != expected:  # it changed under our eyes: nobody writes to a file that has its name
        raise UnusableFileError(f"{num_read} bytes could be read, {expected} expected")
    return bytes(header)


def _entries(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """What is in the folder; nothing if it is no folder, or gone."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return


def _model_blocks(folder: os.DirEntry[str]) -> Iterator[tuple[int, StoredBlock]]:
    model = bytes.fromhex(folder.name)
    for entry in _entries(folder):
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            key = BlockKey(model, bytes.fromhex(match[1]), bytes.fromhex(match[2]), bytes.fromhex(match[3] or ""))
            yield status.st_mtime_ns, StoredBlock(key, status.st_size)


def _take_lock(root: Path) -> tuple[str, int]:
    """A name for this writer and the lock that says it lives. The kernel frees the lock when the process dies, however it dies."""
    while True:
        writer = f"writer-{uuid.uuid4().hex}"
        fd = os.open(root / f"{writer}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _try_lock(fd) and os.fstat(fd).st_nlink == 1:
            return writer, fd
        os.close(fd)  # a server that starts at the same moment took it for a dead one's: take another name


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _remove_stale(root: Path) -> None:
    """Remove what dead writers left: their half-written files, then their locks."""
    names = [entry.name for entry in _entries(root)]
    for name in names:
        match = _LOCK.fullmatch(name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another start cleans up too, or another user's it is
            _remove_writer(root, match[1], names)


def _remove_writer(root: Path, writer: str, names: list[str]) -> None:
    fd = os.open(root / f"{writer}.lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not _try_lock(fd):
            return
        for name in names:
            if name.startswith(f"{writer}-") and name.endswith(".tmp"):
                (root / name).unlink(missing_ok=True)
        (root / f"{writer}.lock").unlink(missing_ok=True)
    finally:
        os.close(fd)
