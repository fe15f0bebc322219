"""What the machine itself can do, so that a speed can be stated as a share of it: reading memory, multiplying matrices.

Runs in a process of its own (``python -m loadtest.ceilings`` prints it as JSON), with numpy's BLAS held to one thread: the
threads are Python's, one for each usable core, each on an array of its own. Reading is a dot product of an array with
itself, float32, far larger than a cache: one load and one multiply-add for each element. The best of several rounds counts,
since a ceiling is wanted. Knows nothing of servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.proc import machine_busy_seconds

ARRAY_BYTES = 128 << 20
MATRIX_SIZE = 1024
MAX_THREADS = 16
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and float32 operations a second of all threads together; ``foreign_cores`` were busy elsewhere meanwhile."""

    num_threads: int
    read_bytes_per_s: float
    matmul_flop_per_s: float
    foreign_cores: float


def measure_ceilings() -> Ceilings:
    """Takes about two seconds. To be called while the server is idle. Raises CalledProcessError, with what numpy said."""
    command = [sys.executable, "-m", "loadtest.ceilings"]
    done = subprocess.run(command, env=os.environ | _ONE_THREAD, capture_output=True, text=True, check=True)
    return Ceilings(**json.loads(done.stdout))


def _measure(num_threads: int) -> Ceilings:
    import numpy as np

    arrays = [np.ones(ARRAY_BYTES // 4, np.float32) for _ in range(num_threads)]
    matrices = [np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32) for _ in range(num_threads)]
    wall, busy, own = time.perf_counter(), machine_busy_seconds(), time.process_time()
    read_s = _best_round(lambda i: np.dot(arrays[i], arrays[i]), num_threads, rounds=30)
    matmul_s = _best_round(lambda i: matrices[i] @ matrices[i], num_threads, rounds=15)
    foreign = machine_busy_seconds() - busy - (time.process_time() - own)
    return Ceilings(
        num_threads=num_threads,
        read_bytes_per_s=num_threads * ARRAY_BYTES / read_s,
        matmul_flop_per_s=num_threads * 2 * MATRIX_SIZE**3 / matmul_s,
        foreign_cores=max(0.0, foreign) / (time.perf_counter() - wall),
    )


def _best_round(work: Callable[[int], Any], num_threads: int, rounds: int) -> float:
    """Seconds from the common start to the end of the last thread, in the fastest round."""
    return min(_round(work, num_threads) for _ in range(rounds))


def _round(work: Callable[[int], Any], num_threads: int) -> float:
    start, ends = threading.Barrier(num_threads), [0.0] * num_threads
    starts = [0.0] * num_threads

    def run(index: int) -> None:
        start.wait()
        starts[index] = time.perf_counter()
        work(index)
        ends[index] = time.perf_counter()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(ends) - min(starts)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(min(len(os.sched_getaffinity(0)), MAX_THREADS)))))
