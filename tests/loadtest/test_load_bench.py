"""The command as it is used: it starts a server, measures it, stops it, and tells by its status whether that went well."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
from fake_openai import FakeServer, running

from loadtest import bench
from loadtest.ceilings import Ceilings
from loadtest.proc import process_tree
from loadtest.server import ServerError, is_healthy, serving

FAKE = shlex.join([sys.executable, str(Path(__file__).parent / "fake_openai.py")])


@pytest.fixture(autouse=True)
def _no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the machine takes seconds and is not what is tested here."""
    monkeypatch.setattr(bench, "measure_ceilings", lambda: Ceilings(2, 20e9, 1e11, 0.0))


@pytest.fixture
def fake_url() -> Iterator[str]:
    """A fake in a thread, for the synchronous command."""
    ready, stop, urls = Event(), Event(), []

    async def serve() -> None:
        async with running(FakeServer()) as url:
            urls.append(url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(5)
    yield urls[0]
    stop.set()
    thread.join()


def test_it_starts_measures_and_stops_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    arguments = ["--serve", f"{FAKE} --ttft 0.1", "--scenarios", "prefill2048,single", "--reps", "2", "--json", str(path)]
    assert bench.main([*arguments, "--label", "fake", "--seed", "5", "--salt", "6"]) == 0
    result = json.loads(path.read_text())
    assert result["source"] == {"vocab_size": 32_000, "seed": 5, "salt": 6}
    assert result["model"] == "fake"
    assert 0.05 < result["ready_in_s"] < 5
    assert result["memory"]["peak_rss"] > 10 << 20
    assert len(result["scenarios"]["single"]["repetitions"]) == 2
    single = result["scenarios"]["single"]["repetitions"][0]
    assert single["figures"]["output_tokens"] == 128
    assert set(single["load"]) == {"server", "client", "foreign"}
    assert 2048 / 0.3 < result["scenarios"]["prefill2048"]["summary"]["figures"]["prefill_tok_s"] <= 2048 / 0.1
    captured = capsys.readouterr()
    assert "| prefill 2,048: tok/s |" in captured.out
    assert "2/2" not in captured.out, "progress belongs to stderr"
    assert "4/4" in captured.err


def test_an_invalid_repetition_is_written_and_gives_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    arguments = ["--serve", f"{FAKE} --fault short", "--scenarios", "single", "--reps", "1", "--json", str(path)]
    assert bench.main(arguments) == 1
    (repetition,) = json.loads(path.read_text())["scenarios"]["single"]["repetitions"]
    assert repetition["figures"] is None
    assert "127 output tokens instead of 128" in repetition["problems"][0]
    assert "1 invalid repetitions do not count" in capsys.readouterr().out


def test_a_running_server_is_measured_by_url(fake_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--url", fake_url, "--scenarios", "single", "--reps", "1"]) == 0
    output = capsys.readouterr().out
    assert "1 stream: decode tok/s" in output
    assert "peak RSS" not in output, "not known without the process"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "/does/not/exist"], "cannot run '/does/not/exist'"),
        (["--serve", shlex.join([sys.executable, "-c", "import sys; sys.exit('no model')"])], "no model"),
        (["--serve", f"{FAKE} --fault http_500"], "http_status: HTTP 500"),
        (["--url", "http://127.0.0.1:9"], "/v1/models"),
        (["--url", "http://127.0.0.1:9", "--pid", "999999999"], "no process 999999999"),
    ],
)
def test_nothing_to_measure_is_one_error_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: ")
    assert message in error


def test_a_server_that_is_never_ready_is_given_up_and_stopped() -> None:
    sleeper = shlex.join([sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)"])
    with pytest.raises(ServerError, match=r"not ready in time[^$]*loading"), serving(sleeper, ready_timeout_s=0.5):
        pass


def test_the_server_is_gone_after_an_error_in_the_block() -> None:
    urls = []

    def fail() -> None:
        with serving(FAKE, ready_timeout_s=5) as server:
            urls.append(server.url)
            assert is_healthy(server.url)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not is_healthy(urls[0])


def test_ended_by_sigterm_it_takes_its_server_along() -> None:
    code = f"""
import time
from loadtest.server import serving
with serving({FAKE!r}, 30) as server:
    print(server.pid, flush=True)
    time.sleep(60)
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        server_pid = int(bench.stdout.readline())
        assert process_tree(server_pid)
        bench.terminate()
        assert bench.wait(30) == 128 + signal.SIGTERM
    assert not process_tree(server_pid)
