"""The bound on waiting requests, as HTTP sees it; and the bound itself beside a plain count."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequestError, QueueFullError
from engine.queue_bound import Place, QueueBound
from server.auth import ApiKey
from tests.fakes import FakeEngine
from tests.server.test_disconnect import LONG, request_bytes, until

URL = "/v1/completions"


@given(
    most=st.integers(1, 6),
    moves=st.lists(st.one_of(st.integers(1, 8), st.tuples(st.just("leave"), st.integers(0, 50))), max_size=60),
)
def test_never_more_places_than_there_are_and_all_or_none(most: int, moves: list[int | tuple[str, int]]) -> None:
    bound = QueueBound(most)
    handed_out: list[Place] = []
    held: list[bool] = []
    for move in moves:
        if isinstance(move, tuple):
            if handed_out:
                index = move[1] % len(handed_out)
                handed_out[index].leave()  # perhaps for the second time
                held[index] = False
        elif move > most:
            with pytest.raises(InvalidRequestError, match=f"{move} prompts and choices"):
                bound.reserve(move)
        elif sum(held) + move > most:
            with pytest.raises(QueueFullError, match=f"{sum(held)} requests wait already and {most} may"):
                bound.reserve(move)
        else:
            handed_out += bound.reserve(move)
            held += [True] * move
        assert bound.num_waiting == sum(held) <= most


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{"prompt": "a"}, {"prompt": "a", "n": 2}, {"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "n": 2}]
)
async def test_a_full_queue_answers_429_with_our_error_body(client, stream: bool, fields: dict[str, Any]) -> None:
    count = fields.get("n", 1) * len(fields["prompt"])
    engine = FakeEngine(queue=QueueBound(4))
    places = engine.reserve(4 - count + 1)
    async with client(engine) as http:
        answer = await http.post(URL, json=fields | {"stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert f"{5 - count} requests wait already and 4 may (--max-queue); {count} more" in error["message"]
        assert not engine.requests
        places[0].leave()
        assert (await http.post(URL, json=fields | {"stream": stream})).status_code == 200
    assert len(engine.requests) == count
    assert engine.queue.num_waiting == 4 - count, "every place that it took is free again"


async def test_what_never_fits_the_queue_is_a_400(client) -> None:
    async with client(FakeEngine(queue=QueueBound(2))) as http:
        answer = await http.post(URL, json={"prompt": "a", "n": 3})
    assert answer.status_code == 400
    assert "3 prompts and choices at once are more than may wait (2, --max-queue)" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_while_waiting_frees_the_places(live, stream: bool) -> None:
    engine = FakeEngine(pieces=lambda _: LONG, delay=60.0, queue=QueueBound(3))
    async with live(engine) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes(prompt="a", stream=stream, n=3))
        await until(lambda: engine.num_running == 3)
        assert engine.queue.num_waiting == 3
        writer.close()
        await until(lambda: engine.queue.num_waiting == 0, 1.0)


async def test_places_are_free_again_when_the_request_fails(client) -> None:
    engine = FakeEngine(queue=QueueBound(2), failure=RuntimeError("broken"), fail_after=0)
    async with client(engine) as http:
        for stream in (False, True, False):
            await http.post(URL, json={"prompt": "a", "n": 2, "stream": stream})
            assert engine.queue.num_waiting == 0


async def test_priority_and_tenant_reach_the_engine(client) -> None:
    engine = FakeEngine()
    keys = (ApiKey("a", "key-a"), ApiKey("b", "key-b"))
    async with client(engine, api_keys=keys) as http:
        for key, fields in (("key-a", {"priority": -3}), ("key-a", {"cache_salt": "s"}), ("key-b", {"priority": None})):
            answer = await http.post(URL, json={"prompt": "a"} | fields, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert (
            await http.post(URL, json={"prompt": "a", "priority": "high"}, headers={"authorization": "Bearer key-a"})
        ).status_code == 400
    (a, first), (same_a, second), (b, third) = engine.turns
    assert (first, second, third) == (-3, 0, 0)
    assert a == same_a != b, "one key takes its turns together, whatever its salts"


async def test_how_the_rotation_follows_the_length_reaches_the_engine(client) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        for fields in ({}, {"rope_growth": None}, {"rope_growth": "reserve"}, {"rope_growth": "recompute"}):
            assert (await http.post(URL, json={"prompt": "a"} | fields)).status_code == 200
        for value in ("grow", True, 1):
            answer = await http.post(URL, json={"prompt": "a", "rope_growth": value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rope_growth")
    assert [terms.grows for terms in engine.terms] == [False, False, False, True]


async def test_without_keys_the_salt_tells_tenants_apart(client) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        for salt in ("s", "s", "t"):
            await http.post(URL, json={"prompt": "a", "cache_salt": salt})
    assert engine.turns[0] == engine.turns[1] != engine.turns[2]
