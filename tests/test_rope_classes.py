"""Which rotation a request gets for its length: classes grow, cover everything once, and carry the right factor."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.context_plan import plan_context
from engine.errors import ConfigError, UnsupportedModelError
from engine.model_config import ModelConfig
from engine.rope_classes import RopePlan, choose_rope_class, plan_rope, rope_classes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
MANY = 1 << 40  # tokens of cache
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def model(scaling: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, "max_position_embeddings": 1024, "rope_scaling": scaling, **changes})


def names(plan: RopePlan, max_model_len: int) -> list[tuple[str, int]]:
    return [(each.name, each.max_len) for each in rope_classes(plan, max_model_len)]


def planned(
    scaling: dict[str, Any] | None, policy: str = "auto", wanted: int | None = None, declared: dict[str, Any] | None = None
) -> RopePlan:
    return plan_rope(model(declared), None if scaling is None else json.dumps(scaling), policy, wanted)


YARN = {"rope_type": "yarn", "factor": 6.0}


def test_a_checkpoint_is_served_as_declared_and_an_operators_scaling_on_the_ladder() -> None:
    assert names(planned(None, declared=YARN), 6144) == [("yarn-6", 6144)]
    ladder = [("default", 1024), ("yarn-2", 2048), ("yarn-4", 4096), ("yarn-6", 6144)]
    assert names(planned(YARN), 6144) == ladder
    assert names(planned(None, "ladder", declared=YARN), 6144) == ladder
    assert names(planned(YARN, "static"), 6144) == [("yarn-6", 6144)]
    assert names(planned(YARN), 1500) == [("default", 1024), ("yarn-2", 1500)]
    assert names(planned(YARN), 700) == [("default", 700)]


def test_a_context_past_the_trained_one_is_reached_by_yarn_on_the_ladder_and_says_so() -> None:
    plan = planned(None, wanted=5000)
    assert names(plan, 5000) == [("default", 1024), ("yarn-2", 2048), ("yarn-4", 4096), ("yarn-8", 5000)]
    assert plan.note is not None
    assert all(number in plan.note for number in ("5,000", "1,024", "8"))
    assert planned(None, wanted=1024).note is None


def test_dynamic_and_longrope_choose_by_length_without_being_asked() -> None:
    dynamic = planned(None, declared={"rope_type": "dynamic", "factor": 4.0})
    assert names(dynamic, 4000) == [("dynamic-1", 1024), ("dynamic-2", 2048), ("dynamic-4", 4000)]
    assert [each.length for each in rope_classes(dynamic, 4000)] == [1024, 2048, 4096], "the base does not depend on the limit"
    longrope = planned(None, declared={**LONGROPE, "original_max_position_embeddings": 256})
    assert names(longrope, 1024) == [("longrope-short", 256), ("longrope-long", 1024)]
    assert names(longrope, 256) == [("longrope-short", 256)]


@given(st.floats(1.0, 40.0), st.integers(2, 50_000), st.sampled_from(["yarn", "ntk", "dynamic"]), st.data())
def test_every_length_has_the_smallest_class_that_covers_it(
    factor: float, max_len: int, rope_type: str, data: st.DataObject
) -> None:
    plan = planned({"rope_type": rope_type, "factor": factor})
    classes = rope_classes(plan, min(max_len, plan.max_len))
    table = [(each.name, each.max_len) for each in classes]
    assert len({name for name, _ in table}) == len(table)
    assert table[-1][1] == min(max_len, plan.max_len)
    num_tokens = data.draw(st.integers(1, table[-1][1]))
    chosen = choose_rope_class(table, num_tokens)
    assert num_tokens <= table[chosen][1]
    assert chosen == 0 or num_tokens > table[chosen - 1][1]
    scale = 1.0 if classes[chosen].rope.rope_type == "default" else float(classes[chosen].name.rpartition("-")[2])
    assert scale < 2 * max(1.0, num_tokens / 1024), "no more scaling than the length needs, in powers of two"


def test_a_declared_attention_factor_is_whole_at_the_declared_scaling_and_its_share_below() -> None:
    plan = planned({**YARN, "factor": 4.0, "attention_factor": 1.4})
    factors = [each.rope.attention_factor for each in rope_classes(plan, 4096)]
    assert factors == [None, pytest.approx(1.2), 1.4]


@pytest.mark.parametrize(
    ("scaling", "config", "context"),
    [
        (None, {}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, {}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, {"max_model_len": 4096}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, {}, 4096),
        ({**YARN, "original_max_position_embeddings": 512}, {}, 3072),
        ({**YARN, "factor": 2.0, "original_max_position_embeddings": 512}, {}, 1024),
        ({**LONGROPE, "original_max_position_embeddings": 256}, {}, 1024),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            },
            {},
            1024,
        ),
    ],
)
def test_the_factor_counts_once(scaling: dict[str, Any] | None, config: dict[str, Any], context: int) -> None:
    assert plan_context(engine_config(**config), model(scaling), MANY).max_model_len == context


@pytest.mark.parametrize(
    ("scaling", "config", "message"),
    [
        (
            YARN,
            {"max_model_len": 6145},
            "max_model_len 6,145 is more than the 6,144 tokens that yarn scaling reaches (1,024 x 6)",
        ),
        (
            {"rope_type": "linear", "factor": 2.0},
            {"max_model_len": 2049},
            "2,048 tokens that linear scaling reaches (1,024 x 2)",
        ),
        (None, {"max_model_len": 1025, "rope_policy": "static"}, "1,024 tokens that the model was trained for"),
        (
            None,
            {"rope_policy": "ladder"},
            "--rope-policy ladder needs one of ntk, dynamic, yarn, longrope; the scaling is default",
        ),
        (None, {"rope_scaling": "{"}, "--rope-scaling is not JSON"),
        (None, {"rope_scaling": "[]"}, "--rope-scaling must be a JSON object"),
    ],
)
def test_what_the_scaling_does_not_reach_is_refused_with_the_numbers(
    scaling: dict[str, Any] | None, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        plan_context(engine_config(**config), model(scaling), MANY)
    assert message in str(error.value)


def test_an_unknown_key_of_the_operator_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="--rope-scaling: beta = 3"):
        planned({**YARN, "beta": 3})


def test_the_cache_shortens_the_last_class_too() -> None:
    context = plan_context(engine_config(rope_scaling=json.dumps(YARN)), model(), 1500)
    assert (context.max_model_len, context.rope_classes[-1].max_len) == (1500, 1500)
    assert any("1,500" in note for note in context.notes)
    assert "RoPE by request length: default to 1,024, yarn-2 to 1,500" in context.notes


def engine_config(**changes: Any) -> EngineConfig:
    return replace(EngineConfig(model_path="", model_name=""), **changes)
