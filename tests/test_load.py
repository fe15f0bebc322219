"""From a config to an engine: what it settles on, what it says about it, and what it refuses with the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import KV_DTYPES, CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import ConfigError, InsufficientMemoryError, StartupError
from engine.kv.format import ELEMENT_BYTES, SEALED_TYPES
from engine.load import LoadedEngine, load_engine
from engine.memory import available_bytes, plan_num_blocks
from engine.model.weights import open_checkpoint
from engine.request import SamplingParams
from engine.sched.plan import SampleSpec, ScheduledSequence, StepPlan
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]

TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # K and V, 3 layers, 2 KV heads of 8, float32
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_folder(path, max_position_embeddings=128)
    return path


def load(path: Path, *, memory_bytes: int = MIB, block_size: int = 4, kv_dtype: str = "auto", **config: Any) -> LoadedEngine:
    cache = CacheConfig(memory_bytes=memory_bytes, block_size=block_size, kv_dtype=kv_dtype)
    return load_engine(EngineConfig(model_path=str(path), model_name="tiny", cache=cache, **config))


def test_it_takes_the_models_context_and_has_nothing_to_say(folder: Path) -> None:
    info = load(folder).info
    assert (info.max_model_len, info.notes) == (128, ())
    assert info.bytes_per_token == TOKEN_BYTES
    assert info.block_bytes == 4 * TOKEN_BYTES
    assert info.num_blocks == MIB // (4 * TOKEN_BYTES)
    assert (info.dtype, info.kv_dtype, info.attention_backend, info.vocab_size) == ("float32", "float32", "cpu", 300)


@pytest.mark.parametrize("wanted", [None, 100])
def test_a_cache_that_is_too_small_shortens_the_context_and_says_so_in_one_line(folder: Path, wanted: int | None) -> None:
    loaded = load(folder, memory_bytes=50 * TOKEN_BYTES, max_model_len=wanted)
    assert loaded.info.num_blocks == 12
    assert loaded.info.max_model_len == 48
    (note,) = loaded.info.notes
    assert f"from {wanted or 128} to 48 tokens" in note
    assert "--kv-cache-memory" in note
    assert "\n" not in note


def test_a_request_of_exactly_the_shortened_context_runs_to_its_end(folder: Path) -> None:
    loaded = load(folder, memory_bytes=50 * TOKEN_BYTES)
    events = run(loaded, prompt=tuple(range(5, 35)), max_tokens=18)
    assert len(events) == 18


@pytest.mark.parametrize("max_model_len", [2, 3, 5])
def test_the_shortest_contexts_work(folder: Path, max_model_len: int) -> None:
    loaded = load(folder, max_model_len=max_model_len, block_size=16)
    assert len(run(loaded, prompt=(7,) * (max_model_len - 1), max_tokens=1)) == 1


def run(loaded: LoadedEngine, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    from engine.request import Request

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    loaded.core.add(Request("a", prompt, params, seed=0))
    tokens = []
    while loaded.core.has_work:
        tokens += [event.token_id for event in loaded.core.step().events]
        loaded.core.scheduler.manager.check_integrity()
    assert None not in tokens
    return tokens  # type: ignore[return-value]


def test_more_context_than_the_model_has_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="129 is more than the 128 tokens that the model was trained for"):
        load(folder, max_model_len=129, rope_policy="static")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windowed")
    make_folder(path, class_name="MistralForCausalLM", sliding_window=32, max_position_embeddings=128)
    return path


def test_a_sliding_window_bounds_what_a_request_holds_and_not_its_length(windowed: Path) -> None:
    info = load(windowed).info
    assert (info.max_model_len, info.sliding_window, info.notes) == (128, 32, ())
    scheduler = SchedulerConfig(max_num_batched_tokens=16)  # 31 + 16 tokens lie in 13 blocks at most
    small = load(windowed, memory_bytes=13 * 4 * TOKEN_BYTES, scheduler=scheduler)
    assert (small.info.num_blocks, small.info.max_model_len) == (13, 128)
    assert len(run(small, prompt=tuple(range(5, 105)), max_tokens=28)) == 28
    smaller = load(windowed, memory_bytes=12 * 4 * TOKEN_BYTES, scheduler=scheduler)
    assert smaller.info.max_model_len == 48
    assert "from 128 to 48 tokens" in smaller.info.notes[0]


def test_a_window_as_long_as_the_context_limits_nothing(windowed: Path, tmp_path: Path) -> None:
    config = json.loads((windowed / "config.json").read_text()) | {"sliding_window": 128}
    for file in windowed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = load(tmp_path).info
    assert (info.max_model_len, info.sliding_window, info.notes) == (128, None, ())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"rope_scaling": "{"}, "not JSON"),
        ({"rope_scaling": '{"rope_type": "magic"}'}, "magic"),
        ({"max_model_len": 129}, "129"),
    ],
)
def test_what_the_context_cannot_be_is_refused_before_the_weights_are_read(
    folder: Path, asked: dict[str, Any], reason: str
) -> None:
    stages: list[str] = []
    config = EngineConfig(model_path=str(folder), model_name="tiny", rope_policy="static", **asked)
    with pytest.raises(StartupError, match=reason):
        load_engine(config, lambda stage, share: stages.append(stage))
    assert "loading weights" not in stages


def test_a_quantized_file_is_called_by_its_types(smollm2_path: Path) -> None:
    assert open_checkpoint(smollm2_path).matrix_types == ("Q4_1", "Q8_0")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_16_bit_weights_are_widened_on_a_cpu_and_computed_as_asked(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    model = make_folder(tmp_path, dtype=dtype, max_position_embeddings=128)
    info = load(tmp_path).info
    assert (info.dtype, info.kv_dtype) == ("float32", "float32")
    (note,) = info.notes
    assert f"weights are {name}; computing in float32" in note

    tokens = torch.randint(3, 299, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].float()
        wide = model.float()(torch.tensor([tokens])).logits[0]
    rounding = float((expected - wide).abs().max())  # what the type itself costs, in transformers' hands
    for backend in ("cpu", "reference"):
        loaded = load(tmp_path, dtype=name, attention_backend=backend)
        assert (loaded.info.dtype, loaded.info.kv_dtype, loaded.info.notes) == (name, name, ())
        assert loaded.info.bytes_per_token == TOKEN_BYTES / 2
        for start, end in ((0, 20), (20, 21), (21, 22), (22, 30)):
            logits = step_logits(loaded, tokens, start, end)
            assert logits.dtype == dtype
            assert float((logits[0].float() - wide[end - 1]).abs().max()) < 3 * rounding
        assert len(run(loaded, tuple(tokens), 20)) == 20


def step_logits(loaded: LoadedEngine, tokens: list[int], start: int, end: int) -> torch.Tensor:
    greedy = SampleSpec(SamplingParams(temperature=0.0), seed=0, position=0)
    plan = StepPlan((ScheduledSequence("a", tuple(tokens[start:end]), start, tuple(range(1, 11)), 0, greedy),))
    return loaded.runner.forward(plan)[1]


def test_progress_names_each_stage_and_ends_the_loading_at_1(folder: Path) -> None:
    heard: list[tuple[str, float | None]] = []
    cache = CacheConfig(memory_bytes=MIB)
    load_engine(EngineConfig(model_path=str(folder), model_name="tiny", cache=cache), lambda *args: heard.append(args))
    stages = list(dict.fromkeys(stage for stage, _ in heard))
    assert stages[:2] == ["opening the model", "loading weights"]
    assert stages[2].startswith("warming up")
    shares = [share for stage, share in heard if stage == "loading weights"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(InsufficientMemoryError, match=r"1,125,899,906,842,624 bytes does not fit: [\d,]+ bytes are available"):
        load(folder, memory_bytes=2**50)


def test_a_cache_below_one_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"999 bytes cannot hold one block of 1,000 bytes \(16 tokens\)"):
        plan_num_blocks(CacheConfig(memory_bytes=999), 1000, 2**30)
    with pytest.raises(InsufficientMemoryError, match="cannot hold one block"):
        plan_num_blocks(CacheConfig(fraction=0.5), 1000, 1999)


def test_the_cache_takes_its_share_in_whole_blocks() -> None:
    assert plan_num_blocks(CacheConfig(memory_bytes=2999), 1000, 2**30) == 2
    assert plan_num_blocks(CacheConfig(fraction=0.5), 1000, 9000) == 4
    assert plan_num_blocks(CacheConfig(memory_bytes=9000, fraction=0.1), 1000, 9000) == 9


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "k8v4", "int4"])
def test_a_quantized_cache_pays_for_its_open_blocks_out_of_the_same_memory(folder: Path, kv_dtype: str) -> None:
    scheduler = SchedulerConfig(max_num_seqs=5)
    info = load(folder, kv_dtype=kv_dtype, scheduler=scheduler).info
    assert (info.dtype, info.kv_dtype) == ("float32", kv_dtype)
    assert info.tail_bytes == 5 * 4 * TOKEN_BYTES
    assert info.num_blocks == (MIB - info.tail_bytes) // info.block_bytes
    assert MIB - info.block_bytes < info.cache_bytes <= MIB
    with pytest.raises(InsufficientMemoryError, match=r"7,679 bytes .* beside 7,680 bytes for the open blocks.*--max-num-seqs"):
        load(folder, kv_dtype=kv_dtype, scheduler=scheduler, memory_bytes=5 * 4 * TOKEN_BYTES - 1)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_cache_in_16_bits_under_a_model_in_32(folder: Path, kv_dtype: str, backend: str) -> None:
    loaded = load(folder, kv_dtype=kv_dtype, attention_backend=backend)
    assert (loaded.info.dtype, loaded.info.kv_dtype, loaded.info.tail_bytes) == ("float32", kv_dtype, 0)
    assert loaded.info.bytes_per_token == TOKEN_BYTES / 2
    assert len(run(loaded, prompt=tuple(range(5, 35)), max_tokens=18)) == 18


def test_an_unknown_kv_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"auto, float32, .*int4; got 'int3'"):
        CacheConfig(kv_dtype="int3")


def test_every_format_that_can_be_asked_for_exists() -> None:
    assert set(KV_DTYPES) == {*ELEMENT_BYTES, *SEALED_TYPES}


def test_a_cache_of_one_token_is_refused(folder: Path) -> None:
    with pytest.raises(InsufficientMemoryError, match="holds 1 token; a request needs 2"):
        load(folder, memory_bytes=TOKEN_BYTES, block_size=1)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.load.available_bytes", lambda device: 100_000)
    stages: list[str] = []
    with pytest.raises(
        InsufficientMemoryError, match=r"the weights take [\d,]{7} bytes in float32, but 100,000 are available on cpu"
    ):
        load_engine(EngineConfig(model_path=str(folder), model_name="tiny"), lambda stage, share: stages.append(stage))
    assert stages == ["opening the model"]


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < available_bytes(torch.device("cpu")) <= total


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_is_refused_with_the_remedy(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        load(folder, device="cuda")


def test_an_unknown_device_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'tpu'"):
        load(folder, device="tpu")
