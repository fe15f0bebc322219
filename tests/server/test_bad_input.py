"""Every class of bad input: a small four-key error that names the field, before the first byte, and a server unharmed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine

URL = "/v1/completions"
JSON = {"content-type": "application/json"}


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 2000
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert error["param"] == param
    if param is not None:
        assert param.split(".")[0] in error["message"]
    for internal in ("Traceback", "pydantic", ".py", "/server", "Value error", "function-"):
        assert internal not in response.text
    return error


BAD_FIELDS = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", ["a", ""]),
    ("prompt", [[1], []]),
    ("prompt", 5),
    ("prompt", True),
    ("prompt", {"text": "a"}),
    ("prompt", [None]),
    ("prompt", ["a", 1]),
    ("prompt", [1, "a"]),
    ("prompt", [1, True]),
    ("prompt", [1, 2.0]),
    ("prompt", [[1, "2"]]),
    ("prompt", [[[1]]]),
    ("prompt", -1),
    ("prompt", [-1]),
    ("prompt", [[1], [-1]]),
    ("prompt", [257]),
    ("prompt", [[1], [99999]]),
    ("prompt", [2**31]),
    ("prompt", [2**70]),
    ("prompt", "nul \0 inside"),
    ("prompt", ["a"] * 1025),
    ("prompt", "a" * 600),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("max_tokens", 5.0),
    ("max_tokens", 2**63),
    ("max_tokens", 10**400),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", [1]),
    ("temperature", 10**400),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("top_p", False),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("min_p", 1.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("seed", "1"),
    ("seed", False),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", 5),
    ("stop", [5]),
    ("stop", {"a": "b"}),
    ("stop", "\0"),
    ("stop", "x" * 5000),
    ("stop_token_ids", 5),
    ("stop_token_ids", -1),
    ("stop_token_ids", [257]),
    ("stop_token_ids", [1] * 1025),
    ("ignore_eos", 123),
    ("ignore_eos", "true"),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", True),
    ("user", 5),
    ("n", 129),
    ("n", -1),
    ("n", True),
    ("n", 1.0),
    ("n", 0),
    ("best_of", 2),
    ("best_of", 0),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("cache_salt", "s" * 257),
    ("return_cache_info", 1),
    ("echo", True),
    ("echo", 0),
    ("logprobs", 0),
    ("logprobs", 5),
    ("logprobs", False),
    ("suffix", ""),
    ("suffix", "end"),
    ("logit_bias", {"191222": -100}),
    ("logit_bias", []),
    ("presence_penalty", 0.5),
    ("presence_penalty", False),
    ("frequency_penalty", -2),
    ("repetition_penalty", 1.1),
    ("model", 5),
    ("no_such_field", 1),
    ("max_token", None),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=lambda value: repr(value)[:30])
async def test_a_bad_field_is_refused_by_name(client, name, value) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        for stream in ({}, {"stream": True}):
            response = await http.post(URL, json={"prompt": "a"} | stream | {name: value})
            error = check_error(response, 400, name)
            assert error["type"] == "invalid_request_error"
        assert engine.requests == []
        assert (await http.post(URL, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("options", [{"no_such": 1}, {"include_usage": "yes"}, {"continuous_usage_stats": True}])
async def test_a_bad_stream_option_is_refused_by_name(http, options) -> None:
    response = await http.post(URL, json={"prompt": "a", "stream": True, "stream_options": options})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"stream_options.{next(iter(options))}"


@pytest.mark.parametrize("bad", ["5", True, -1, 2**40])
async def test_a_bad_item_of_a_list_is_named_with_its_place(http, bad) -> None:
    check_error(await http.post(URL, json={"prompt": "a", "stop_token_ids": [1, bad]}), 400, "stop_token_ids.1")


async def test_stream_options_need_a_stream(http) -> None:
    check_error(await http.post(URL, json={"prompt": "a", "stream_options": {"include_usage": True}}), 400, "stream_options")


async def test_prompt_is_required(http) -> None:
    assert "required" in check_error(await http.post(URL, json={}), 400, "prompt")["message"]


async def test_context_length_has_its_own_code_and_numbers(http) -> None:
    error = check_error(await http.post(URL, json={"prompt": "a", "max_tokens": 10_000}), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "10002" in error["message"]
    assert "512" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"} x',
        b"{'prompt': 'a'}",
        b'{"prompt": "a",}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": [' + b"9" * 5000 + b"]}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud800 tail"}',
        b'{"prompt": "\\udc00"}',
        b'{"prompt": ["\\udfff\\ud800"]}',
        b'{"\\ud800": 1}',
        b'{"prompt": "\xff\xfe"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":' * 50_000,
        b'"text"',
        b"[]",
        b"5",
        b"null",
        b"true",
        b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_a_body_that_is_no_json_object_is_refused(client, body) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        error = check_error(await http.post(URL, content=body, headers=JSON), 400, None)
        assert error["type"] == "invalid_request_error"
        assert "body" in error["message"]
        assert engine.requests == []
        assert (await http.post(URL, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("body", [b'{"prompt": "\\ud800"}', b'{"prompt": "a\\udbff"}', b'{"stop": ["\\ud83d"]}'])
async def test_half_of_a_surrogate_pair_is_called_what_it_is(http, body) -> None:
    response = await http.post(URL, content=body, headers=JSON)
    assert "half of a surrogate pair" in check_error(response, 400, None)["message"]


async def test_a_body_cut_short_is_called_what_it_is(http) -> None:
    response = await http.post(URL, content=b'{"prompt": "a', headers=JSON)
    assert "truncated" in check_error(response, 400, None)["message"]


async def test_a_long_unknown_field_name_gives_a_short_answer(http) -> None:
    response = await http.post(URL, json={"prompt": "a", "z" * 100_000: 1})
    assert response.status_code == 400
    assert len(response.content) < 400


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=latin-1", "json"],
)
async def test_another_content_type_is_415(http, content_type) -> None:
    response = await http.post(URL, content=b'{"prompt": "a"}', headers={"content-type": content_type})
    check_error(response, 415, None)


async def test_a_missing_content_type_is_415(http) -> None:
    check_error(await http.post(URL, content=b'{"prompt": "a"}'), 415, None)


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"]
)
async def test_json_in_utf8_is_taken(http, content_type) -> None:
    response = await http.post(URL, content=b'{"prompt": "a"}', headers={"content-type": content_type})
    assert response.status_code == 200


async def test_a_body_over_the_limit_is_413_and_one_at_the_limit_is_taken(client) -> None:
    body = json.dumps({"prompt": "a", "user": ""}).encode()
    async with client(FakeEngine(), max_body_bytes=1000) as http:
        fitting = body.replace(b'""', b'"' + b"u" * (1000 - len(body)) + b'"')
        assert len(fitting) == 1000
        assert (await http.post(URL, content=fitting, headers=JSON)).status_code == 200
        error = check_error(await http.post(URL, content=fitting + b" ", headers=JSON), 413, None)
        assert error["code"] == "content_too_large"
        assert "1000" in error["message"]


async def test_a_large_body_is_answered_over_a_real_connection(live) -> None:
    async with live(FakeEngine()) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        check_error(await http.post(URL, content=b" " * (11 * 1024 * 1024), headers=JSON), 413, None)
        assert (await http.post(URL, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("model", ["other", "", "x" * 10_000, "\n"])
async def test_an_unknown_model_is_404(http, model) -> None:
    error = check_error(await http.post(URL, json={"model": model, "prompt": "a"}), 404, "model")
    assert error["type"] == "not_found_error"
    assert error["code"] == "model_not_found"


async def test_unknown_paths_and_methods_have_the_same_shape(http) -> None:
    check_error(await http.get("/v1/nothing"), 404, None)
    check_error(await http.get("/" + "x" * 5000), 404, None)
    response = await http.get(URL)
    check_error(response, 405, None)
    assert response.headers["allow"] == "POST"
    check_error(await http.post("/health"), 405, None)


async def test_bad_requests_do_not_touch_a_running_neighbour(client) -> None:
    async with client(FakeEngine(delay=0.01)) as http:
        neighbour = asyncio.create_task(http.post(URL, json={"prompt": "abcdef"}))
        for _, value in BAD_FIELDS[:10]:
            assert (await http.post(URL, json={"prompt": value})).status_code == 400
        assert (await neighbour).json()["choices"][0]["text"] == "fedcba"
