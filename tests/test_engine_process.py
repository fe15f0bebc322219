"""AsyncEngine and its process: one life from start to stop, failures that stay small, deaths and returns. Over a tiny model."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from engine.async_engine import AsyncEngine, EngineStatus
from engine.config import CacheConfig, EngineConfig
from engine.control import (
    CacheView,
    Dropped,
    NotResident,
    Pinned,
    PinPrefix,
    ResetCache,
    ShowCache,
    Unpin,
    Unpinned,
)
from engine.errors import (
    ContextLengthError,
    ControlRefusedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    StartupError,
    UnsupportedModelError,
)
from engine.request import FinishReason, Namespace, RequestOutput, SamplingParams
from engine.stats import Admission, EngineInfo, PromptSources, StepStats
from engine.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from tests.tiny_folder import ONE_THREAD, make_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=2.0, max_tokens=3000, ignore_eos=True)
UNREADABLE = 77


class Recorder:
    """An EngineListener that remembers."""

    def __init__(self) -> None:
        self.step: StepStats | None = None
        self.admissions: list[Admission] = []
        self.finished: list[FinishReason] = []
        self.num_first_tokens = self.num_later_tokens = self.num_restarts = 0
        self.infos: list[EngineInfo] = []

    def on_step(self, stats: StepStats) -> None:
        self.step = stats

    def on_admission(self, admission: Admission) -> None:
        self.admissions.append(admission)

    def on_token(self, seconds: float, *, first: bool) -> None:
        assert seconds >= 0
        self.num_first_tokens += first
        self.num_later_tokens += not first

    def on_finish(self, reason: FinishReason, seconds: float) -> None:
        self.finished.append(reason)

    def on_ready(self, info: EngineInfo) -> None:
        self.infos.append(info)

    def on_restart(self) -> None:
        self.num_restarts += 1
        self.step = None

    @property
    def is_idle(self) -> bool:
        return self.step is not None and self.step.num_running == self.step.cache.num_referenced_blocks == 0


class FailingDetokenizer:
    def push(self, token_id: int) -> str:
        raise ValueError("no text for this")

    def finish(self) -> str:
        return ""


class PickyTokenizer(Tokenizer):
    """Another tokenizer, but what continues UNREADABLE has no text."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.vocab_size = inner.vocab_size

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._inner.encode(text, add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return self._inner.decode(token_ids, skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        return self._inner.is_special(token_id)

    def detokenizer(self, prompt_token_ids: Any = ()) -> IncrementalDetokenizer:
        return FailingDetokenizer() if prompt_token_ids[0] == UNREADABLE else self._inner.detokenizer(prompt_token_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("process") / "tiny"
    make_folder(path)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        yield path


def make_engine(folder: Path, listener: Recorder, **config: Any) -> AsyncEngine:
    cache = CacheConfig(block_size=4, memory_bytes=8 << 20)
    engine_config = EngineConfig(model_path=str(folder), model_name="tiny", cache=cache, **config)
    return AsyncEngine(engine_config, PickyTokenizer(load_tokenizer(folder)), listener)


@pytest.fixture(scope="module")
def listener() -> Recorder:
    return Recorder()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path, listener: Recorder) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(folder, listener)
    assert engine.status is EngineStatus.STARTING
    await engine.start()
    yield engine
    await engine.stop()


async def until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(engine: AsyncEngine, prompt: list[int], sampling: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, sampling)]


async def test_outputs_and_what_the_listener_hears(engine: AsyncEngine, listener: Recorder) -> None:
    await until(lambda: listener.is_idle)  # said before the first request, so that gauges are true from the start
    outputs = await collect(engine, [*range(5, 14)], GREEDY)
    assert [output.num_output_tokens for output in outputs] == [*range(1, 21)]
    assert [output.finish_reason for output in outputs] == [None] * 19 + [FinishReason.LENGTH]
    assert {(output.num_prompt_tokens, output.num_cached_tokens) for output in outputs} == {(9, 0)}
    again = await collect(engine, [*range(5, 14)], GREEDY)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]
    assert again[-1].num_cached_tokens == 8
    assert [(a.num_prompt_tokens, a.num_cached_tokens) for a in listener.admissions] == [(9, 0), (9, 8)]
    assert [output.sources for output in outputs[:-1]] == [None] * 19
    assert outputs[-1].sources == listener.admissions[0].sources == PromptSources(unseen=9)
    assert again[-1].sources == PromptSources(device=8, unseen=1)
    assert listener.infos == [engine.info]
    assert (listener.num_first_tokens, listener.num_later_tokens) == (2, 38)
    assert listener.finished == [FinishReason.LENGTH] * 2
    await until(lambda: listener.is_idle)


async def test_refusals_come_before_anything_is_sent(engine: AsyncEngine, listener: Recorder) -> None:
    before = len(listener.admissions), len(listener.finished)
    for prompt, sampling, kind in (
        ([], GREEDY, InvalidRequestError),
        ([300], GREEDY, InvalidRequestError),
        ([-1], GREEDY, InvalidRequestError),
        ([5], SamplingParams(stop_token_ids=(300,)), InvalidRequestError),
        ([5], SamplingParams(max_tokens=8192), ContextLengthError),
    ):
        with pytest.raises(kind):
            await collect(engine, prompt, sampling)
    await collect(engine, [5], GREEDY)
    assert (len(listener.admissions), len(listener.finished)) == (before[0] + 1, before[1] + 1)


async def test_closing_a_generator_frees_its_blocks_and_leaves_its_neighbour_alone(
    engine: AsyncEngine, listener: Recorder
) -> None:
    expected = [output.token_ids for output in await collect(engine, [8, 9], GREEDY)]
    leaving = engine.generate([6], LONG)
    await anext(leaving)
    neighbour = asyncio.create_task(collect(engine, [8, 9], GREEDY))
    await anext(leaving)
    await leaving.aclose()
    assert listener.finished[-1] is FinishReason.ABORT
    assert [output.token_ids for output in await neighbour] == expected
    await until(lambda: listener.is_idle, 2)


async def test_a_pin_holds_ends_by_itself_while_idle_and_the_listener_hears_of_it(
    engine: AsyncEngine, listener: Recorder
) -> None:
    prompt = (*range(40, 52),)
    assert await engine.control(PinPrefix("p", Namespace(), prompt, 0, 1.0)) == NotResident(0)
    await collect(engine, [*prompt], SamplingParams(temperature=0.0, max_tokens=1))
    pinned = await engine.control(PinPrefix("p", Namespace(), prompt, 0, 1.0))
    assert isinstance(pinned, Pinned)
    assert (pinned.pin.num_tokens, pinned.num_pinned_blocks) == (12, 3)
    await until(lambda: listener.step.cache.num_pinned_blocks == 3)
    reset = await engine.control(ResetCache())
    assert isinstance(reset, Dropped)
    assert (reset.num_referenced_blocks, reset.num_pinned_blocks) == (0, 3)
    await until(lambda: listener.step.cache.num_pinned_blocks == 0, 5)  # nothing was sent to it meanwhile
    assert await engine.control(Unpin("p")) == Unpinned(None)
    too_large = (*range(40),) * 1000
    with pytest.raises(ControlRefusedError, match="pin budget"):
        await engine.control(PinPrefix("q", Namespace(), too_large, 0, 1.0))


async def test_commands_are_answered_while_requests_run(engine: AsyncEngine, listener: Recorder) -> None:
    stream = asyncio.create_task(collect(engine, [8, 9], LONG))
    await until(lambda: listener.step.num_running == 1)
    views = await asyncio.gather(*(engine.control(ShowCache(5, 5)) for _ in range(20)))
    for view in views:
        assert isinstance(view, CacheView)
        assert view.num_free_blocks + view.num_cached_blocks + view.num_referenced_blocks == view.num_blocks
        assert view.num_referenced_blocks > 0
    stream.cancel()
    await until(lambda: listener.is_idle)


async def test_a_request_without_a_text_fails_alone(
    engine: AsyncEngine, listener: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="octavo.engine")
    neighbour = asyncio.create_task(collect(engine, [8, 9], LONG))
    with pytest.raises(RequestFailedError):
        await asyncio.wait_for(collect(engine, [UNREADABLE, 9], LONG), 5)
    assert listener.finished[-1] is FinishReason.ERROR
    await until(lambda: listener.step.num_running == 1, 2)
    neighbour.cancel()
    assert len(await collect(engine, [8, 9], GREEDY)) == 20
    await until(lambda: listener.is_idle)


async def test_an_engine_that_cannot_come_back_is_tried_again_until_it_can(
    engine: AsyncEngine, listener: Recorder, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="octavo.engine")
    expected = [output.token_ids for output in await collect(engine, [8, 9], GREEDY)]
    stream = asyncio.create_task(collect(engine, [8, 9], LONG))
    await until(lambda: listener.step.num_running == 1)
    hidden = folder.rename(folder.parent / "hidden")
    os.kill(engine.engine_pid, signal.SIGKILL)  # type: ignore[arg-type]
    asked = asyncio.create_task(engine.control(ShowCache(5, 5)))  # sent to the dead: nobody will answer
    for waiting in (stream, asked):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waiting, 5)
    assert engine.status is EngineStatus.DEAD
    with pytest.raises(EngineDeadError):
        engine.check([5], GREEDY)
    with pytest.raises(EngineDeadError):
        await engine.control(ShowCache(5, 5))
    await until(lambda: engine.num_restarts == 2, 30)
    hidden.rename(folder)
    await until(lambda: engine.status is EngineStatus.READY, 40)
    assert listener.num_restarts == 1
    assert listener.infos == [engine.info] * 2
    assert [output.token_ids for output in await collect(engine, [8, 9], GREEDY)] == expected
    await until(lambda: listener.is_idle)


async def test_no_folder_lies_about_while_the_engine_runs(engine: AsyncEngine) -> None:
    """Nobody could remove it if server and engine were both killed."""
    arguments = msgspec.json.decode(psutil.Process(engine.engine_pid).cmdline()[-1])
    assert not Path(arguments["inbox"].removeprefix("ipc://")).parent.exists()
    assert await collect(engine, [8, 9], GREEDY)


async def test_stop_ends_streams_and_process_and_may_be_called_again(engine: AsyncEngine, listener: Recorder) -> None:
    """The module's last test: the engine is gone afterwards."""
    process = psutil.Process(engine.engine_pid)
    stream = asyncio.create_task(collect(engine, [8, 9], LONG))
    await until(lambda: listener.step.num_running == 1)
    await engine.stop()
    with pytest.raises(EngineDeadError, match="shutting down"):
        await stream
    assert not process.is_running()
    assert engine.status is EngineStatus.STOPPED
    with pytest.raises(EngineDeadError):
        engine.check([5], GREEDY)
    await engine.stop()


async def test_a_start_that_fails_raises_the_engines_own_error(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = make_engine(tmp_path, Recorder())
    with pytest.raises(UnsupportedModelError, match="Mamba"):
        await engine.start()
    assert engine.status is EngineStatus.STOPPED
    assert engine.engine_pid is None or not psutil.pid_exists(engine.engine_pid)


async def test_a_process_that_dies_while_it_starts_is_a_startup_error_with_its_status(folder: Path) -> None:
    engine = make_engine(folder, Recorder())
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.engine_pid is not None)
    os.kill(engine.engine_pid, signal.SIGKILL)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="status -9"):
        await asyncio.wait_for(starting, 10)
    assert engine.status is EngineStatus.STOPPED
