"""What the operator may set. Checked at construction; a bad value is a ConfigError of one line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import ConfigError
from server.auth import DEFAULT_NAME, ApiKey, check_keys

DEFAULT_MODEL = "smollm2-135m"
MAX_BODY_BYTES = 10 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``served_model_name`` None takes the model's own name. ``port`` 0 takes any free one. ``shutdown_timeout`` is in seconds.

    ``api_keys`` are named keys beside ``api_key``; with neither, callers need no key. ``public_prefixes`` are texts whose
    blocks all callers share.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    rope_scaling: str | None = None
    rope_policy: str = "auto"
    attention_sinks: int | None = None
    window: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_keys: tuple[ApiKey, ...] = ()
    admin_key: str | None = field(default=None, repr=False)
    public_prefixes: tuple[str, ...] = field(default=(), repr=False)
    shutdown_timeout: float = 30.0
    max_body_bytes: int = MAX_BODY_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if not (math.isfinite(self.shutdown_timeout) and self.shutdown_timeout >= 0):
            raise ConfigError(f"shutdown timeout must be 0 or more seconds, got {self.shutdown_timeout}")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key must not be empty; leave it out to serve without a key")
        check_keys(self.all_keys, self.admin_key)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("the served model name must not be empty")
        self.engine_config(model_path="", model_name="")

    @property
    def all_keys(self) -> tuple[ApiKey, ...]:
        return self.api_keys if self.api_key is None else (ApiKey(DEFAULT_NAME, self.api_key), *self.api_keys)

    def engine_config(self, *, model_path: str, model_name: str) -> EngineConfig:
        return EngineConfig(
            model_path=model_path,
            model_name=model_name,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            rope_scaling=self.rope_scaling,
            rope_policy=self.rope_policy,
            attention_sinks=self.attention_sinks,
            window=self.window,
            cache=self.cache,
            scheduler=self.scheduler,
        )
