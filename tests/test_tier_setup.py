"""An engine with tiers, from its config to its end: a tiny model, real files, restarts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig
from engine.errors import ConfigError, InsufficientMemoryError
from engine.kv.block_file import HEADER_BYTES
from engine.llm import LLM, Completion
from engine.model.fingerprint import model_fingerprint
from engine.model.weights import load_weights, open_checkpoint
from engine.request import SamplingParams
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]

BLOCK = 4
BLOCK_BYTES = BLOCK * 2 * 3 * 2 * 8 * 4  # K and V, 3 layers, 2 KV heads of 8, float32
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6)
PROMPT = tuple(range(10, 51))  # 10 full blocks and a token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_folder(path, max_position_embeddings=128)
    return path


def make_llm(folder: Path, *, num_blocks: int = 16, host_blocks: int = 0, disk: Path | None = None, **cache: Any) -> LLM:
    return LLM(
        str(folder),
        cache=CacheConfig(
            memory_bytes=num_blocks * BLOCK_BYTES,
            block_size=BLOCK,
            host_bytes=host_blocks * BLOCK_BYTES,
            disk_path=str(disk) if disk is not None else None,
            **cache,
        ),
    )


def ask(llm: LLM, prompt: tuple[int, ...] = PROMPT) -> Completion:
    """Ask, and let the disk come to rest."""
    completion = llm.generate([prompt], GREEDY)[0]
    while llm.core.is_disk_busy:
        llm.core.wait_for_disk(1.0)
        llm.core.poll_disk()
    return completion


def crowd_out(llm: LLM, count: int = 1) -> None:
    """Use the whole device for something else."""
    for number in range(count):
        ask(llm, tuple(range(100 + number, 100 + number + 57)))


def files(disk: Path) -> list[Path]:
    return sorted(disk.glob("*/*.kv"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[int, ...]:
    return ask(make_llm(folder, num_blocks=100)).token_ids


def test_a_host_hit_says_the_same(folder: Path, expected: tuple[int, ...]) -> None:
    llm = make_llm(folder, host_blocks=40)
    ask(llm)
    crowd_out(llm)
    again = ask(llm)
    assert again.token_ids == expected
    assert again.num_cached_tokens == 40
    assert llm.info.host_cache_bytes == 40 * BLOCK_BYTES
    assert llm.core.idle_stats().cache.host_bytes > 0


def test_a_disk_hit_says_the_same(folder: Path, tmp_path: Path, expected: tuple[int, ...]) -> None:
    llm = make_llm(folder, host_blocks=12, disk=tmp_path)
    ask(llm)
    crowd_out(llm, 3)
    again = ask(llm)
    assert again.token_ids == expected
    assert again.num_cached_tokens > 0
    assert llm.core.idle_stats().cache.disk_bytes == sum(path.stat().st_size for path in files(tmp_path))
    llm.close()


def test_a_restart_finds_what_the_device_had_at_the_stop(folder: Path, tmp_path: Path, expected: tuple[int, ...]) -> None:
    llm = make_llm(folder, disk=tmp_path)
    assert ask(llm).num_cached_tokens == 0
    llm.close()
    assert len(files(tmp_path)) == 11, "ten of the prompt, one of prompt and answer"
    again = make_llm(folder, disk=tmp_path)
    answer = ask(again)
    assert (answer.token_ids, answer.num_cached_tokens) == (expected, 40)
    again.close()
    assert len(files(tmp_path)) == 11, "what is there is not written twice"
    assert [*tmp_path.glob("*.tmp"), *tmp_path.glob("*.lock")] == []


def test_of_a_folder_that_is_too_full_the_beginnings_of_prompts_are_kept(folder: Path, tmp_path: Path) -> None:
    llm = make_llm(folder, disk=tmp_path)
    ask(llm)
    llm.close()
    for num_files in (5, 3):  # as the stop left them, then as the next engine used them
        llm = make_llm(folder, disk=tmp_path, disk_bytes=num_files * (BLOCK_BYTES + HEADER_BYTES))
        assert ask(llm).num_cached_tokens == num_files * BLOCK
        llm.close(flush_seconds=0.0)


def test_no_time_no_flush(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(folder, disk=tmp_path)
    ask(llm)
    llm.close(flush_seconds=0.0)
    assert files(tmp_path) == []
    assert "11 not" in caplog.text


def test_a_flush_passes_over_a_file_that_cannot_be(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(folder, disk=tmp_path)
    ask(llm)
    llm.close()
    first, *rest = files(tmp_path)
    for path in (first, *rest):
        path.unlink()
    first.mkdir()
    llm = make_llm(folder, disk=tmp_path)
    ask(llm)
    llm.close()
    assert [path for path in files(tmp_path) if path.is_file()] == rest
    assert first.name in caplog.text


def test_a_flush_counts_what_other_servers_have_written_since(folder: Path, tmp_path: Path) -> None:
    bound = 12 * (BLOCK_BYTES + HEADER_BYTES)
    llms = [make_llm(folder, disk=tmp_path, disk_bytes=bound) for _ in range(2)]
    ask(llms[0])
    crowd_out(llms[1], 1)
    for llm in llms:
        llm.close()
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert bound // 2 < sum(sizes) <= bound


def test_what_was_dropped_just_before_a_stop_is_not_found_by_the_next_start(folder: Path, tmp_path: Path) -> None:
    llm = make_llm(folder, disk=tmp_path)
    ask(llm)
    llm.close()
    again = make_llm(folder, disk=tmp_path)
    assert len(files(tmp_path)) == 11
    again.core.scheduler.manager.operator.reset()
    again.close(flush_seconds=0.0)
    assert files(tmp_path) == []


def spoil(name: str, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if name == "flipped":
        data[len(data) // 2] ^= 4
    elif name == "truncated":
        del data[100:]
    elif name == "foreign":
        data[:] = os.urandom(len(data))
    path.unlink()
    if name != "vanished":
        path.write_bytes(data)


@pytest.mark.parametrize("name", ["flipped", "truncated", "foreign", "vanished"])
def test_spoilt_files_cost_time_and_a_line_each_never_the_answer(
    folder: Path, tmp_path: Path, expected: tuple[int, ...], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    llm = make_llm(folder, disk=tmp_path)
    ask(llm)
    llm.close()
    again = make_llm(folder, disk=tmp_path)
    for path in files(tmp_path):
        spoil(name, path)
    answer = ask(again)
    assert (answer.token_ids, answer.num_cached_tokens) == (expected, 0)
    assert len(caplog.records) == 10, "one line for each block that the prompt asked for"
    again.close()
    third = make_llm(folder, disk=tmp_path)
    assert ask(third).num_cached_tokens == 40, "the stop wrote them anew"
    third.close()


def test_another_model_in_the_same_folder_finds_nothing_and_takes_its_share(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_folder(other, max_position_embeddings=128, rope_theta=5000.0)
    disk = tmp_path / "disk"
    llm = make_llm(folder, disk=disk)
    ask(llm)
    llm.close()
    bound = 15 * (BLOCK_BYTES + HEADER_BYTES)
    llm = make_llm(other, disk=disk, disk_bytes=bound)
    assert ask(llm).num_cached_tokens == 0
    llm.close()
    assert len({path.parent for path in files(disk)}) == 2
    assert len(files(disk)) == 15, "one bound for all: the older model's blocks went first"


def test_two_engines_on_one_folder(folder: Path, tmp_path: Path, expected: tuple[int, ...]) -> None:
    one, two = make_llm(folder, disk=tmp_path), make_llm(folder, disk=tmp_path)
    assert ask(one).token_ids == ask(two).token_ids == expected
    one.close()
    for path in files(tmp_path):
        path.unlink()
    two.close()
    third = make_llm(folder, disk=tmp_path)
    assert ask(third).num_cached_tokens == 40
    third.close()


def test_a_disk_alone_gets_a_place_to_pass_through_and_says_so(folder: Path, tmp_path: Path) -> None:
    llm = make_llm(folder, disk=tmp_path)
    assert llm.info.host_cache_bytes == 64 // BLOCK * BLOCK_BYTES, "the longest request"
    assert "--host-cache" in " ".join(llm.info.notes)
    assert llm.info.disk_cache_bytes == 10 * 2**30
    llm.close()


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({"host_bytes": BLOCK_BYTES - 1}, "raise --host-cache"),
        ({"host_bytes": 2**50}, "lower --host-cache"),
        ({"disk_path": "/dev/null/no", "host_bytes": BLOCK_BYTES}, "cannot keep a disk cache in /dev/null/no"),
        ({"disk_path": "anywhere", "disk_bytes": 100}, "cannot hold one block"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(folder: Path, cache: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, InsufficientMemoryError), match=words):
        LLM(str(folder), cache=CacheConfig(memory_bytes=16 * BLOCK_BYTES, block_size=BLOCK, **cache))


def fingerprint(path: Path, dtype: torch.dtype = torch.float32, by: str = "cpu") -> bytes:
    checkpoint = open_checkpoint(path)
    weights = load_weights(checkpoint, dtype=dtype, device="cpu", progress=lambda done, total: None)
    return model_fingerprint(checkpoint.config, weights, by)


def test_the_fingerprint_is_stable_and_changes_with_any_tensor(folder: Path) -> None:
    first = fingerprint(folder)
    assert fingerprint(folder) == first
    assert fingerprint(folder, by="reference") != first
    assert fingerprint(folder, dtype=torch.bfloat16) != first
    checkpoint = open_checkpoint(folder)
    weights = load_weights(checkpoint, dtype=torch.float32, device="cpu", progress=lambda done, total: None)
    seen = {first}
    for tensor in weights.tensors():
        tensor.mul_(1.001)
        seen.add(model_fingerprint(checkpoint.config, weights, "cpu"))
    assert len(seen) == 1 + len(list(weights.tensors()))
