"""``octavo serve`` with a disk cache, as real processes: stopped, killed, restarted, two at a time."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.real_server import RealServer, serving, starting, until
from tests.tiny_folder import make_folder

PROMPT = list(range(10, 75))  # four full blocks of 16 and a token
FLAGS = ("--kv-cache-memory", "200KB", "--max-model-len", "120")  # 13 blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_folder(path, max_position_embeddings=256)
    return path


def ask(server: RealServer, prompt: list[int] = PROMPT) -> tuple[str, int]:
    """The answer's text and the number of cached tokens."""
    answer = server.post(prompt=prompt, max_tokens=4, temperature=0, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_server_that_was_stopped_finds_its_cache_again(folder: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--disk-cache", str(tmp_path))
    with serving(folder, *flags) as server:
        text, cached = ask(server)
        assert cached == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    with serving(folder, *flags) as server:
        assert ask(server) == (text, 64)
        assert any("--host-cache" in line for line in server.lines), "the operator is told what the disk needs"


def test_what_was_evicted_is_written_while_nobody_asks(folder: Path, tmp_path: Path) -> None:
    flags = ("--kv-cache-memory", "49152", "--max-model-len", "120", "--disk-cache", str(tmp_path), "--host-cache", "24576")
    with serving(folder, *flags) as server:  # 8 blocks, 4 of host memory: 2 of them are being written at a time
        ask(server)
        assert (
            server.post(prompt=[200, *range(10, 115)], max_tokens=1).status_code == 200
        )  # one step, which evicts 3 full blocks
        until(lambda: len([*tmp_path.glob("*/*.kv")]) >= 3)
        usage = psutil.Process(server.engine.pid).cpu_times().user
        time.sleep(0.5)
        assert psutil.Process(server.engine.pid).cpu_times().user - usage < 0.2, "then it sleeps"


def test_a_server_that_was_killed_at_work_starts_again_on_the_same_folder(folder: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--disk-cache", str(tmp_path), "--host-cache", "100KB")
    with serving(folder, *flags) as server:
        text, _ = ask(server)
        engine = server.engine

        def load() -> None:
            for number in range(200):
                try:
                    ask(server, [number, *PROMPT])
                except Exception:
                    return  # killed, as planned

        client = threading.Thread(target=load)
        client.start()
        until(lambda: len([*tmp_path.glob("*/*.kv")]) >= 10)
        engine.kill()
        server.process.kill()
        client.join()
    with starting(folder, *flags) as server:
        server.wait_ready()
        assert ask(server)[0] == text
        assert [*tmp_path.glob("*.tmp")] == []
        assert len([*tmp_path.glob("*.lock")]) == 1
        assert "WARNING" not in server.stderr, "there is nothing to complain of"


def test_two_servers_on_one_folder(folder: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--disk-cache", str(tmp_path), "--host-cache", "100KB")
    with serving(folder, *flags) as one, serving(folder, *flags) as two:
        texts = {ask(server)[0] for server in (one, two, one, two)}
        for number in range(8):
            texts_of_both = {ask(server, [100 + number, *PROMPT])[0] for server in (one, two)}
            assert len(texts_of_both) == 1
        texts |= {ask(server)[0] for server in (one, two)}
        assert len(texts) == 1
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(20) == 0
        assert ask(two)[0] in texts
