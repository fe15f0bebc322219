"""The operator's routes over a fake engine: who may, what is sent, what is answered. The cache's side is in tests/kv."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.control import (
    CacheView,
    Deletions,
    Dropped,
    DropPrefix,
    NotResident,
    Pinned,
    PinPrefix,
    PinView,
    ResetCache,
    ShowCache,
    ShowDeletions,
    Unpin,
    Unpinned,
)
from engine.errors import ControlRefusedError, EngineDeadError
from engine.kv.survey import NamespaceView, PrefixView
from engine.request import Namespace
from server.auth import ApiKey, derive_salt
from tests.fakes import BOS, FakeEngine, fake_info

ROUTES = (
    ("GET", "/v1/cache"),
    ("POST", "/v1/cache/pin"),
    ("DELETE", "/v1/cache/pin/pin-1"),
    ("POST", "/v1/cache/drop"),
    ("POST", "/reset_prefix_cache"),
)
ALICE = ApiKey("alice", "a-key")
ADMIN = {"authorization": "Bearer root"}
BLOCK_BYTES = 32_768
TEXT = "twenty characters !!"


def admin(client: Any, engine: FakeEngine, **settings: Any) -> Any:
    return client(engine, admin_key="root", **settings)


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_an_admin_key_nobody_may_and_is_told_how(client, method, path) -> None:
    engine = FakeEngine()
    async with client(engine, api_keys=(ALICE,)) as http:
        refused = await http.request(method, path, headers={"authorization": "Bearer a-key"})
    assert refused.status_code == 403
    assert "--admin-key" in refused.json()["error"]["message"]
    assert engine.commands == []


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_no_other_key_will_do(client, method, path) -> None:
    engine = FakeEngine()
    for keys, key, status in (((ALICE,), "a-key", 403), ((), "", 403), ((), "wrong", 403), ((ALICE,), "wrong", 401)):
        async with admin(client, engine, api_keys=keys) as http:
            refused = await http.request(method, path, headers={"authorization": f"Bearer {key}"})
            assert refused.status_code == status
            assert list(refused.json()["error"]) == ["message", "type", "param", "code"]
            assert "root" not in refused.text
    assert engine.commands == []


async def test_the_admin_key_is_an_api_key_too_with_a_cache_of_its_own(client) -> None:
    engine = FakeEngine()
    async with admin(client, engine, api_keys=(ALICE,)) as http:
        assert (await http.post("/v1/completions", json={"prompt": "a"}, headers=ADMIN)).status_code == 200
    assert engine.salts == [derive_salt("root", None)]


def a_view() -> CacheView:
    salt = derive_salt("a-key", None)
    return CacheView(
        num_blocks=40,
        num_free_blocks=20,
        num_cached_blocks=12,
        num_referenced_blocks=8,
        num_pinned_blocks=2,
        num_host_blocks=3,
        num_disk_files=4,
        disk_bytes=1234,
        pin_limit_blocks=10,
        pins=(PinView("pin-1", 32, 2, 5.0),),
        namespaces=(NamespaceView(Namespace(salt), 5, 70, 1, 2), NamespaceView(Namespace("f" * 64), 1, 16, 0, 0)),
        by_bytes=(PrefixView(Namespace(salt), (BOS, 104, 105), 70, 5, 0, 3, 1, 2),),
        by_hits=(),
    )


async def test_the_view_names_tenants_and_shows_neither_keys_nor_whole_salts(client) -> None:
    engine = FakeEngine(answers=[a_view()])
    async with admin(client, engine, api_keys=(ALICE,)) as http:
        answer = await http.get("/v1/cache?top=3&tokens=7", headers=ADMIN)
    assert answer.status_code == 200
    assert engine.commands == [ShowCache(3, 7)]
    body = answer.json()
    salt = derive_salt("a-key", None)
    assert salt not in answer.text
    assert "a-key" not in answer.text
    assert body["blocks"] == {"referenced": 8, "cached": 12, "free": 20}
    assert body["bytes"] == {"referenced": 8 * BLOCK_BYTES, "cached": 12 * BLOCK_BYTES, "free": 20 * BLOCK_BYTES}
    assert body["capacity_bytes"] == 40 * BLOCK_BYTES
    assert body["tiers"] == {
        "device": {"blocks": 20, "bytes": 20 * BLOCK_BYTES, "capacity_bytes": 40 * BLOCK_BYTES},
        "host": {"blocks": 3, "bytes": 3 * BLOCK_BYTES, "capacity_bytes": 0},
        "disk": {"files": 4, "bytes": 1234, "capacity_bytes": 0},
    }
    assert body["pinned"] == {"blocks": 2, "bytes": 2 * BLOCK_BYTES}
    assert body["pin_limit"] == {"blocks": 10, "bytes": 10 * BLOCK_BYTES}
    assert body["pins"] == [{"id": "pin-1", "tokens": 32, "blocks": 2, "bytes": 2 * BLOCK_BYTES, "seconds_left": 5.0}]
    assert [(item["salt"], item["tenant"]) for item in body["namespaces"]] == [(salt[:12], "alice"), ("f" * 12, None)]
    (prefix,) = body["top_by_bytes"]
    assert (prefix["text"], prefix["token_ids"], prefix["hits"], prefix["tenant"]) == ("hi", [BOS, 104, 105], 3, "alice")
    assert body["top_by_hits"] == []


@pytest.mark.parametrize("query", ["top=-1", "top=x", "top=1001", "top=", "tokens=1e3", "tokens=99999999999"])
async def test_a_bad_number_is_refused_by_name(client, query) -> None:
    async with admin(client, FakeEngine()) as http:
        refused = await http.get(f"/v1/cache?{query}", headers=ADMIN)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == query.partition("=")[0]


async def test_pinning_what_is_resident_computes_nothing(client) -> None:
    engine = FakeEngine(answers=[Pinned(PinView("pin-7", 16, 1, 60.0), 3)])
    async with admin(client, engine, api_keys=(ALICE,)) as http:
        body = {"prompt": TEXT, "ttl": 60, "tenant": "alice", "cache_salt": "x"}
        answer = await http.post("/v1/cache/pin", json=body, headers=ADMIN)
    (command,) = engine.commands
    assert isinstance(command, PinPrefix)
    assert command.namespace == Namespace(derive_salt("a-key", "x"))
    assert command.token_ids == (BOS, *TEXT.encode())
    assert (command.num_public_tokens, command.seconds) == (2, 60)
    assert engine.requests == []
    body = answer.json()
    assert (body["id"], body["tokens"], body["blocks"], body["seconds_left"]) == ("pin-7", 16, 1, 60.0)
    assert (body["computed_tokens"], body["pinned_bytes"]) == (0, 3 * BLOCK_BYTES)
    assert body["expires_at"] > 1_600_000_000


async def test_what_is_not_resident_is_computed_by_one_request_and_then_pinned(client) -> None:
    engine = FakeEngine(answers=[NotResident(0), Pinned(PinView("pin-7", 16, 1, 60.0), 1)], num_cached_tokens=4)
    async with admin(client, engine) as http:
        answer = await http.post("/v1/cache/pin", json={"prompt": TEXT, "ttl": 60, "cache_salt": "x"}, headers=ADMIN)
    assert answer.json()["computed_tokens"] == 21 - 4
    ((ids, sampling),) = engine.requests
    assert (ids, sampling.max_tokens) == ([BOS, *TEXT.encode()], 1)
    assert engine.salts == [derive_salt("", "x")]
    assert engine.num_finished == 1
    assert engine.commands[0] == engine.commands[1]


async def test_a_pin_that_is_evicted_again_and_again_is_given_up_with_a_word(client) -> None:
    engine = FakeEngine(answers=[NotResident(0)] * 3)
    async with admin(client, engine) as http:
        answer = await http.post("/v1/cache/pin", json={"prompt": TEXT, "ttl": 60}, headers=ADMIN)
    assert answer.status_code == 409
    assert "3 times" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "ttl"),
        ({"ttl": 0}, 400, "ttl"),
        ({"ttl": 1e9}, 400, "ttl"),
        ({"ttl": "60"}, 400, "ttl"),
        ({"ttl": 60, "prompt": ["a", "b"]}, 400, "prompt"),
        ({"ttl": 60, "prompt": ""}, 400, "prompt"),
        ({"ttl": 60, "prompt": "short"}, 400, "prompt"),
        ({"ttl": 60, "prompt": "x" * 512}, 400, "prompt"),
        ({"ttl": 60, "tenant": None}, 400, "tenant"),
        ({"ttl": 60, "tenant": "nobody"}, 404, "tenant"),
        ({"ttl": 60, "cache_salt": ""}, 400, "cache_salt"),
        ({"ttl": 60, "name": "x"}, 400, "name"),
    ],
)
async def test_a_bad_pin_is_refused_before_anything_is_sent(client, fields, status, param) -> None:
    engine = FakeEngine()
    async with admin(client, engine, api_keys=(ALICE,)) as http:
        answer = await http.post("/v1/cache/pin", json={"prompt": TEXT, "tenant": "alice"} | fields, headers=ADMIN)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert engine.commands == []
    assert engine.requests == []


async def test_refusals_of_the_cache_are_409_with_its_words_and_a_dead_engine_is_503(client) -> None:
    engine = FakeEngine(answers=[ControlRefusedError("pins would hold 9 blocks"), EngineDeadError("died")])
    async with admin(client, engine) as http:
        refused = await http.post("/v1/cache/pin", json={"prompt": TEXT, "ttl": 60}, headers=ADMIN)
        dead = await http.post("/reset_prefix_cache", headers=ADMIN)
    assert (refused.status_code, dead.status_code) == (409, 503)
    assert refused.json()["error"]["message"] == "pins would hold 9 blocks"


async def test_what_is_never_shared_cannot_be_pinned(client) -> None:
    engine = FakeEngine(info=fake_info(stream_len=20))
    async with admin(client, engine) as http:
        refused = await http.post("/v1/cache/pin", json={"prompt": "a" * 17, "ttl": 60, "max_tokens": 4}, headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert "more than 20 tokens" in refused.json()["error"]["message"]
    assert (engine.commands, engine.requests) == ([], [])


async def test_unpinning_what_is_not_there_is_404(client) -> None:
    engine = FakeEngine(answers=[Unpinned(PinView("pin-1", 16, 1, 3.0)), Unpinned(None)])
    async with admin(client, engine) as http:
        gone = await http.delete("/v1/cache/pin/pin-1", headers=ADMIN)
        missing = await http.delete("/v1/cache/pin/pin-1", headers=ADMIN)
    assert gone.json()["unpinned"]["id"] == "pin-1"
    assert missing.status_code == 404
    assert engine.commands == [Unpin("pin-1")] * 2


async def test_drop_and_reset_say_what_went_and_what_stayed(client) -> None:
    engine = FakeEngine(answers=[Dropped(5, 0, 0, 0), Dropped(3, 4, 2, 1, num_continued_host_blocks=7)])
    async with admin(client, engine, api_keys=(ALICE,)) as http:
        dropped = await http.post("/v1/cache/drop", json={"prompt": [1, 2, 3], "tenant": "alice"}, headers=ADMIN)
        reset = await http.post("/reset_prefix_cache", headers=ADMIN)
    assert engine.commands == [DropPrefix(Namespace(derive_salt("a-key", None)), (1, 2, 3), 2), ResetCache()]
    assert dropped.json()["dropped"]["device"] == {"blocks": 5, "bytes": 5 * BLOCK_BYTES}
    assert dropped.json()["complete"] is True
    assert reset.json()["kept_blocks"] == {
        "device": {"referenced": 4, "pinned": 2, "continued": 1},
        "host": {"continued": 7},
        "disk": {"continued": 0},
    }
    assert reset.json()["complete"] is False


async def test_an_answer_waits_for_the_disk_and_tells_what_could_not_be_deleted(client) -> None:
    dropped = Dropped(
        1, 0, 0, 0, num_host_blocks=2, num_held_host_blocks=1, num_disk_blocks=3, num_disk_bytes=99, num_deleting=4
    )
    for failed in (0, 1):
        engine = FakeEngine(answers=[dropped, Deletions(2, 0), Deletions(0, failed)])
        async with admin(client, engine) as http:
            body = (await http.post("/reset_prefix_cache", headers=ADMIN)).json()
        assert engine.commands == [ResetCache(), ShowDeletions(), ShowDeletions()]
        assert body["dropped"]["host"] == {"blocks": 2, "bytes": 2 * BLOCK_BYTES}
        assert body["dropped"]["disk"] == {"blocks": 3, "bytes": 99}
        assert (body["held_host_blocks"], body["deletions"]) == (1, {"pending": 0, "failed": failed})
        assert body["complete"] is not bool(failed)


async def test_a_drop_without_a_tenant_is_in_the_common_cache(client) -> None:
    engine = FakeEngine(answers=[Dropped(0, 0, 0, 0)])
    async with admin(client, engine, api_keys=(ALICE,)) as http:
        assert (await http.post("/v1/cache/drop", json={"prompt": [1]}, headers=ADMIN)).status_code == 200
        salted = await http.post("/v1/cache/drop", json={"prompt": [1], "cache_salt": "x"}, headers=ADMIN)
    assert engine.commands == [DropPrefix(Namespace(), (1,), 2)]
    assert json.loads(salted.text)["error"]["param"] == "cache_salt"
