"""``octavo serve`` as a process of its own, for tests: start it, talk to it, look at its processes and metrics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.tiny_folder import ONE_THREAD

ROOT = Path(__file__).parent.parent
COMMAND = (sys.executable, "-c", "from server.cli import main; main()", "serve")
URL = "/v1/completions"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


class RealServer:
    """``lines`` is what it has said on stdout when it was ready."""

    def __init__(self, process: subprocess.Popen[str], stderr: Path) -> None:
        self.process = process
        self.lines: list[str] = []
        self._stderr = stderr
        self.http = httpx.Client()

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        while not self.lines or not self.lines[-1].startswith("curl"):
            line = self.process.stdout.readline()
            assert line, self.stderr
            self.lines.append(line.rstrip("\n"))
        match = re.search(r"http://[^/]+", self.lines[-1])
        assert match is not None
        self.http = httpx.Client(base_url=match.group(), timeout=30)

    @property
    def base_url(self) -> str:
        return str(self.http.base_url)

    @property
    def address(self) -> tuple[str, int]:
        assert self.http.base_url.port is not None
        return self.http.base_url.host, self.http.base_url.port

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def post(self, **fields: Any) -> httpx.Response:
        return self.http.post(URL, json=fields)

    def health(self) -> int:
        return self.http.get("/health").status_code

    def metrics(self, key: str | None = None) -> dict[str, float]:
        """Every sample, as ``name`` or ``name{label value}``; of histograms, the counts and sums."""
        samples: dict[str, float] = {}
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        for family in text_string_to_metric_families(self.http.get("/metrics", headers=headers).text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    labels = ",".join(sample.labels.values())
                    samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return samples

    def is_idle(self) -> bool:
        metrics = self.metrics()
        names = ("octavo_kv_cache_blocks{referenced}", "octavo_requests_running", "octavo_requests_waiting")
        return all(metrics[name] == 0 for name in names)


@contextmanager
def starting(model: Path | str, *flags: str, env: dict[str, str] | None = None) -> Iterator[RealServer]:
    """The process, not yet ready. It is killed at the end if it still runs, and its engine must go by itself."""
    with tempfile.TemporaryDirectory() as folder:
        stderr = Path(folder, "stderr")
        with stderr.open("w") as log:
            process = subprocess.Popen(
                (*COMMAND, str(model), "--port", "0", *flags),
                cwd=ROOT,
                env=os.environ | ONE_THREAD | (env or {}),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        server = RealServer(process, stderr)
        try:
            yield server
        finally:
            server.http.close()
            assert process.stdout is not None
            process.stdout.close()
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.wait()
            _, orphans = psutil.wait_procs(children, timeout=5)
            for orphan in orphans:
                orphan.kill()
            assert not orphans, "the engine outlived a server that was killed"


@contextmanager
def serving(model: Path | str, *flags: str, env: dict[str, str] | None = None) -> Iterator[RealServer]:
    with starting(model, *flags, env=env) as server:
        server.wait_ready()
        yield server
