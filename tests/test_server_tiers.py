"""``octavo serve`` with a disk cache, as real processes: stopped, killed at work, started again, two at a time."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.real_server import RealServer, serving, starting, until
from tests.tiny_folder import make_folder

PROMPT = list(range(10, 75))  # four full blocks of 16 and a token
SMALL = ("--max-model-len", "120", "--kv-cache-memory", "49152")  # 8 blocks: one request


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


def files(disk: Path) -> int:
    return len([*disk.glob("*/*.kv")])


def test_blocks_are_written_while_nobody_asks_and_at_a_stop_and_found_after_it(folder: Path, tmp_path: Path) -> None:
    flags = (*SMALL, "--disk-cache", str(tmp_path), "--host-cache", "24576")  # 4 blocks; 2 of them are written at a time
    with serving(folder, *flags) as server:
        text, cached = ask(server)
        assert cached == 0
        assert (
            server.post(prompt=[200, *range(10, 115)], max_tokens=1).status_code == 200
        )  # one step, which evicts 3 full blocks
        until(lambda: files(tmp_path) >= 3)
        usage = psutil.Process(server.engine.pid).cpu_times().user
        time.sleep(0.5)
        assert psutil.Process(server.engine.pid).cpu_times().user - usage < 0.2, "then it sleeps"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    assert files(tmp_path) >= 4 + 6
    with serving(folder, *flags) as server:
        assert ask(server) == (text, 64)


def test_two_servers_on_one_folder_of_which_one_is_killed_at_work(folder: Path, tmp_path: Path) -> None:
    flags = (*SMALL, "--disk-cache", str(tmp_path))
    with starting(folder, *flags) as one, starting(folder, *flags) as two:
        for server in (one, two):
            server.wait_ready()
        texts = {ask(server)[0] for server in (one, two)}

        def load() -> None:
            for number in range(250):
                try:
                    ask(one, [number, *PROMPT])
                except httpx.HTTPError:
                    return  # killed, as planned

        client = threading.Thread(target=load)
        client.start()
        until(lambda: files(tmp_path) >= 20)
        engine = one.engine
        engine.kill()
        one.process.kill()
        client.join()
        assert files(tmp_path) < 250 * 4, "it was killed at work"
        texts.add(ask(two)[0])
    with serving(folder, *flags) as three:
        text, cached = ask(three)
        assert {text} == texts
        assert cached == 64
        assert [*tmp_path.glob("*.tmp")] == []
        assert len([*tmp_path.glob("*.lock")]) == 1, "what the killed ones left is gone"
        assert "WARNING" not in three.stderr
        assert any("--host-cache" in line for line in three.lines), "the operator is told what the disk needs"
