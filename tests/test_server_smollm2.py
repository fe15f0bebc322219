"""What needs a model of real size: memory beyond weights and cache, and steps long enough to count those after a hang-up."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.real_server import URL, RealServer, serving, until

MIB = 2**20
WEIGHT_BYTES = 134_515_008 * 4
CACHE_BYTES = 32 * MIB
BLOCK_BYTES = 737_280  # 16 tokens of 2 x 30 layers x 3 KV heads x 64 x float32


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[RealServer]:
    with serving(smollm2_path, "--kv-cache-memory", str(CACHE_BYTES), "--max-num-batched-tokens", "256") as server:
        yield server


def num_steps(server: RealServer) -> float:
    return server.metrics()["octavo_step_duration_seconds_count"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_blocks_within_two_steps(server: RealServer, stream: bool) -> None:
    """Steps run only while there is work, so the steps in all, less those before the hang-up, are those that came after it."""
    until(server.is_idle)
    before = num_steps(server)
    body = json.dumps(
        {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "temperature": 0, "stream": stream}
    ).encode()
    head = f"POST {URL} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(server.address) as client:
        client.sendall(head.encode() + body)
        if stream:
            received = b""
            while received.count(b"data: ") < 8:
                received += client.recv(4096)
            at_hang_up = before + received.count(b"data: ")  # one event for each step, the prefill included
        else:
            until(lambda: num_steps(server) >= before + 8)
            at_hang_up = num_steps(server)
    until(server.is_idle, 5)
    assert at_hang_up <= num_steps(server) <= at_hang_up + 2
    assert server.post(prompt="a", max_tokens=1).status_code == 200


def test_memory_is_weights_and_cache_and_at_most_600_mib(server: RealServer) -> None:
    """Proportional set size (shared pages split among their users) of the server and all its children. Every block of the
    cache has been written by then, so that no page of it is merely promised."""
    for index in range(2):
        answer = server.post(prompt=[100 + index] * 450, max_tokens=4, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 4
    assert server.metrics()["octavo_evicted_blocks_total"] > 0, "the cache has been full"
    root = psutil.Process(server.process.pid)
    pss = sum(pss_bytes(process.pid) for process in (root, *root.children(recursive=True)))
    num_blocks = CACHE_BYTES // BLOCK_BYTES
    beyond = pss - WEIGHT_BYTES - num_blocks * BLOCK_BYTES
    assert 0 < beyond <= 600 * MIB, f"{beyond / MIB:.0f} MiB"


def pss_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) * 1024
