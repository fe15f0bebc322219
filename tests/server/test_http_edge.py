"""Keys, request ids, states and failures: what a client sees besides completions."""

from __future__ import annotations

import json
import logging
import re

import pytest

from engine.errors import EngineDeadError, RequestFailedError
from server import __version__
from server.drain import Drain
from tests.fakes import FakeEngine, FakeStatus

URL = "/v1/completions"
ERROR_KEYS = ["message", "type", "param", "code"]


async def test_health_and_version(http) -> None:
    response = await http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})
    assert (await http.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize(
    ("status", "word"), [(FakeStatus.STARTING, "starting"), (FakeStatus.DEAD, "restarting"), (FakeStatus.STOPPED, "stopped")]
)
async def test_an_engine_that_is_not_ready_means_503_with_retry_after(client, status, word) -> None:
    engine = FakeEngine(status=status)
    async with client(engine) as http:
        health = await http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": word})
        assert int(health.headers["retry-after"]) > 0
        refused = await http.post(URL, json={"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert list(refused.json()["error"]) == ERROR_KEYS
        assert word in refused.json()["error"]["message"]
        engine.status = FakeStatus.READY
        assert (await http.get("/health")).status_code == 200
        assert (await http.post(URL, json={"prompt": "a"})).status_code == 200


async def test_before_the_engine_was_ever_ready_there_is_no_model_to_list(client) -> None:
    async with client(FakeEngine(status=FakeStatus.STARTING, info=None)) as http:
        assert (await http.get("/v1/models")).status_code == 503


async def test_draining_refuses_what_is_new(client) -> None:
    drain = Drain()
    async with client(FakeEngine(), drain) as http:
        drain.begin()
        assert (await http.get("/health")).json() == {"status": "draining"}
        refused = await http.post(URL, json={"prompt": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineDeadError("pid 4711 got signal 9"), 503, "engine_unavailable"),
        (RequestFailedError("secret internals"), 500, "request_failed"),
        (ZeroDivisionError("secret internals"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("fail_after", [0, 2])
async def test_an_engine_failure_is_a_status_or_the_last_event_of_a_stream(client, failure, status, code, fail_after) -> None:
    engine = FakeEngine(failure=failure, fail_after=fail_after, delay=0.002)
    async with client(engine) as http:
        whole = await http.post(URL, json={"prompt": "abc"})
        assert whole.status_code == status
        assert ("retry-after" in whole.headers) == (status == 503)
        error = whole.json()["error"]
        assert list(error) == ERROR_KEYS
        assert error["code"] == code
        assert "secret" not in whole.text
        assert "4711" not in whole.text

        stream = await http.post(URL, json={"prompt": "abc", "stream": True})
        assert stream.status_code == 200
        *chunks, last, done = stream.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: ")) == {"error": error}
        assert len(chunks) == (1 if fail_after else 0)
    assert engine.num_running == 0


async def test_one_failing_prompt_ends_its_siblings(client) -> None:
    def pieces(prompt: str) -> list[str]:
        if prompt == "bad":
            raise RequestFailedError("this one")
        return ["x"] * 500

    engine = FakeEngine(pieces=pieces, delay=0.01)
    async with client(engine) as http:
        assert (await http.post(URL, json={"prompt": ["good", "bad", "good"], "max_tokens": 400})).status_code == 500
    assert engine.num_running == 0
    assert engine.num_aborted == 2


async def test_outputs_without_an_end_are_a_failure(client) -> None:
    async with client(FakeEngine(pieces=lambda prompt: [])) as http:
        assert (await http.post(URL, json={"prompt": "a"})).status_code == 500


async def test_prompt_text_never_reaches_the_log(client, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    async with client(FakeEngine(failure=RequestFailedError("broken"))) as http:
        await http.post(URL, json={"prompt": "xylophone"}, headers={"x-request-id": "the-id"})
        await http.post(URL, json={"prompt": "xylophone", "temperature": "xylophone"})
    assert "broken" in caplog.text
    assert "the-id" in caplog.text
    assert "xylophone" not in caplog.text


@pytest.mark.parametrize("given", ["abc-123", "A.b_c:D", "x" * 128])
async def test_a_plain_request_id_comes_back_once(http, given) -> None:
    for response in (
        await http.get("/health", headers={"x-request-id": given}),
        await http.post(URL, json={}, headers={"x-request-id": given}),
        await http.get("/nothing", headers={"x-request-id": given}),
    ):
        assert response.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\tb", "ä".encode("latin-1"), "a;b", "<script>"])
async def test_any_other_request_id_is_replaced_by_a_fresh_one(http, given) -> None:
    headers = {} if given is None else {"x-request-id": given}
    seen = set()
    for _ in range(2):
        (request_id,) = (await http.post(URL, json={"prompt": "a"}, headers=headers)).headers.get_list("x-request-id")
        assert re.fullmatch("[0-9a-f]{32}", request_id)
        seen.add(request_id)
    assert len(seen) == 2


async def test_two_requests_with_one_id_are_both_answered(client) -> None:
    async with client(FakeEngine(delay=0.002)) as http:
        for _ in range(2):
            response = await http.post(URL, json={"prompt": "ab"}, headers={"x-request-id": "same"})
            assert response.json()["choices"][0]["text"] == "ba"


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic secret", "secret", "Bearer secret2", "Bearer secre"]
)
async def test_without_the_key_all_but_the_public_paths_are_401(client, authorization) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    async with client(FakeEngine(), api_key="secret") as http:
        for method, path in (("POST", URL), ("GET", "/v1/models"), ("GET", "/openapi.json"), ("GET", "/nothing")):
            response = await http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert list(response.json()["error"]) == ERROR_KEYS
            assert response.json()["error"]["type"] == "authentication_error"
            assert "x-request-id" in response.headers
            assert "secret" not in response.text
        for path in ("/health", "/version", "/metrics"):
            assert (await http.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_the_key_opens_everything(client, scheme) -> None:
    async with client(FakeEngine(), api_key="schlüssel") as http:
        headers = {"authorization": f"{scheme} schlüssel".encode()}
        assert (await http.post(URL, json={"prompt": "a"}, headers=headers)).status_code == 200
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_metrics_are_served_as_text(http) -> None:
    response = await http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "octavo_build_info" in response.text
