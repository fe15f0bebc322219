"""Fakes that stand where a real part would, so that tests of one layer need no other. They patch nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.control import Command, Result
from engine.errors import ContextLengthError, EngineDeadError, InvalidRequestError
from engine.queue_bound import Place, QueueBound
from engine.request import PLAIN_TERMS, FinishReason, Namespace, RequestOutput, RequestTerms, SamplingParams
from engine.rope_classes import choose_rope_class
from engine.stats import EngineInfo, PromptSources

VOCAB_SIZE = 257
BOS = 256


class FakeStatus(Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    STOPPED = "stopped"


class ByteTokenizer:
    """One token for each UTF-8 byte, after a BOS."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_id for token_id in ids if token_id != BOS).decode(errors="replace")


def fake_info(**changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "model_name": "fake-model",
        "architecture": "FakeForCausalLM",
        "num_parameters": 1_000_000,
        "weight_bytes": 4_000_000,
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "attention_backend": "reference",
        "max_model_len": 512,
        "vocab_size": VOCAB_SIZE,
        "block_size": 16,
        "num_blocks": 40,
        "block_bytes": 32_768,
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "eos_token_ids": (0,),
        "rope_classes": (("default", 1 << 20),),
        "notes": ("a note with the number 7",),
    }
    return EngineInfo(**(values | changes))  # type: ignore[arg-type]


def echo_pieces(prompt: str) -> list[str]:
    """The prompt's characters backwards, in pieces; the second is held back, as half a character would be."""
    pieces = list(reversed(prompt))
    return [*pieces[:1], "", *pieces[1:]]


@dataclass
class FakeEngine:
    """Plays scripted outputs, one every ``delay`` seconds, and remembers what became of each request.

    ``pieces`` turns a prompt into the texts of its tokens; ``failure`` is raised after ``fail_after`` of them.
    ``start_failure`` is raised by ``start``, after ``start_seconds``. ``flush_takes`` seconds are spent at a stop, if it lets them.
    """

    pieces: Callable[[str], list[str]] = echo_pieces
    delay: float = 0.0
    failure: Exception | None = None
    fail_after: int = 0
    num_cached_tokens: int = 0
    start_seconds: float = 0.0
    start_failure: Exception | None = None
    flush_takes: float = 0.0
    status: FakeStatus = FakeStatus.READY
    info: EngineInfo | None = field(default_factory=fake_info)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    num_restarts: int = 0
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    terms: list[RequestTerms] = field(default_factory=list)
    queue: QueueBound = field(default_factory=lambda: QueueBound(1024))
    sources: PromptSources | None = None
    commands: list[Command] = field(default_factory=list)
    answers: list[Result | Exception] = field(default_factory=list)
    num_running: int = 0
    num_finished: int = 0
    num_aborted: int = 0

    @property
    def salts(self) -> list[str]:
        return [terms.salt for terms in self.terms]

    @property
    def turns(self) -> list[tuple[str, int]]:
        return [(terms.tenant, terms.priority) for terms in self.terms]

    async def start(self) -> None:
        self.status = FakeStatus.STARTING
        await asyncio.sleep(self.start_seconds)
        if self.start_failure is not None:
            raise self.start_failure
        self.info = self.info or fake_info()
        self.status = FakeStatus.READY

    async def stop(self, flush_seconds: float = 0.0) -> None:
        await asyncio.sleep(min(self.flush_takes, flush_seconds))
        self.status = FakeStatus.STOPPED

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        assert self.info is not None
        if self.status is not FakeStatus.READY:
            raise EngineDeadError("the fake engine is not ready")
        if not prompt_token_ids:
            raise InvalidRequestError("prompt has no tokens", param="prompt")
        for ids, param in ((prompt_token_ids, "prompt"), (sampling.stop_token_ids, "stop_token_ids")):
            if max(ids, default=0) >= VOCAB_SIZE:
                raise InvalidRequestError(f"{param} holds the token id {max(ids)}, out of the vocabulary", param=param)
        wanted = len(prompt_token_ids) + sampling.max_tokens
        if wanted > self.info.max_model_len:
            raise ContextLengthError(
                f"prompt and max_tokens need {wanted} tokens, the context has {self.info.max_model_len}", param="prompt"
            )

    def namespace(self, salt: str, num_tokens: int) -> Namespace:
        assert self.info is not None
        return Namespace(salt, choose_rope_class(self.info.rope_classes, num_tokens))

    def num_public_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        return 2

    async def control(self, command: Command) -> Result:
        """The next of ``answers``."""
        self.commands.append(command)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reserve(self, num_requests: int) -> tuple[Place, ...]:
        return self.queue.reserve(num_requests)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        terms: RequestTerms = PLAIN_TERMS,
        place: Place | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append((list(prompt_token_ids), sampling))
        self.terms.append(terms)
        pieces = self.pieces(self.tokenizer.decode(prompt_token_ids))
        finish = FinishReason.STOP if len(pieces) <= sampling.max_tokens else FinishReason.LENGTH
        pieces = pieces[: sampling.max_tokens]
        self.num_running += 1
        is_done = False
        try:
            for count, text in enumerate(pieces, start=1):
                await asyncio.sleep(self.delay)
                if self.failure is not None and count > self.fail_after:
                    raise self.failure
                is_done = count == len(pieces)
                if place is not None:
                    place.leave()
                yield RequestOutput(
                    text=text,
                    token_ids=(count,),
                    num_prompt_tokens=len(prompt_token_ids),
                    num_cached_tokens=self.num_cached_tokens,
                    num_output_tokens=count,
                    finish_reason=finish if is_done else None,
                    sources=self.sources if is_done else None,
                    rope_class="default" if is_done else None,
                )
        finally:
            self.num_running -= 1
            self.num_finished += is_done
            self.num_aborted += not is_done
