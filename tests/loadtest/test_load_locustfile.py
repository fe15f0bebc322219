"""The locust user in a process of its own, since gevent patches what it is loaded into."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

from fake_openai import FakeServer, running

ROOT = Path(__file__).parents[2]


async def locust(fake: FakeServer, *, num_users: int) -> dict[str, dict[str, Any]]:
    """The rows of one second of load, by request type."""
    async with running(fake) as url:
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "-t", "1s", "--host", url]
        command += ["-u", str(num_users), "-r", "10", "--json", "--output-tokens", "5", "--exit-code-on-error", "0"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return {row["method"]: row for row in json.loads(out)}


async def test_timings_are_the_servers() -> None:
    rows = await locust(FakeServer(ttft=0.1, itl=0.02), num_users=2)
    post, ttft, itl = rows["POST"], rows["TTFT"], rows["ITL"]
    assert post["num_failures"] == 0
    assert ttft["num_requests"] == post["num_requests"] >= 2
    assert itl["num_requests"] == 4 * ttft["num_requests"]
    assert 100 <= ttft["min_response_time"] < 170
    assert 15 < itl["total_response_time"] / itl["num_requests"] < 60
    assert 180 <= post["min_response_time"] < 350
    assert post["total_content_length"] == 5 * post["num_requests"], "output tokens by the server's count"


async def test_what_is_no_whole_answer_is_a_failure() -> None:
    faults = ["cut", "cut_before_first", "empty", "error_event", "short", "http_500", "no_usage", "no_done", "no_answer"]
    fake = FakeServer(next_faults=cycle(faults))
    rows = await locust(fake, num_users=1)
    assert set(rows) == {"POST"}, "a failed request gives no timings"
    assert rows["POST"]["num_failures"] == rows["POST"]["num_requests"] >= len(faults)
    assert len(fake.bodies) - rows["POST"]["num_requests"] <= 1, "no request is missing but one that the end interrupted"
