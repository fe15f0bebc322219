"""The cache seen and steered over HTTP: tenants, public prefixes, n choices, pins, drops, labels. The real server over a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.real_server import RealServer, serving, until
from tests.test_server_real import BLOCK_SIZE, TOKEN_BYTES, difference
from tests.tiny_folder import make_folder

NUM_BLOCKS = 1200
PUBLIC = "You are a helpful assistant."  # 28 tokens: 7 blocks
SOURCES = ("device", "host", "disk", "in_flight", "evicted", "other_namespace", "unseen")
NAMES = {"alice": "a-key", "bob": "b-key", "admin": "root-key"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    path = tmp_path_factory.mktemp("cache")
    make_folder(path / "tiny")
    (path / "keys").write_text("# tenants\nalice: a-key\nbob: b-key\n")
    (path / "public").write_text(PUBLIC)
    flags = {
        "block-size": BLOCK_SIZE,
        "kv-cache-memory": NUM_BLOCKS * BLOCK_SIZE * TOKEN_BYTES,
        "max-model-len": 2048,
        "rope-scaling": '{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1024}',
        "api-key-file": path / "keys",
        "admin-key": "root-key",
        "public-prefix": path / "public",
        "pin-budget": "10%",
    }
    with serving(path / "tiny", *(f"--{name}={value}" for name, value in flags.items())) as server:
        yield server
        assert "Traceback" not in server.stderr
        assert not any(key in server.stderr for key in NAMES.values())


def call(server: RealServer, name: str, method: str, path: str, body: Any = None) -> Any:
    headers = {"authorization": f"Bearer {NAMES[name]}"}
    return server.http.request(method, path, headers=headers, **({} if body is None else {"json": body}))


def ask(server: RealServer, name: str, prompt: Any, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "return_cache_info": True, "temperature": 0} | fields
    answer = call(server, name, "POST", "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def info(answer: Any, index: int = 0) -> dict[str, int]:
    counts: dict[str, int] = answer["choices"][index]["cache_info"]
    return counts


def sources(server: RealServer, name: str = "admin") -> dict[str, float]:
    metrics = server.metrics(NAMES[name])
    counts = {source: metrics[f"octavo_prompt_tokens_by_source_total{{{source}}}"] for source in SOURCES}
    assert sum(counts.values()) == metrics["octavo_prompt_tokens_total"]
    found = counts["device"] + counts["host"] + counts["disk"] + counts["in_flight"]
    assert found == metrics["octavo_prefix_cache_hit_tokens_total"]
    return counts


def test_tenants_share_nothing_but_the_public_prefix_and_labels_say_so(server: RealServer) -> None:
    before, before_bob = sources(server), sources(server, "bob")
    private = [*range(60, 81)]  # 5 full blocks and a token
    first = ask(server, "alice", private)
    assert info(first)["unseen"] == 21
    again = ask(server, "alice", private)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert info(again)["device"] == 20
    bobs = ask(server, "bob", private)
    assert bobs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert info(bobs) == info(first), "bob is not told that others have it"
    salted = ask(server, "alice", private, cache_salt="x")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert bobs["choices"][0]["text"] == salted["choices"][0]["text"] == first["choices"][0]["text"]
    until(server.is_idle)
    after = sources(server)
    assert difference(before, after, "unseen") == 21 + 1 + 1 + 1
    assert difference(before, after, "other_namespace") == 20 + 20
    assert difference(before, after, "device") == 20
    after_bob = sources(server, "bob")
    assert difference(before_bob, after_bob, "other_namespace") == 0
    assert difference(before_bob, after_bob, "unseen") == 21 + 1 + 21 + 21, "nor does bob read it off the metrics"

    system = ask(server, "alice", PUBLIC + "One")
    assert info(system)["unseen"] == 31
    assert info(ask(server, "bob", PUBLIC + "Two"))["device"] == 28
    assert info(ask(server, "alice", PUBLIC + "One more"))["device"] >= 28


def test_a_request_may_grow_into_the_next_rope_class(server: RealServer) -> None:
    again = "octavo_recomputed_tokens_total{rope_class}"
    before = server.metrics()[again]
    prompt = [3 + i % 40 for i in range(1019)]
    answers = {
        (growth, max_tokens): ask(server, "bob", prompt, max_tokens=max_tokens, rope_growth=growth, cache_salt="grow")
        for growth in ("recompute", "reserve")
        for max_tokens in (5, 12)
    }
    classes = {key: info(answer)["rope_class"] for key, answer in answers.items()}
    assert classes == {
        ("recompute", 5): "default",
        ("recompute", 12): "yarn-2",
        ("reserve", 5): "default",
        ("reserve", 12): "yarn-2",
    }
    assert server.metrics()[again] - before == 1023
    start = answers["reserve", 5]["choices"][0]["text"]
    assert answers["recompute", 5]["choices"][0]["text"] == start
    assert answers["recompute", 12]["choices"][0]["text"].startswith(start)
    assert info(answers["recompute", 12])["device"] == 1018, "found in the class that it began in"
    until(server.is_idle)


def test_n_choices_hold_the_prompt_once_and_count_it_once(server: RealServer) -> None:
    before = server.metrics()
    prompt = [*range(90, 131)]
    many = ask(server, "alice", prompt, n=4, max_tokens=12, temperature=1.0, seed=5)
    assert many["usage"]["prompt_tokens"] == 41
    assert many["usage"]["completion_tokens"] == 48
    assert many["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    found = [info(many, index)["device"] + info(many, index)["in_flight"] for index in range(4)]
    assert found == [0, 40, 40, 40], "the first computes it for all, be it while they wait or just before they come"
    texts = [choice["text"] for choice in many["choices"]]
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    for index, text in enumerate(texts):
        alone = ask(server, "alice", prompt, max_tokens=12, temperature=1.0, seed=5 + index)
        assert alone["choices"][0]["text"] == text, "choice i is the request with seed + i"
    until(server.is_idle)
    after = server.metrics()
    assert difference(before, after, "octavo_requests_total{length}") == 8
    sources(server)


def test_a_pin_outlives_pressure_and_a_reset_and_ends_when_told(server: RealServer) -> None:
    prompt = [*range(140, 181)]  # 10 full blocks
    body = {"prompt": prompt, "ttl": 300, "tenant": "bob"}
    pinned = call(server, "admin", "POST", "/v1/cache/pin", body)
    assert pinned.status_code == 200, pinned.text
    pin = pinned.json()
    assert (pin["tokens"], pin["blocks"], pin["computed_tokens"]) == (40, 10, 41)
    assert pin["bytes"] == 40 * TOKEN_BYTES
    assert call(server, "admin", "POST", "/v1/cache/pin", body).json()["computed_tokens"] == 0
    until(lambda: server.metrics()["octavo_kv_cache_pinned_bytes"] == pin["bytes"])
    for first in range(4):  # more than the cache holds
        ask(server, "alice", [(first + i) % 250 for i in range(0, 1900)], max_tokens=1)
    metrics = server.metrics()
    assert metrics["octavo_evicted_blocks_total"] > 0
    assert metrics["octavo_kv_cache_idle_before_evict_seconds_count"] == metrics["octavo_evicted_blocks_total"]
    assert info(ask(server, "bob", prompt))["device"] == 40

    view = call(server, "admin", "GET", "/v1/cache").json()
    assert sum(view["blocks"].values()) == NUM_BLOCKS
    assert {item["tenant"] for item in view["namespaces"]} >= {"alice", "bob"}
    assert view["pin_limit"]["blocks"] == NUM_BLOCKS // 10
    assert len(view["pins"]) == 2
    assert all(len(item["salt"]) in (0, 12) for item in view["namespaces"])

    reset = call(server, "admin", "POST", "/reset_prefix_cache").json()
    assert not reset["complete"]
    assert reset["kept_blocks"]["device"] == {"referenced": 0, "pinned": 10, "continued": 0}
    metrics = server.metrics()
    assert metrics["octavo_kv_cache_blocks{cached}"] == 10
    assert info(ask(server, "bob", prompt))["device"] == 40
    for item in view["pins"]:
        assert call(server, "admin", "DELETE", f"/v1/cache/pin/{item['id']}").status_code == 200
    assert call(server, "admin", "DELETE", f"/v1/cache/pin/{pin['id']}").status_code == 404

    dropped = call(server, "admin", "POST", "/v1/cache/drop", {"prompt": prompt, "tenant": "bob"}).json()
    assert dropped["complete"]
    assert dropped["dropped"]["device"]["blocks"] >= 10
    gone = info(ask(server, "bob", prompt))
    assert (gone["device"], gone["evicted"], gone["unseen"]) == (0, 40, 1)
    assert 0 <= gone["evicted_seconds"] < 60
    assert call(server, "admin", "POST", "/reset_prefix_cache").json()["complete"]
    until(lambda: server.metrics()["octavo_kv_cache_blocks{free}"] == NUM_BLOCKS)
    sources(server)


def test_too_large_a_pin_is_409_with_the_numbers_and_others_may_not(server: RealServer) -> None:
    body = {"prompt": [7] * 600, "ttl": 60, "tenant": "bob"}
    before = server.metrics()
    refused = call(server, "admin", "POST", "/v1/cache/pin", body)
    assert refused.status_code == 409
    assert "150 blocks" in refused.json()["error"]["message"]
    assert "budget is 120 blocks" in refused.json()["error"]["message"]
    assert difference(before, server.metrics(), "octavo_prompt_tokens_total") == 0, "nothing was computed for it"
    assert call(server, "alice", "POST", "/v1/cache/pin", body).status_code == 403
    assert call(server, "bob", "GET", "/v1/cache").status_code == 403


def test_a_pin_dies_with_the_engine_and_the_config_is_told_again(server: RealServer) -> None:
    body = {"prompt": [*range(140, 181)], "ttl": 300, "tenant": "bob"}
    assert call(server, "admin", "POST", "/v1/cache/pin", body).status_code == 200
    server.engine.kill()
    until(lambda: server.health() == 503)
    assert call(server, "admin", "GET", "/v1/cache").status_code == 503
    until(lambda: server.health() == 200, 30)
    assert call(server, "admin", "GET", "/v1/cache").json()["pins"] == []
    assert server.metrics()["octavo_kv_cache_pinned_bytes"] == 0
    assert [name for name in server.metrics() if name.startswith("octavo_cache_config_info")]
