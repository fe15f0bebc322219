"""Offline inference: the same engine, in this process, without a server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from engine.async_engine import check_request
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.load import load_engine
from engine.model.hub import resolve
from engine.request import FinishReason, Namespace, Request, RequestOutput, SamplingParams
from engine.rope_classes import choose_rope_class
from engine.tokenizer import TextAssembler, load_tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int


class LLM:
    """``LLM("smollm2-135m").generate(["Once upon a time"], SamplingParams(max_tokens=32))``.

    ``model`` is whatever ``octavo serve`` takes. Blocks of earlier calls stay cached for later ones.

    Raises:
        StartupError: the model cannot be served as asked.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        attention_backend: str = "auto",
        max_model_len: int | None = None,
        rope_scaling: str | None = None,
        rope_policy: str = "auto",
        attention_sinks: int | None = None,
        window: int | None = None,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
    ) -> None:
        resolved = resolve(model, progress=lambda done, total: None)
        config = EngineConfig(
            model_path=str(resolved.path),
            model_name=resolved.name,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            max_model_len=max_model_len,
            rope_scaling=rope_scaling,
            rope_policy=rope_policy,
            attention_sinks=attention_sinks,
            window=window,
            cache=cache or CacheConfig(),
            scheduler=scheduler or SchedulerConfig(),
        )
        engine = load_engine(config)
        self.info = engine.info
        self.core = engine.core
        self._engine = engine
        self.tokenizer = load_tokenizer(Path(resolved.path))
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | None = None, *, show_progress: bool = False
    ) -> list[Completion]:
        """Complete all prompts (texts, or token ids) together; answers in their order.

        Raises:
            InvalidRequestError: a prompt is empty, too long or out of the vocabulary; nothing has run then.
        """
        sampling = sampling or SamplingParams()
        prompt_ids = [tuple(self.tokenizer.encode(p)) if isinstance(p, str) else tuple(p) for p in prompts]
        for ids in prompt_ids:
            check_request(self.info, ids, sampling)
        requests = [self._add(ids, sampling) for ids in prompt_ids]
        assemblers = {r.request_id: TextAssembler(self.tokenizer, sampling, r.prompt_token_ids) for r in requests}
        outputs: dict[str, list[RequestOutput]] = {r.request_id: [] for r in requests}
        try:
            with Progress(disable=not show_progress) as bar:
                task = bar.add_task("generating", total=len(requests))
                while self.core.has_work:
                    bar.advance(task, self._step(assemblers, outputs))
        finally:  # after an interrupt, nothing of this call may run on into the next one
            for request in requests:
                self.core.abort(request.request_id)
        return [_fold(outputs[request.request_id]) for request in requests]

    def close(self, flush_seconds: float = 30.0) -> None:
        """With a disk cache: keep what is cached there, for that long at most. The engine is of no use afterwards."""
        self._engine.close(flush_seconds)

    def _add(self, prompt_token_ids: tuple[int, ...], sampling: SamplingParams) -> Request:
        self._num_requests += 1
        request = Request(
            request_id=f"llm-{self._num_requests}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(63),
            namespace=Namespace(
                rope_class=choose_rope_class(
                    self.info.rope_classes, self.info.num_places(len(prompt_token_ids) + sampling.max_tokens)
                )
            ),
            arrival_time=time.monotonic(),
        )
        refusal = self.core.add(request)
        assert refusal is None, "check_request let in what can never fit"
        return request

    def _step(self, assemblers: dict[str, TextAssembler], outputs: dict[str, list[RequestOutput]]) -> int:
        """One engine step; returns how many requests it ended."""
        num_ended = 0
        output = self.core.step()
        if not output.has_run:
            self.core.wait_for_disk(1.0)
        for event in output.events:
            text = assemblers[event.request_id].push(event)
            outputs[event.request_id].append(text)
            if text.finish_reason is not None:
                num_ended += 1
                self.core.abort(event.request_id)  # a stop string is not known to the engine; else this does nothing
        return num_ended


def _fold(outputs: list[RequestOutput]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=last.finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )
