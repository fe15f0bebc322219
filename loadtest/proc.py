"""Memory and CPU time of a server's processes and of the machine, from Linux's ``/proc``.

Knows no server by name: only a process id and what descends from it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a process tree.

    ``peak_rss``: the sum of every living process's VmHWM. An upper bound: pages that processes share count once for each,
    and the peaks need not have coincided. ``pss``: the sum of Pss now, where shared pages are divided among their users;
    None if a process may not be looked into.
    """

    peak_rss: int
    pss: int | None


@dataclass(frozen=True, slots=True)
class CpuLoad:
    """Cores kept busy, on average over a stretch of time. ``foreign``: by anything but server and client, stolen time included."""

    server: float
    client: float
    foreign: float


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Seconds so far: by the clock, and of CPU time of the whole machine, the server's tree and this process."""

    wall: float
    machine: float
    server: float
    client: float


def take_sample(server_pid: int) -> CpuSample:
    return CpuSample(time.perf_counter(), machine_busy_seconds(), tree_cpu_seconds(server_pid), time.process_time())


def load_between(start: CpuSample, end: CpuSample) -> CpuLoad:
    """The server's processes must have lived through it to be counted as the server's."""
    wall, server, client = end.wall - start.wall, end.server - start.server, end.client - start.client
    foreign = max(0.0, end.machine - start.machine - server - client)
    return CpuLoad(server / wall, client / wall, foreign / wall)


def process_tree(pid: int) -> tuple[int, ...]:
    """``pid`` and its living descendants. Empty if it is gone."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid] if _stat(pid) else []
    for member in tree:  # grows while it is walked
        tree.extend(children.get(member, ()))
    return tuple(tree)


def tree_cpu_seconds(pid: int) -> float:
    """User and system time that the living processes of the tree have used."""
    stats = [fields for member in process_tree(pid) if (fields := _stat(member))]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS


def machine_busy_seconds() -> float:
    """Time since boot that all cores together were not idle, stolen time included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def memory_use(pid: int) -> MemoryUse:
    tree = process_tree(pid)
    peaks = [_kib(f"/proc/{member}/status", "VmHWM") or 0 for member in tree]
    shares = [_kib(f"/proc/{member}/smaps_rollup", "Pss") for member in tree]
    pss = None if None in shares else sum(share or 0 for share in shares) * 1024
    return MemoryUse(sum(peaks) * 1024, pss)


def resident_bytes(pid: int) -> int | None:
    """What the one process holds in memory now; None if it is gone."""
    kib = _kib(f"/proc/{pid}/status", "VmRSS")
    return None if kib is None else kib * 1024


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, state first; empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(")") + 2 :].split()


def _kib(path: str, key: str) -> int | None:
    """A ``Key:  123 kB`` line; None if the file cannot be read or has no such line (a zombie, a process that just ended)."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{key}:")]
    return int(values[0]) if values else None
