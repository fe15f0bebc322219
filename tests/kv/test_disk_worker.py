from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv.block_file import BlockFolder, write_all
from engine.kv.disk_worker import PAUSE_SECONDS, RESCAN_SECONDS, DeleteDone, DiskWorker, Done, ReadDone, ScanDone, WriteDone
from engine.kv.tiers import BlockKey

BLOCK = 4096
PRINT = b"f" * 32


class Disk:
    """A folder that can be told to be full, or to hold still; and a clock."""

    def __init__(self, root: Path) -> None:
        self.is_full = False
        self.go_on = threading.Event()
        self.go_on.set()
        self.now = 0.0
        self.num_tries = 0
        self.folder = BlockFolder(root, PRINT, write=self._write)
        self.rows = [bytearray(BLOCK) for _ in range(4)]
        self.worker = DiskWorker(self.folder, [memoryview(row) for row in self.rows], clock=lambda: self.now)

    def _write(self, fd: int, buffers: list[bytes | memoryview]) -> None:
        self.num_tries += 1
        assert self.go_on.wait(10)
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(fd, buffers)

    def key(self, number: int) -> BlockKey:
        return BlockKey(self.folder.model, number.to_bytes(32, "big"), bytes(8))

    def wait_for(self, count: int) -> list[Done]:
        done: list[Done] = []
        deadline = time.monotonic() + 10
        while len(done) < count and time.monotonic() < deadline:
            self.worker.wait(1.0)
            done.extend(self.worker.poll())
        return done


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.go_on.set()
    disk.worker.close()
    disk.folder.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_block_goes_out_and_comes_back(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.rows[0][:] = os.urandom(BLOCK)
    disk.worker.write(disk.key(1), 0)
    (written,) = disk.wait_for(1)
    assert isinstance(written, WriteDone)
    assert written.stored is not None
    disk.worker.read(disk.key(1), 3)
    assert disk.wait_for(1) == [ReadDone(disk.key(1), 3, ok=True)]
    assert disk.rows[3] == disk.rows[0]
    assert lines(caplog) == []


def test_reads_go_before_writes_that_wait(disk: Disk) -> None:
    disk.worker.write(disk.key(1), 0)
    disk.wait_for(1)
    disk.go_on.clear()
    for number in (2, 3):
        disk.worker.write(disk.key(number), 0)
    while disk.num_tries < 2:  # the first of the two holds the thread
        time.sleep(0.001)
    disk.worker.read(disk.key(1), 1)
    disk.go_on.set()
    assert [type(done) for done in disk.wait_for(3)] == [WriteDone, ReadDone, WriteDone]


def test_of_a_chain_that_was_read_the_beginning_was_used_last(disk: Disk) -> None:
    for number in (3, 2, 1):
        disk.worker.write(disk.key(number), 0)
    disk.wait_for(3)
    disk.go_on.clear()
    disk.worker.write(disk.key(4), 0)  # holds the thread until the whole chain is asked for
    while disk.num_tries < 4:
        time.sleep(0.001)
    for number in (1, 2, 3):
        os.utime(disk.folder.path(disk.key(number)), (number, number))
        disk.worker.read(disk.key(number), 1)
    disk.go_on.set()
    disk.worker.write(disk.key(5), 0)
    disk.wait_for(5)  # marking comes before the last
    assert [block.key for block in disk.folder.scan()] == [disk.key(number) for number in (4, 3, 2, 1, 5)]


def test_a_damaged_file_is_a_miss_and_one_line_and_is_removed(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.worker.write(disk.key(1), 0)
    disk.wait_for(1)
    path = disk.folder.path(disk.key(1))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    disk.worker.read(disk.key(1), 1)
    assert disk.wait_for(1) == [ReadDone(disk.key(1), 1, ok=False)]
    assert len(lines(caplog)) == 1
    assert "checksum" in lines(caplog)[0]
    assert not path.exists()


def test_a_vanished_file_is_a_miss_and_one_line(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.worker.read(disk.key(7), 1)
    assert disk.wait_for(1) == [ReadDone(disk.key(7), 1, ok=False)]
    assert len(lines(caplog)) == 1


def test_a_folder_where_a_file_should_be_costs_that_block_alone(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.folder.path(disk.key(1)).mkdir(parents=True)
    for number in (1, 2):
        disk.worker.write(disk.key(number), 0)
    stored = {done.key: done.stored is not None for done in disk.wait_for(2) if isinstance(done, WriteDone)}
    assert stored == {disk.key(1): False, disk.key(2): True}
    assert len(lines(caplog)) == 1
    assert disk.folder.path(disk.key(1)).name in lines(caplog)[0]


def test_a_full_disk_stops_storing_with_one_line_and_is_tried_again_later(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.worker.write(disk.key(1), 0)
    disk.wait_for(1)
    disk.is_full = True
    for number in range(2, 8):
        disk.worker.write(disk.key(number), 0)
    assert disk.wait_for(6) == [WriteDone(disk.key(number), 0, None) for number in range(2, 8)]
    assert disk.num_tries == 2, "one try, then none"
    assert len(lines(caplog)) == 1
    assert "No space left" in lines(caplog)[0]
    disk.worker.read(disk.key(1), 1)
    assert disk.wait_for(1) == [ReadDone(disk.key(1), 1, ok=True)], "reading goes on"
    disk.now += PAUSE_SECONDS + 1
    disk.worker.write(disk.key(8), 0)
    disk.wait_for(1)
    assert len(lines(caplog)) == 1, "still full: nothing new to say"
    disk.now += PAUSE_SECONDS + 1
    disk.is_full = False
    disk.worker.write(disk.key(9), 0)
    (written, _) = disk.wait_for(2)  # the folder is looked through again, too
    assert isinstance(written, WriteDone)
    assert written.stored is not None
    assert "again" in lines(caplog)[-1]


def test_deleting_what_is_gone_is_no_error(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.worker.delete(disk.key(1))
    assert disk.wait_for(1) == [DeleteDone(disk.key(1))]
    assert lines(caplog) == []


def test_what_cannot_be_deleted_is_said(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.folder.path(disk.key(1)).mkdir()  # not to be unlinked, by nobody
    disk.worker.delete(disk.key(1))
    assert disk.wait_for(1) == [DeleteDone(disk.key(1), ok=False)]
    assert "cannot delete" in lines(caplog)[0]


def test_a_look_that_was_asked_for_comes_after_the_deletions(disk: Disk, tmp_path: Path) -> None:
    other = BlockFolder(tmp_path, PRINT)
    stored = [other.write(disk.key(number), memoryview(bytes(BLOCK))) for number in (5, 6)]
    disk.worker.delete(disk.key(6))
    disk.worker.rescan()
    assert disk.wait_for(2) == [DeleteDone(disk.key(6)), ScanDone((stored[0],), was_asked=True)]


def test_files_of_another_server_are_found_in_time(disk: Disk, tmp_path: Path) -> None:
    other = BlockFolder(tmp_path, PRINT)
    other.write(disk.key(5), memoryview(bytes(BLOCK)))
    disk.now += RESCAN_SECONDS + 1
    disk.worker.write(disk.key(1), 0)
    (_, scanned) = disk.wait_for(2)
    assert isinstance(scanned, ScanDone)
    assert {block.key for block in scanned.found or ()} == {disk.key(1), disk.key(5)}


def test_close_drops_what_has_not_begun(disk: Disk) -> None:
    disk.go_on.clear()
    for number in range(3):
        disk.worker.write(disk.key(number), 0)
    while disk.num_tries < 1:
        time.sleep(0.001)
    threading.Timer(0.05, disk.go_on.set).start()
    disk.worker.close()
    assert [block.key for block in disk.folder.scan()] == [disk.key(0)]
    disk.worker.close()


def test_a_bug_in_the_thread_reaches_the_engine(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.worker.read(disk.key(1), 99)  # no such slot
    disk.folder.write(disk.key(1), memoryview(bytes(BLOCK)))
    disk.worker.wait(5.0)
    with pytest.raises(RuntimeError, match="thread failed"):
        disk.worker.poll()
    assert caplog.records[0].levelno == logging.ERROR
