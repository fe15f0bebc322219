"""Every switch of the block: the engine computes through the paged cache what the trained module computes over whole sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.demo.export import export
from engine.demo.model import DemoModel, demo_config, learned
from engine.errors import DamagedModelError, UnsupportedModelError
from engine.load import load_engine
from engine.model.cpu_decoder import CPUDecoder
from engine.model_config import ModelConfig
from engine.octavo_config import write_octavo
from engine.request import SamplingParams
from engine.sched.plan import SampleSpec, ScheduledSequence, StepPlan

BASE = replace(demo_config(vocab_size=97, context_len=64, num_layers=2), dtype="float32")
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
VANILLA: dict[str, Any] = {
    "norm": "layernorm", "norm_bias": True, "rope": learned(BASE), "mlp": "gelu", "num_kv_heads": 8, "qk_norm": False, **BIASES,
}  # fmt: skip
SWITCHES: dict[str, dict[str, Any]] = {
    "as-trained": {},
    "layernorm": {"norm": "layernorm", "norm_bias": True},
    "layernorm-without-bias": {"norm": "layernorm"},
    "post-norm": {"is_post_norm": True},
    "post-layernorm": {"is_post_norm": True, "norm": "layernorm", "norm_bias": True},
    "learned-positions": {"rope": learned(BASE)},
    "gelu": {"mlp": "gelu"},
    "gelu-tanh": {"mlp": "gelu_tanh"},
    "mha": {"num_kv_heads": 8},
    "mqa": {"num_kv_heads": 1},
    "biases": BIASES,
    "no-qk-norm": {"qk_norm": False},
    "untied": {"tie_word_embeddings": False},
    "all-of-gpt2": VANILLA,
}
GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0, position=0)


def make(folder: Path, name: str) -> DemoModel:
    """With norms, biases and a position table that are not 1 and 0, so that leaving one out shows."""
    model = DemoModel(replace(BASE, **SWITCHES[name]), seed=4)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    export(model, folder)
    return model.eval()


@pytest.mark.parametrize("name", SWITCHES)
def test_the_engine_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens]))[0]
    for backend in ("reference", "cpu"):
        cache = CacheConfig(block_size=8, memory_bytes=1 << 20)
        loaded = load_engine(EngineConfig(model_path=str(tmp_path), model_name=name, attention_backend=backend, cache=cache))
        assert loaded.info.num_parameters == model.num_parameters
        is_compiled = isinstance(loaded.runner._model, CPUDecoder)
        assert is_compiled == (backend == "cpu" and replace(BASE, **SWITCHES[name]).has_llama_block)
        for start, end in ((0, 20), (20, 27), (27, 38), (38, 39), (39, 40)):  # a prompt, chunks, decodes
            plan = StepPlan((ScheduledSequence("a", tuple(tokens[start:end]), start, (3, 1, 4, 0, 5), 0, GREEDY),))
            logits = loaded.runner.forward(plan)[1]
            torch.testing.assert_close(logits[0], expected[end - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_written_is_read(name: str) -> None:
    config = replace(BASE, **SWITCHES[name])
    assert ModelConfig.from_hf(write_octavo(config)) == config


@pytest.mark.parametrize(
    "key", ["norm", "norm_bias", "norm_position", "mlp", "bias", "qk_norm", "positions", "head_dim", "norm_eps"]
)
def test_no_choice_has_a_default(key: str) -> None:
    written = write_octavo(BASE)
    del written[key]
    with pytest.raises(DamagedModelError, match=f"{key} is missing"):
        ModelConfig.from_hf(written)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "batchnorm"}, ["norm", "batchnorm", "rmsnorm, layernorm"]),
        ({"mlp": "relu"}, ["mlp", "relu"]),
        ({"positions": "alibi"}, ["positions", "alibi"]),
        ({"norm_bias": True}, ["norm_bias", "layernorm"]),
        ({"hidden_act": "silu"}, ["hidden_act"]),
        ({"positions": "learned"}, ["rope_theta"]),
        ({"sliding_window": 16}, ["sliding_window"]),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_hf({**write_octavo(BASE), **changes})
    for word in words:
        assert word in str(caught.value)
