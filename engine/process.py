"""The engine process: a loop around EngineCore, messages in and out. Started as ``python -m engine.process`` by AsyncEngine."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from engine import errors
from engine.config import EngineConfig
from engine.control import CacheControl
from engine.core import EngineCore
from engine.messages import (
    Abort,
    Add,
    Control,
    ControlReply,
    Failed,
    FromEngine,
    Outputs,
    Progress,
    Ready,
    Stop,
    ToEngine,
    decoder_to_engine,
    encode,
)
from engine.request import Request, TokenEvent

_DISK_POLL_SECONDS = 0.002  # how soon a request goes on that waited for the disk


@dataclass(frozen=True, slots=True)
class ProcessArguments:
    """What the parent hands over, as JSON in the one command-line argument."""

    config: EngineConfig
    inbox: str
    outbox: str


class Mailbox:
    """The two zmq sockets of the engine's side."""

    def __init__(self, inbox: str, outbox: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = _connect(context, zmq.PULL, inbox)
        self._outbox = _connect(context, zmq.PUSH, outbox)
        self._decoder = decoder_to_engine()

    def send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))

    def receive(self, wait_seconds: float | None) -> list[ToEngine]:
        """All messages that have come. If none has, wait for one: for ``wait_seconds``, or with None for as long as it takes."""
        messages: list[ToEngine] = []
        timeout = None if wait_seconds is None else math.ceil(1000 * wait_seconds)
        while self._inbox.poll(timeout):
            messages.append(self._decoder.decode(self._inbox.recv()))
            timeout = 0
        return messages


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def run_loop(core: EngineCore, control: CacheControl, mailbox: Mailbox) -> Stop:
    """Step while there is work. Without, or with none but for the disk, sleep on the inbox until a message, the end of a pin or
    the next look at the disk. Returns when told to stop."""
    wait_seconds: float | None = None
    while True:
        messages = mailbox.receive(wait_seconds)
        for message in messages:
            if isinstance(message, Stop):
                return message
        has_expired = control.expire()
        ended = _apply(core, messages)
        replies = [ControlReply(m.control_id, control.apply(m.command)) for m in messages if isinstance(m, Control)]
        output = core.step() if core.has_work else None
        if output is not None and output.has_run:
            mailbox.send(Outputs((*ended, *output.events), output.admissions, output.stats))
        else:
            was_busy = core.is_disk_busy
            core.poll_disk()
            if messages or has_expired or (was_busy and not core.is_disk_busy):
                mailbox.send(Outputs(tuple(ended), (), core.idle_stats()))
        for reply in replies:  # behind the counts that they changed, so that nobody sees the old ones after an answer
            mailbox.send(reply)
        wait_seconds = _wait_seconds(core, control, has_run=output is not None and output.has_run)


def _wait_seconds(core: EngineCore, control: CacheControl, *, has_run: bool) -> float | None:
    """How long the inbox may be waited for; None is as long as it takes."""
    if has_run:
        return 0.0
    if core.has_work or core.is_disk_busy:
        return _DISK_POLL_SECONDS
    return control.seconds_to_expiry


def _apply(core: EngineCore, messages: list[ToEngine]) -> list[TokenEvent]:
    """Take requests in and out of the engine; returns the last words of those that were refused or aborted."""
    ended: list[TokenEvent | None] = []
    for message in messages:
        if isinstance(message, Add):
            ended.append(core.add(_request(message)))
        elif isinstance(message, Abort):
            ended.append(core.abort(message.request_id))
    return [event for event in ended if event is not None]


def _request(message: Add) -> Request:
    return Request(
        request_id=message.request_id,
        prompt_token_ids=message.prompt_token_ids,
        sampling=message.sampling,
        seed=message.seed,
        namespace=message.namespace,
        arrival_time=message.arrival_time,
        num_public_tokens=message.num_public_tokens,
        tenant=message.tenant,
        priority=message.priority,
        rope_limits=message.rope_limits,
    )


def _exit_with_parent(folder: Path) -> None:
    """The parent holds our standard input open; when it closes, the parent is gone and nobody reads our answers.

    A parent that was killed could not remove the sockets' folder; what is left of it is removed here.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):  # not through sys.stdin, whose lock a dying interpreter wants
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> int:
    """Load the engine, say Ready or Failed, then loop. Signals are the parent's business: it sends Stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    arguments = msgspec.json.decode(sys.argv[1], type=ProcessArguments)
    mailbox = Mailbox(arguments.inbox, arguments.outbox)
    _exit_with_parent(Path(arguments.inbox.removeprefix("ipc://")).parent)
    mailbox.send(Progress("starting the engine", None))
    try:
        from engine.load import load_engine  # torch takes seconds to import: say first that we are alive

        engine = load_engine(arguments.config, lambda stage, share: mailbox.send(Progress(stage, share)))
    except errors.StartupError as error:
        mailbox.send(Failed(type(error).__name__, str(error)))
        return 2
    mailbox.send(Ready(engine.info))
    mailbox.send(Outputs((), (), engine.core.idle_stats()))
    stop = run_loop(engine.core, CacheControl(engine.core.scheduler.manager), mailbox)
    engine.close(stop.flush_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
