from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kv.block_file import HEADER_BYTES, BlockFolder, UnusableFileError
from engine.kv.tiers import BlockKey

PRINT = b"f" * 32
PAYLOAD = bytes(range(256)) * 8


def key_of(folder: BlockFolder, number: int) -> BlockKey:
    return BlockKey(folder.model, number.to_bytes(32, "big"), bytes(8))


def read(folder: BlockFolder, key: BlockKey, size: int = len(PAYLOAD)) -> bytes:
    target = bytearray(size)
    folder.read_into(key, memoryview(target))
    return bytes(target)


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    return BlockFolder(tmp_path / "cache", PRINT)


def test_what_was_written_is_read_back(folder: BlockFolder) -> None:
    key = key_of(folder, 1)
    stored = folder.write(key, memoryview(PAYLOAD))
    assert read(folder, key) == PAYLOAD
    assert stored.num_bytes == folder.path(key).stat().st_size == HEADER_BYTES + len(PAYLOAD)
    assert folder.scan() == [stored]


def test_only_the_owner_may_read_what_was_said(folder: BlockFolder) -> None:
    key = key_of(folder, 1)
    folder.write(key, memoryview(PAYLOAD))
    assert folder.path(key).stat().st_mode & 0o077 == 0
    assert folder.path(key).parent.stat().st_mode & 0o077 == 0


def damage(name: str) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    def empty(path: Path) -> None:
        path.write_bytes(b"")

    def grow(path: Path) -> None:
        path.write_bytes(path.read_bytes() + b"x")

    def foreign(path: Path) -> None:
        path.write_bytes(os.urandom(path.stat().st_size))

    def newer(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[8] += 1
        path.write_bytes(data)

    def vanish(path: Path) -> None:
        path.unlink()

    def folder_instead(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def pipe(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def loop(path: Path) -> None:
        path.unlink()
        path.symlink_to(path)

    return {f.__name__: f for f in (cut, empty, grow, foreign, newer, vanish, folder_instead, pipe, loop)}[name]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cut", "bytes long"),
        ("empty", "0 bytes long"),
        ("grow", "bytes long"),
        ("foreign", "not a block"),
        ("newer", "version 2"),
        ("vanish", "gone"),
        ("folder_instead", "bytes long|cannot be read"),
        ("pipe", "0 bytes long"),
        ("loop", "cannot be read"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(folder: BlockFolder, name: str, reason: str) -> None:
    key = key_of(folder, 1)
    folder.write(key, memoryview(PAYLOAD))
    damage(name)(folder.path(key))
    with pytest.raises(UnusableFileError, match=reason) as caught:
        read(folder, key)
    assert caught.value.is_gone == (name == "vanish")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(folder: BlockFolder) -> None:
    key = key_of(folder, 1)
    folder.write(key, memoryview(PAYLOAD))
    folder.path(key).chmod(0)
    with pytest.raises(UnusableFileError, match="cannot be read"):
        read(folder, key)


@given(position=st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_anywhere_is_found_out(folder: BlockFolder, position: int, bit: int) -> None:
    key = key_of(folder, 1)
    folder.write(key, memoryview(PAYLOAD))
    data = bytearray(folder.path(key).read_bytes())
    data[position] ^= 1 << bit
    folder.path(key).write_bytes(data)
    with pytest.raises(UnusableFileError):
        read(folder, key)


def test_a_block_of_another_model_or_under_another_name_is_refused(tmp_path: Path) -> None:
    ours, theirs = BlockFolder(tmp_path, PRINT), BlockFolder(tmp_path, b"f" * 8 + b"g" * 24)  # one folder: 8 bytes are equal
    key = key_of(ours, 1)
    theirs.write(key, memoryview(PAYLOAD))
    with pytest.raises(UnusableFileError, match="another model"):
        read(ours, key)
    ours.write(key, memoryview(PAYLOAD))
    ours.path(key).rename(ours.path(key_of(ours, 2)))
    with pytest.raises(UnusableFileError, match="another block"):
        read(ours, key_of(ours, 2))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def full(fd: int, buffers: list[bytes | memoryview]) -> None:
        os.write(fd, bytes(buffers[0]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = BlockFolder(tmp_path, PRINT, write=full)
    with pytest.raises(OSError, match="No space left"):
        folder.write(key_of(folder, 1), memoryview(PAYLOAD))
    assert folder.scan() == []
    assert [*tmp_path.glob("*.tmp")] == []


def test_a_real_limit_on_file_size_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The kernel itself cuts the write short, as a full disk does: first a part is written, then an error."""
    script = f"""
import resource, pathlib
from engine.kv.block_file import BlockFolder
from engine.kv.tiers import BlockKey
folder = BlockFolder(pathlib.Path({str(tmp_path)!r}), {PRINT!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    folder.write(BlockKey(folder.model, bytes(32), bytes(8)), memoryview(bytes(300_000)))
except OSError as error:
    print(error.strerror, len(folder.scan()), len(list(folder.root.glob("*.tmp"))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large 0 0\n"


def test_a_folder_emptied_under_our_eyes_is_made_again(folder: BlockFolder) -> None:
    folder.path(key_of(folder, 1)).parent.rmdir()
    folder.write(key_of(folder, 1), memoryview(PAYLOAD))
    assert read(folder, key_of(folder, 1)) == PAYLOAD


def test_files_are_found_in_the_order_of_their_use(folder: BlockFolder) -> None:
    for number in (1, 2):
        folder.write(key_of(folder, number), memoryview(PAYLOAD))
        os.utime(folder.path(key_of(folder, number)), (number, number))
    folder.mark_used([key_of(folder, 1), key_of(folder, 99)])  # one of them is gone
    assert [block.key for block in folder.scan()] == [key_of(folder, 2), key_of(folder, 1)]


def test_foreign_files_in_the_folder_are_left_alone(folder: BlockFolder) -> None:
    (folder.root / "notes.txt").write_text("mine")
    (folder.root / "writer-x.lock").write_text("not one of ours")
    (folder.path(key_of(folder, 1)).parent / "README").write_text("mine")
    again = BlockFolder(folder.root, PRINT)
    assert again.scan() == []
    assert (folder.root / "notes.txt").exists()
    assert (folder.root / "writer-x.lock").exists()


def test_a_living_servers_half_written_file_survives_another_start(tmp_path: Path) -> None:
    half_way, go_on = threading.Event(), threading.Event()

    def slow(fd: int, buffers: list[bytes | memoryview]) -> None:
        for buffer in buffers:
            os.write(fd, buffer)
            half_way.set()
            assert go_on.wait(10)

    first = BlockFolder(tmp_path, PRINT, write=slow)
    key = key_of(first, 1)
    writing = threading.Thread(target=first.write, args=(key, memoryview(PAYLOAD)))
    writing.start()
    assert half_way.wait(10)
    second = BlockFolder(tmp_path, PRINT)
    assert second.scan() == [], "half a file is not a file"
    assert len([*tmp_path.glob("*.tmp")]) == 1
    go_on.set()
    writing.join()
    assert read(second, key) == PAYLOAD


KILLED = """
import os, pathlib, sys, time
from engine.kv.block_file import BlockFolder
from engine.kv.tiers import BlockKey

def slow(fd, buffers):
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, view.nbytes, 1 << 16):
            os.write(fd, view[start : start + (1 << 16)])
            time.sleep(0.0005)

folder = BlockFolder(pathlib.Path(sys.argv[1]), b"f" * 32, write=slow)
print("ready", flush=True)
for number in range(10_000):
    folder.write(BlockKey(folder.model, number.to_bytes(32, "big"), bytes(8)), memoryview(bytes([number % 256]) * (1 << 20)))
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_while_writing_leaves_a_folder_that_the_next_start_reads(tmp_path: Path, seed: int) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        while not [*tmp_path.glob("*/*.kv")]:
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0.01, 0.05))
        while not [*tmp_path.glob("*.tmp")]:
            time.sleep(0.0001)
        writer.send_signal(signal.SIGKILL)
    assert [*tmp_path.glob("*.lock")], "it had no time to tidy up"
    folder = BlockFolder(tmp_path, PRINT)
    assert [*tmp_path.glob("*.tmp")] == []
    assert len([*tmp_path.glob("*.lock")]) == 1, "only our own"
    found = folder.scan()
    assert found
    for block in found:
        number = int.from_bytes(block.key.digest, "big")
        assert read(folder, block.key, 1 << 20) == bytes([number % 256]) * (1 << 20)
    folder.close()
    folder.close()
    assert [*tmp_path.glob("*.lock")] == []


def test_servers_that_start_and_stop_on_one_folder_at_once_do_not_fail(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def live(number: int) -> None:
        try:
            for turn in range(15):
                folder = BlockFolder(tmp_path, PRINT)
                key = key_of(folder, turn)
                folder.write(key, memoryview(PAYLOAD))
                try:
                    same = read(folder, key) == PAYLOAD
                except UnusableFileError as error:
                    same = error.is_gone  # the other one deleted it
                assert same
                folder.scan()
                folder.delete(key_of(folder, turn if number else turn + 1))
                folder.close()
        except BaseException as error:
            errors.append(error)

    servers = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    assert errors == []
    assert [*tmp_path.glob("*.tmp"), *tmp_path.glob("*.lock")] == []
