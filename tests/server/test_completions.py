"""POST /v1/completions, good requests: shapes of prompts and answers, streams, usage, models."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from engine.request import SamplingParams
from engine.stats import PromptSources
from server.schemas import CompletionRequest
from tests.fakes import BOS, FakeEngine

URL = "/v1/completions"


def events_of(text: str) -> list[Any]:
    """The data of each event; [DONE] must be the last one and appear once."""
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    assert data.count("[DONE]") == 1
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


async def test_answer_has_the_shape_of_the_api(http) -> None:
    response = await http.post(URL, json={"model": "fake-model", "prompt": "abc"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["created"] > 1_600_000_000
    assert body["model"] == "fake-model"
    assert body["choices"] == [{"index": 0, "text": "cba", "finish_reason": "stop", "stop_reason": None, "logprobs": None}]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_text_gets_special_tokens_and_token_ids_are_taken_as_they_are(client) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
            response = await http.post(URL, json={"prompt": prompt})
            assert response.json()["choices"][0]["text"] == "ba"
    assert [ids for ids, _ in engine.requests] == [[BOS, 97, 98]] * 2 + [[97, 98]] * 2


@pytest.mark.parametrize("prompt", [["ab", "cd", "ef"], [[97, 98], [99, 100], [101, 102]]])
async def test_several_prompts_give_choices_in_prompt_order_and_summed_usage(client, prompt) -> None:
    async with client(FakeEngine(num_cached_tokens=2)) as http:
        body = (await http.post(URL, json={"prompt": prompt})).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "ba"), (1, "dc"), (2, "fe")]
    usage = body["usage"]
    assert usage["prompt_tokens"] == sum(len(item) + isinstance(item, str) for item in prompt)
    assert usage["completion_tokens"] == 9
    assert usage["total_tokens"] == usage["prompt_tokens"] + 9
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_several_prompts_run_at_the_same_time(client) -> None:
    engine = FakeEngine(delay=0.02)
    most = 0

    def count(prompt: str) -> list[str]:
        nonlocal most
        most = max(most, engine.num_running + 1)
        return ["x"] * 3

    engine.pieces = count
    async with client(engine) as http:
        await http.post(URL, json={"prompt": ["a", "b", "c", "d"]})
    assert most == 4


@pytest.mark.parametrize("prompt", ["hello wörld 🙂", ["first", "second one", "c"]])
@pytest.mark.parametrize("delay", [0.0, 0.002])
async def test_stream_and_whole_answer_are_the_same(client, prompt, delay) -> None:
    async with client(FakeEngine(delay=delay)) as http:
        request = {"prompt": prompt, "max_tokens": 20}
        whole = (await http.post(URL, json=request)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await http.post(URL, json=request | options)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(response.text)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]


async def test_stream_chunks_share_their_head_and_none_is_empty(client) -> None:
    async with client(FakeEngine(delay=0.002)) as http:
        chunks = events_of((await http.post(URL, json={"prompt": "abcd", "stream": True})).text)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert [c["choices"][0]["text"] for c in chunks] == ["d", "c", "b", "a"]
    assert all(c["usage"] is None for c in chunks)


async def test_outputs_that_are_ready_together_share_a_chunk(client) -> None:
    async with client(FakeEngine()) as http:
        chunks = events_of((await http.post(URL, json={"prompt": "ab" * 100, "max_tokens": 201, "stream": True})).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "ba" * 100


async def test_usage_comes_in_one_last_chunk_without_choices(http) -> None:
    request = {"prompt": ["ab", "c"], "stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of((await http.post(URL, json=request)).text)
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["usage"]["total_tokens"] == 10


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_without_include_usage_no_chunk_has_usage(http, options) -> None:
    request = {"prompt": "ab", "stream": True, "stream_options": options}
    chunks = events_of((await http.post(URL, json=request)).text)
    assert all(c["choices"] and c["usage"] is None for c in chunks)


async def test_length_is_reported_as_finish_reason(http) -> None:
    body = (await http.post(URL, json={"prompt": "abcdefgh", "max_tokens": 5})).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5


async def test_null_stands_for_the_default_everywhere(client) -> None:
    engine = FakeEngine()
    fields = set(CompletionRequest.model_fields) - {"prompt"}
    assert len(fields) == 27
    async with client(engine) as http:
        response = await http.post(URL, json={"prompt": "a"} | dict.fromkeys(fields))
    assert response.status_code == 200, response.text
    assert engine.requests[0][1] == SamplingParams()


async def test_every_sampling_field_reaches_the_engine(client) -> None:
    engine = FakeEngine()
    fields = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "seed": -5,
        "stop": ["x", "yy"],
        "stop_token_ids": [4, 256],
        "ignore_eos": True,
    }
    async with client(engine) as http:
        assert (await http.post(URL, json={"prompt": "a"} | fields)).status_code == 200
    expected = fields | {"temperature": 0.0, "stop": ("x", "yy"), "stop_token_ids": (4, 256)}
    assert engine.requests[0][1] == SamplingParams(**expected)


async def test_top_k_of_minus_one_is_off_and_one_stop_string_is_a_list_of_one(client) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        assert (await http.post(URL, json={"prompt": "a", "top_k": -1, "stop": "END"})).status_code == 200
    assert engine.requests[0][1] == SamplingParams(top_k=0, stop=("END",))


async def test_fields_not_built_are_accepted_with_the_value_that_changes_nothing(http) -> None:
    neutral = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "user": "anybody",
    }
    assert (await http.post(URL, json={"prompt": "a"} | neutral)).status_code == 200


async def test_long_text_is_tokenized_off_the_event_loop(client) -> None:
    engine = FakeEngine(pieces=lambda prompt: ["x"])
    threads = []
    encode = engine.tokenizer.encode

    class Watched(type(engine.tokenizer)):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread())
            return encode(text, add_special_tokens)[:100]

    engine.tokenizer = Watched()
    async with client(engine) as http:
        for length in (10, 100_000):
            assert (await http.post(URL, json={"prompt": "a" * length, "max_tokens": 1})).status_code == 200
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_models_lists_the_served_one(client) -> None:
    async with client(FakeEngine(), served_model_name="org/name") as http:
        body = (await http.get("/v1/models")).json()
        assert body["object"] == "list"
        (card,) = body["data"]
        assert card["id"] == "org/name"
        assert card["object"] == "model"
        assert card["created"] > 0
        assert card["owned_by"] == "octavo"
        assert card["max_model_len"] == 512
        assert (await http.get("/v1/models/org/name")).json() == card
        assert (await http.get("/v1/models/other")).status_code == 404
        assert (await http.post(URL, json={"model": "org/name", "prompt": "a"})).json()["model"] == "org/name"


async def test_openapi_describes_the_body(http) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    schema = paths[URL]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"]
    assert "temperature" in schema["properties"]


async def test_n_choices_of_each_prompt_in_order_with_the_prompt_counted_once(client) -> None:
    engine = FakeEngine(num_cached_tokens=2)
    async with client(engine) as http:
        body = (await http.post(URL, json={"prompt": ["ab", "cde"], "n": 3, "best_of": 3, "seed": 7})).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        *((index, "ba") for index in range(3)),
        *((index, "edc") for index in range(3, 6)),
    ]
    assert body["usage"] == {
        "prompt_tokens": 3 + 4,
        "completion_tokens": 3 * (3 + 4),
        "total_tokens": 7 + 21,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert [sampling.seed for _, sampling in engine.requests] == [7, 8, 9] * 2


async def test_n_without_a_seed_leaves_each_choice_to_its_own(client) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        await http.post(URL, json={"prompt": "ab", "n": 2})
        await http.post(URL, json={"prompt": "ab", "n": 2, "seed": 2**63 - 1})
    assert [sampling.seed for _, sampling in engine.requests] == [None, None, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("n", [2, 5])
async def test_a_stream_of_n_choices_interleaves_and_is_the_whole_answer(client, n) -> None:
    async with client(FakeEngine(delay=0.002)) as http:
        request = {"prompt": ["hello", "you"], "max_tokens": 20, "n": n}
        whole = (await http.post(URL, json=request)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events_of((await http.post(URL, json=request | options)).text)
    texts = dict.fromkeys(range(2 * n), "")
    order = [chunk["choices"][0]["index"] for chunk in chunks[:-1]]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]
    assert order != sorted(order)
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 128, "prompt": ["a"] * 9}, "128 of 9 prompts makes 1152 choices; at most 1024"),
        ({"n": 2, "best_of": 3}, "best_of 3 with n 2"),
        ({"n": 2, "best_of": 1}, "best_of 1 with n 2"),
    ],
)
async def test_too_many_choices_are_refused_with_the_numbers(client, fields, words) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        refused = await http.post(URL, json={"prompt": "a"} | fields)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    assert engine.requests == []


async def test_cache_info_comes_on_demand_and_does_not_tell_what_others_have(client) -> None:
    sources = PromptSources(device=1, host=2, disk=3, in_flight=4, evicted=5, other_namespace=6, unseen=7, evicted_seconds=1.5)
    async with client(FakeEngine(sources=sources)) as http:
        plain = (await http.post(URL, json={"prompt": "ab", "return_cache_info": False})).json()
        assert "cache_info" not in plain["choices"][0]
        asked = {"prompt": "ab", "n": 2, "return_cache_info": True}
        whole = (await http.post(URL, json=asked)).json()
        chunks = events_of((await http.post(URL, json=asked | {"stream": True})).text)
    expected = {"device": 1, "host": 2, "disk": 3, "in_flight": 4, "evicted": 5, "unseen": 13, "evicted_seconds": 1.5}
    expected["rope_class"] = "default"
    assert [choice["cache_info"] for choice in whole["choices"]] == [expected] * 2
    infos = [c["choices"][0]["cache_info"] for c in chunks if "cache_info" in c["choices"][0]]
    assert infos == [expected] * 2
    assert "other_namespace" not in json.dumps(whole)
