"""What the API process and the engine process say to each other, as msgpack. Only Add, Abort, Control and Stop go to the engine."""

from __future__ import annotations

import msgspec

from engine.control import Command, Result
from engine.request import Namespace, SamplingParams, TokenEvent
from engine.stats import Admission, EngineInfo, StepStats


class Add(msgspec.Struct, frozen=True, tag="add"):
    """``arrival_time`` is read from the machine's monotonic clock, which all its processes share.

    The first ``num_public_tokens`` of the prompt are an operator's public prefix: their full blocks belong to no salt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    namespace: Namespace
    arrival_time: float
    num_public_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    rope_limits: tuple[int, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Answered by exactly one ControlReply of the same id, between two steps."""

    control_id: int
    command: Command


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


class ControlReply(msgspec.Struct, frozen=True, tag="control_reply"):
    control_id: int
    result: Result


ToEngine = Add | Abort | Control | Stop
FromEngine = Progress | Ready | Failed | Outputs | ControlReply

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decoder_to_engine() -> msgspec.msgpack.Decoder[ToEngine]:
    return msgspec.msgpack.Decoder(ToEngine)


def decoder_from_engine() -> msgspec.msgpack.Decoder[FromEngine]:
    return msgspec.msgpack.Decoder(FromEngine)
