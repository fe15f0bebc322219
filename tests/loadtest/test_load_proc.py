"""Memory and CPU time, against processes that use a known amount of both."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from loadtest.ceilings import _round
from loadtest.proc import CpuLoad, CpuSample, load_between, memory_use, process_tree, take_sample, tree_cpu_seconds

HOLD_64_MIB = "b = bytearray(b'x') * (64 << 20); del b"
SPIN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


@contextmanager
def child(code: str) -> Iterator[int]:
    """A process that has run ``code`` and still lives."""
    command = [sys.executable, "-c", f"{code}\nprint('done', flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        yield process.pid
        process.stdin.write(b"\n")


def test_the_tree_holds_children_and_forgets_the_dead() -> None:
    with child("import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)") as pid:
        tree = process_tree(pid)
        assert tree[0] == pid
        assert len(tree) == 2
        assert set(tree) < set(process_tree(os.getpid()))
    assert process_tree(pid) == ()


def test_the_peak_remembers_what_pss_has_forgotten() -> None:
    with child("") as plain, child(HOLD_64_MIB) as used:
        small, large = memory_use(plain), memory_use(used)
    assert large.peak_rss - small.peak_rss > 60 << 20
    assert small.pss is not None
    assert large.pss is not None
    assert large.pss - small.pss < 30 << 20
    assert 0 < small.pss <= small.peak_rss


def test_cpu_time_goes_to_whom_it_belongs() -> None:
    with child(SPIN) as pid:
        assert 0.25 < tree_cpu_seconds(pid) < 1.0
        before = take_sample(pid)
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        load = load_between(before, take_sample(pid))
    assert load.server < 0.1
    assert load.client > 0.2
    assert load.foreign >= 0.0


def test_what_neither_server_nor_client_used_is_foreign() -> None:
    before, after = CpuSample(10.0, 100.0, 20.0, 5.0), CpuSample(14.0, 107.0, 24.0, 6.0)
    assert load_between(before, after) == CpuLoad(server=1.0, client=0.25, foreign=0.5)
    rounded = CpuSample(14.0, 104.0, 24.0, 6.0)
    assert load_between(before, rounded).foreign == 0.0, "ticks are coarse; never less than nothing"


def test_other_processes_are_foreign() -> None:
    with child("") as server:
        before = take_sample(server)
        subprocess.run([sys.executable, "-c", SPIN], check=True)
        assert load_between(before, take_sample(server)).foreign > 0.3


def test_a_round_lasts_from_the_first_start_to_the_last_end() -> None:
    assert 0.1 <= _round(lambda index: time.sleep(0.1 * index), num_threads=2) < 0.3
