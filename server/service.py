"""The parts that the routes work with, and the one answer to "can we serve now?"."""

from __future__ import annotations

from dataclasses import dataclass

from engine.stats import EngineInfo
from server.auth import Keyring
from server.drain import Drain
from server.engine_client import EngineClient
from server.errors import UnavailableError
from server.metrics import Metrics
from server.settings import Settings

_STATES = {"STARTING": "starting", "READY": "ready", "DEAD": "restarting", "STOPPED": "stopped"}


@dataclass(frozen=True, slots=True)
class Service:
    """``created`` is the Unix time at which this server began, in seconds."""

    engine: EngineClient
    metrics: Metrics
    settings: Settings
    drain: Drain
    keyring: Keyring
    created: int

    @property
    def state(self) -> str:
        """ready, starting, restarting, stopped or draining."""
        if self.drain.is_draining:
            return "draining"
        return _STATES[self.engine.status.name]

    def require_ready(self) -> None:
        """Raise UnavailableError unless a request can be served now."""
        if self.state != "ready":
            raise UnavailableError(f"the server is {self.state}; try again shortly")

    def require_info(self) -> EngineInfo:
        """What the engine settled on. Raises UnavailableError until it was ready once."""
        info = self.engine.info
        if info is None:
            raise UnavailableError(f"the server is {self.state}; try again shortly")
        return info

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.require_info().model_name
