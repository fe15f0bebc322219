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


def run_loop(core: EngineCore, control: CacheControl, mailbox: Mailbox) -> None:
    """Step while there is work; without, sleep on the inbox until a message or the end of a pin. Returns when told to stop."""
    while True:
        messages = mailbox.receive(0 if core.has_work else control.seconds_to_expiry)
        if any(isinstance(message, Stop) for message in messages):
            return
        has_expired = control.expire()
        ended = _apply(core, messages)
        replies = [ControlReply(m.control_id, control.apply(m.command)) for m in messages if isinstance(m, Control)]
        if core.has_work:
            output = core.step()
            mailbox.send(Outputs((*ended, *output.events), output.admissions, output.stats))
        elif messages or has_expired:
            mailbox.send(Outputs(tuple(ended), (), core.idle_stats()))
        for reply in replies:  # behind the counts that they changed, so that nobody sees the old ones after an answer
            mailbox.send(reply)


def _apply(core: EngineCore, messages: list[ToEngine]) -> list[TokenEvent]:
    """Take requests in and out of the engine; returns the last words of those that were aborted."""
    ended: list[TokenEvent] = []
    for message in messages:
        if isinstance(message, Add):
            core.add(
                Request(
                    request_id=message.request_id,
                    prompt_token_ids=message.prompt_token_ids,
                    sampling=message.sampling,
                    seed=message.seed,
                    namespace=message.namespace,
                    arrival_time=message.arrival_time,
                    num_public_tokens=message.num_public_tokens,
                )
            )
        elif isinstance(message, Abort):
            event = core.abort(message.request_id)
            if event is not None:
                ended.append(event)
    return ended


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
    run_loop(engine.core, CacheControl(engine.core.scheduler.manager), mailbox)
    return 0


if __name__ == "__main__":
    sys.exit(main())
