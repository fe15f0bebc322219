"""The real server, from the command line to the cache: death, hang-ups, drain, bad input, exact metrics. Over a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.real_server import URL, RealServer, serving, starting, until
from tests.tiny_folder import VOCAB_SIZE, make_folder

BLOCK_SIZE = 4
TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # K and V, 3 layers, 2 KV heads of 8, float32
FLAGS = ("--block-size", str(BLOCK_SIZE), "--kv-cache-memory", str(16_000 * TOKEN_BYTES), "--served-model-name", "tiny")
EIGHT_FIT = {"max_tokens": 1900}  # of them side by side, to their ends
LONG = {"max_tokens": 3000, "ignore_eos": True, "temperature": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_folder(path)
    return path


@pytest.fixture(scope="module")
def module_server(folder: Path) -> Iterator[RealServer]:
    with serving(folder, *FLAGS) as server:
        yield server


@pytest.fixture
def server(module_server: RealServer) -> Iterator[RealServer]:
    """The module's server, which must be idle and well after each test."""
    yield module_server
    until(module_server.is_idle)
    assert module_server.health() == 200
    assert "Traceback" not in module_server.stderr


def stream_events(server: RealServer, started: threading.Event, **fields: Any) -> list[str]:
    """The data of every event up to the end of the connection; ``started`` is set at the third."""
    events = []
    with (
        httpx.Client(base_url=server.base_url, timeout=60) as http,
        http.stream("POST", URL, json={"stream": True} | fields) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if len(events) == 3:
                started.set()
    return events


def test_what_it_says_when_it_is_ready(server: RealServer) -> None:
    summary, curl = server.lines
    assert "LlamaForCausalLM" in summary
    assert "4000 blocks of 4 tokens, 384 B per token (float32); context 8192 tokens" in summary
    assert server.base_url in curl


def test_bad_requests_are_refused_before_the_first_byte_and_the_next_one_works(server: RealServer) -> None:
    before = server.metrics()
    fields: list[dict[str, Any]] = [
        {"prompt": ""},
        {"prompt": []},
        {},
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [5, -1]},
        {"prompt": "a", "stop_token_ids": [VOCAB_SIZE]},
        {"prompt": "a" * 9000},
        {"prompt": [5] * 8192, "max_tokens": 1},
        {"prompt": "a", "max_tokens": 8192},
        {"prompt": ["fine", [1, 2]]},
        {"prompt": ["fine", ""]},
        {"prompt": "a", "max_tokens": "5"},
        {"prompt": "a", "temperature": -1},
        {"prompt": "a", "no_such_field": 1},
        {"prompt": "a", "logprobs": 3},
        {"prompt": "a", "seed": 2**63},
    ]
    bodies = [
        b"",
        b"{",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": [' + b"9" * 5000 + b"]}",
        b'{"prompt": "\xff"}',
        b"[" * 50_000,
    ]
    for body in [json.dumps(given | extra).encode() for given in fields for extra in ({}, {"stream": True})] + bodies:
        answer = server.http.post(URL, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, body[:80]
        assert answer.headers["content-type"] == "application/json"
        assert sorted(answer.json()["error"]) == ["code", "message", "param", "type"]
        assert len(answer.content) < 1500
    assert server.http.post(URL, content=b'{"prompt": "a"}').status_code == 415
    assert server.post(model="other", prompt="a").status_code == 404
    good = server.post(prompt="a", max_tokens=3, ignore_eos=True)
    assert good.json()["usage"]["completion_tokens"] == 3
    after = server.metrics()
    assert difference(before, after, "octavo_requests_total{length}") == 1
    assert all(difference(before, after, f"octavo_requests_total{{{reason}}}") == 0 for reason in ("stop", "abort", "error"))
    assert difference(before, after, "octavo_prompt_tokens_total") == 1, "nothing of a refused request reached the engine"


def difference(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]


def test_extreme_but_legal_requests_are_served(server: RealServer) -> None:
    for fields in (
        {"temperature": 5e-324},
        {"temperature": 2.0, "top_p": 1e-300, "min_p": 1e-300},
        {"top_k": 2**31 - 1, "top_p": 0.5},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"min_tokens": 4, "stop_token_ids": list(range(2, VOCAB_SIZE))},
        {"stop": ["x" * 500, "\U0001f389"]},
    ):
        answer = server.post(prompt=[VOCAB_SIZE - 1, 0, 1], max_tokens=5, **fields)
        assert answer.status_code == 200, (fields, answer.text)


def test_metrics_add_up_to_the_token(server: RealServer) -> None:
    before = server.metrics()
    usages = []
    for prompt in ("the capital of France", "the capital of France is", [5, 6, 7], [[1] * 9, [1] * 9]):
        usages.append(server.post(prompt=prompt, max_tokens=12, ignore_eos=True, seed=1).json()["usage"])
    whole = server.post(prompt=[5, 6, 7], max_tokens=12, ignore_eos=True, temperature=0).json()
    stop_text = whole["choices"][0]["text"]
    stopped = server.post(prompt=[5, 6, 7], max_tokens=12, ignore_eos=True, temperature=0, stop=stop_text[1:3])
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    by_token = server.post(prompt=[5, 6, 7], max_tokens=12, temperature=2, stop_token_ids=list(range(2, VOCAB_SIZE)))
    assert by_token.json()["choices"][0]["finish_reason"] == "stop"
    usages += [whole["usage"], stopped.json()["usage"], by_token.json()["usage"]]
    until(server.is_idle)
    after = server.metrics()
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert difference(before, after, "octavo_prompt_tokens_total") == prompt_tokens == 21 + 24 + 3 + 18 + 9
    assert difference(before, after, "octavo_prefix_cache_query_tokens_total") == prompt_tokens
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert difference(before, after, "octavo_prefix_cache_hit_tokens_total") == hits
    assert 20 <= hits <= prompt_tokens, "the second prompt begins with the five full blocks of the first"
    assert difference(before, after, "octavo_generation_tokens_total") == generated
    assert difference(before, after, "octavo_requests_total{length}") == 6
    assert difference(before, after, "octavo_requests_total{stop}") == 2
    assert (
        difference(before, after, "octavo_requests_total{abort}")
        == difference(before, after, "octavo_requests_total{error}")
        == 0
    )
    assert difference(before, after, "octavo_time_to_first_token_seconds_count") == 8
    assert difference(before, after, "octavo_inter_token_latency_seconds_count") == generated - 8
    assert difference(before, after, "octavo_request_duration_seconds_count") == 8
    assert difference(before, after, "octavo_request_queue_seconds_count") == 8
    assert (
        difference(before, after, "octavo_preemptions_total")
        == difference(before, after, "octavo_recomputed_tokens_total{preemption}")
        == 0
    )
    assert difference(before, after, "octavo_step_tokens_count") == difference(
        before, after, "octavo_step_duration_seconds_count"
    )
    # Each step's tokens: prompts less hits, and every token but a request's last, which is never computed; a request that a
    # stop string ended may have run on until the engine heard of it.
    computed = difference(before, after, "octavo_step_tokens_sum")
    ran_on = computed - (prompt_tokens - hits + generated - 8)
    assert 0 <= ran_on <= 12 - stopped.json()["usage"]["completion_tokens"]


def test_the_gauges_of_the_pool_sum_to_its_capacity_and_none_is_referenced_when_idle(server: RealServer) -> None:
    until(server.is_idle)
    metrics = server.metrics()
    for unit, total in (("blocks", 4000), ("bytes", 16_000 * TOKEN_BYTES)):
        states = [metrics[f"octavo_kv_cache_{unit}{{{state}}}"] for state in ("referenced", "cached", "free")]
        assert states[0] == 0
        assert sum(states) == total
    assert metrics["octavo_kv_cache_capacity_bytes"] == 16_000 * TOKEN_BYTES
    assert metrics["octavo_kv_cache_bytes_per_token"] == TOKEN_BYTES
    assert metrics["octavo_kv_cache_effective_bytes_per_token"] == 0
    assert metrics["octavo_kv_cache_efficiency_ratio"] == 1
    assert metrics["octavo_kv_cache_usage_ratio"] == 0


def test_effective_bytes_per_token_while_running(server: RealServer) -> None:
    """One stream wastes at most what its last block leaves empty; eight that share a long prompt cost less than the format says."""
    started = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        alone = pool.submit(stream_events, server, started, prompt=[9] * 400, **LONG | {"max_tokens": 600})
        assert started.wait(20)
        metrics = server.metrics()
        alone.result()
        assert metrics["octavo_requests_running"] == 1
        effective = metrics["octavo_kv_cache_effective_bytes_per_token"]
        assert TOKEN_BYTES <= effective <= TOKEN_BYTES * (1 + BLOCK_SIZE / 400)
        assert metrics["octavo_kv_cache_efficiency_ratio"] == pytest.approx(TOKEN_BYTES / effective)
        assert metrics["octavo_kv_cache_usage_ratio"] == metrics["octavo_kv_cache_blocks{referenced}"] / 4000

        prompts = [[9] * 400 + [20 + i] for i in range(8)]
        started.clear()
        shared = pool.submit(stream_events, server, started, prompt=prompts, **LONG | {"max_tokens": 200})
        assert started.wait(20)
        until(lambda: server.metrics()["octavo_requests_running"] == 8)
        until(lambda: server.metrics()["octavo_kv_cache_efficiency_ratio"] > 4)
        assert server.metrics()["octavo_kv_cache_effective_bytes_per_token"] < TOKEN_BYTES / 3
        shared.result()


def test_same_seed_same_text_over_http_whatever_shares_the_batch(server: RealServer) -> None:
    fields = {"prompt": "a town by the sea", "max_tokens": 60, "temperature": 1.2, "seed": 11, "ignore_eos": True}
    alone = server.post(**fields).json()["choices"][0]["text"]
    started = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(stream_events, server, started, prompt=[i], max_tokens=400, ignore_eos=True) for i in range(4, 10)]
        assert started.wait(20)
        texts = [pool.submit(server.post, **fields) for _ in range(3)]
        assert {text.result().json()["choices"][0]["text"] for text in texts} == {alone}
        streamed = stream_events(server, started, **fields)
        assert "".join(json.loads(event)["choices"][0]["text"] for event in streamed[:-1]) == alone
        assert [event.result()[-1] for event in noise] == ["[DONE]"] * 6


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_everything(server: RealServer, stream: bool) -> None:
    before = server.metrics()
    body = json.dumps({"prompt": [[7, i] for i in range(3)], "stream": stream} | LONG).encode()
    head = f"POST {URL} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(server.address) as client:
        client.sendall(head.encode() + body)
        until(lambda: server.metrics()["octavo_requests_running"] == 3)
    until(server.is_idle, 5)
    after = server.metrics()
    assert difference(before, after, "octavo_requests_total{abort}") == 3
    generated = difference(before, after, "octavo_generation_tokens_total")
    assert generated < 3 * LONG["max_tokens"] / 2


def test_killing_the_engine_during_8_streams(server: RealServer) -> None:
    """Every stream ends with an error event, /health turns 503 then 200 again, the next request works."""
    before = server.metrics()
    old_engine = server.engine
    started = [threading.Event() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream_events, server, started[i], prompt=[3, i], **LONG | EIGHT_FIT) for i in range(8)]
        assert all(event.wait(20) for event in started)
        old_engine.send_signal(signal.SIGKILL)
        ends = [stream.result(timeout=5) for stream in streams]
    for events in ends:
        *tokens, error, done = events
        assert len(tokens) >= 3
        assert "error" not in json.loads(tokens[-1])
        assert json.loads(error)["error"]["code"] == "engine_unavailable"
        assert done == "[DONE]"
    assert server.http.get("/health").status_code == 503
    assert server.http.get("/health").json() == {"status": "restarting"}
    refused = server.post(prompt="a", max_tokens=2)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    until(lambda: server.health() == 200, 30)
    assert server.engine.pid != old_engine.pid
    assert server.post(prompt="a", max_tokens=2, ignore_eos=True).json()["usage"]["completion_tokens"] == 2
    until(server.is_idle)
    after = server.metrics()
    assert difference(before, after, "octavo_requests_total{error}") == 8
    assert difference(before, after, "octavo_requests_total{length}") == 1
    assert sum(after[f"octavo_kv_cache_blocks{{{state}}}"] for state in ("referenced", "cached", "free")) == 4000


def test_a_small_cache_shortens_the_context_makes_requests_take_turns_and_dies_with_its_server(folder: Path) -> None:
    flags = ("--block-size", "16", "--kv-cache-memory", str(1600 * TOKEN_BYTES), "--max-model-len", "2000")
    with serving(folder, *flags) as server, ThreadPoolExecutor(8) as pool:
        (note,) = [line for line in server.lines if "shortened" in line]
        assert "from 2,000 to 1,600 tokens" in note
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 1600
        too_long = server.post(prompt=[5] * 800, max_tokens=801).json()["error"]
        assert too_long["code"] == "context_length_exceeded"
        assert "1600 tokens" in too_long["message"]
        ask = [pool.submit(server.post, prompt=[i] * 20, max_tokens=300, ignore_eos=True) for i in range(8)]
        assert [each.result().json()["usage"]["total_tokens"] for each in ask] == [320] * 8
        until(server.is_idle)
        assert server.metrics()["octavo_preemptions_total"] == 0, "what each will need is known: none is let in too early"

        engine, started = server.engine, threading.Event()
        stream = pool.submit(stream_events, server, started, prompt=[5] * 20, **LONG | {"max_tokens": 1580})
        assert started.wait(20)
        server.process.kill()
        psutil.wait_procs([engine], timeout=3)
        assert not engine.is_running(), "busy; ``starting`` sees the same of idle ones"
        with pytest.raises(httpx.HTTPError):
            stream.result(timeout=5)


def fails_to_start(model: Path | str, *flags: str, **env: str) -> str:
    """The one line on stderr that is not progress."""
    began = time.monotonic()
    with starting(model, *flags, env=env) as server:
        assert server.process.wait(30) == 2, server.stderr
        assert time.monotonic() - began < 30
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""
        *progress, line = server.stderr.splitlines()
        assert line.startswith("octavo: error: ")
        assert not [other for other in progress if not other.startswith("octavo: ") or "error" in other], server.stderr
        return line


def damaged(folder: Path, target: Path, name: str, change: Any) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        data = file.read_bytes()
        (target / file.name).write_bytes(change(data) if file.name == name else data)
    return target


def edit_config(**changes: Any) -> Any:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def test_what_cannot_start_says_why_in_one_line_with_status_2(folder: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "bad.gguf"
    gguf.write_bytes(b"GGUF" + os.urandom(200))
    weights = "model.safetensors"
    cases = {
        "nowhere": (tmp_path / "nowhere",),
        "bad.gguf": (gguf,),
        weights: (damaged(folder, tmp_path / "short", weights, lambda data: data[: len(data) // 2]),),
        "MambaForCausalLM": (
            damaged(
                folder, tmp_path / "arch", "config.json", edit_config(architectures=["MambaForCausalLM"], model_type="mamba")
            ),
        ),
        "tokenizer": (damaged(folder, tmp_path / "tok", "tokenizer.json", lambda data: data[:100]),),
        "does not fit": (folder, "--kv-cache-memory", "1000TiB"),
    }
    with ThreadPoolExecutor(2) as pool:
        lines = dict(zip(cases, pool.map(lambda case: fails_to_start(*case), cases.values()), strict=True))
    for words, line in lines.items():
        assert words in line


def test_a_port_in_use_is_said_at_once(server: RealServer, folder: Path) -> None:
    host, port = server.address
    line = fails_to_start(folder, "--port", str(port))
    assert line == f"octavo: error: cannot listen on {host}:{port}: Address already in use"


def test_sigterm_drains_and_takes_the_engine_along(module_server: RealServer) -> None:
    """Readiness is 503 at once, streams finish, exit status 0, and the engine is gone. The end of the module's server."""
    server, engine, started = module_server, module_server.engine, threading.Event()
    with ThreadPoolExecutor(8) as pool:
        stream = pool.submit(stream_events, server, started, prompt=[3], **LONG | {"max_tokens": 600})
        assert started.wait(20)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.health() == 503, 1)
        assert server.http.get("/health").json() == {"status": "draining"}
        assert server.post(prompt="a").status_code == 503
        assert not stream.done()
        *_, last, done = stream.result(timeout=20)
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    assert server.process.wait(10) == 0
    assert not engine.is_running()
    assert "Traceback" not in server.stderr
