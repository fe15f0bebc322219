"""What the API process and the engine process say to each other, as msgpack. Only Add, Abort and Stop go to the engine."""

from __future__ import annotations

import msgspec

from engine.request import Namespace, SamplingParams, TokenEvent
from engine.stats import Admission, EngineInfo, StepStats


class Add(msgspec.Struct, frozen=True, tag="add"):
    """``arrival_time`` is read from the machine's monotonic clock, which all its processes share."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    namespace: Namespace
    arrival_time: float


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process once the message is read. Before that, keep what is cached on the disk, for ``flush_seconds`` at most."""

    flush_seconds: float = 0.0


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    stage: str
    share: float | None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start. ``error`` names the class in engine.errors."""

    error: str
    message: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """After a step, or after aborts changed the state without one."""

    events: tuple[TokenEvent, ...]
    admissions: tuple[Admission, ...]
    stats: StepStats


ToEngine = Add | Abort | Stop
FromEngine = Progress | Ready | Failed | Outputs

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decoder_to_engine() -> msgspec.msgpack.Decoder[ToEngine]:
    return msgspec.msgpack.Decoder(ToEngine)


def decoder_from_engine() -> msgspec.msgpack.Decoder[FromEngine]:
    return msgspec.msgpack.Decoder(FromEngine)
