"""How the engine is to run: frozen, in sections, checked at construction. Values found at start are not in here."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "fp8", "int8", "k8v4", "int4")
ROPE_POLICIES = ("auto", "static", "ladder")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache. ``memory_bytes`` wins over ``fraction`` (of the memory that is free after the weights are loaded).

    Evicted blocks go to ``host_bytes`` of host memory (0: to none) and to files in the folder ``disk_path`` (None: to none), which
    ``disk_bytes`` bounds.
    Pins may hold ``pin_budget_bytes`` or, where that is None, ``pin_budget_fraction`` of the cache.
    ``kv_dtype`` "auto" takes the type that the model computes in.
    """

    block_size: int = 16
    memory_bytes: int | None = None
    fraction: float = 0.4
    host_bytes: int = 0
    disk_path: str | None = None
    disk_bytes: int = 10 * 1024**3
    pin_budget_bytes: int | None = None
    pin_budget_fraction: float = 0.25
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ConfigError(f"KV cache dtype must be auto, {', '.join(KV_DTYPES)}; got {self.kv_dtype!r}")
        if not 1 <= self.block_size <= 1024:
            raise ConfigError(f"block size must be between 1 and 1024 tokens, got {self.block_size}")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError(f"KV cache memory must be positive, got {self.memory_bytes} bytes")
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"KV cache fraction must be above 0 and at most 1, got {self.fraction}")
        if self.host_bytes < 0:
            raise ConfigError(f"host cache must be 0 or more bytes, got {self.host_bytes}")
        if self.disk_path is not None and not self.disk_path.strip():
            raise ConfigError("the disk cache's folder must not be empty; leave it out to keep nothing on the disk")
        if self.disk_bytes <= 0:
            raise ConfigError(f"disk cache size must be positive, got {self.disk_bytes} bytes")
        if self.pin_budget_bytes is not None and self.pin_budget_bytes < 0:
            raise ConfigError(f"pin budget must not be negative, got {self.pin_budget_bytes} bytes")
        if not 0.0 <= self.pin_budget_fraction <= 1.0:
            raise ConfigError(f"pin budget must be a share between 0 and 1, got {self.pin_budget_fraction}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """One step holds at most ``max_num_batched_tokens`` tokens of at most ``max_num_seqs`` requests.

    While any request decodes, ``max_prefill_beside_decodes`` of these tokens at most are prompts': None is 64 on a CPU, where a
    full step of them takes seconds, and no bound on a GPU.
    ``max_queue`` requests at most wait for their first step; a request waits for it on an idle engine too, if only briefly.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_prefill_beside_decodes: int | None = None
    max_queue: int = 1024

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < 1:
            raise ConfigError(f"max_num_batched_tokens must be at least 1, got {self.max_num_batched_tokens}")
        if self.max_prefill_beside_decodes is not None and self.max_prefill_beside_decodes < 1:
            raise ConfigError(f"max_prefill_beside_decodes must be at least 1, got {self.max_prefill_beside_decodes}")
        if self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, got {self.max_queue}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs to start. ``model_path`` is local: a folder in Hugging Face layout or a .gguf file.

    ``dtype`` "auto" takes the checkpoint's, widened to float32 on a CPU. ``max_model_len`` None takes the model's own
    context, shortened to what the cache can hold. ``num_threads`` None leaves torch's choice.
    ``rope_scaling`` is JSON as in a config.json and replaces the checkpoint's. ``rope_policy`` "static" serves one scaling,
    "ladder" each request the least that its length needs, "auto" the ladder where the operator extends the context.
    With a ``window``, requests of more than ``attention_sinks`` (None: 4) + ``window`` tokens read their first and last so many.
    """

    model_path: str
    model_name: str
    dtype: str = "auto"
    device: str = "cpu"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    rope_scaling: str | None = None
    rope_policy: str = "auto"
    attention_sinks: int | None = None
    window: int | None = None
    num_threads: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.attention_backend not in ("auto", "reference", "cpu"):
            raise ConfigError(f"attention backend must be auto, reference or cpu; got {self.attention_backend!r}")
        if self.rope_policy not in ROPE_POLICIES:
            raise ConfigError(f"rope policy must be {', '.join(ROPE_POLICIES)}; got {self.rope_policy!r}")
        if self.window is None and self.attention_sinks is not None:
            raise ConfigError(
                f"attention sinks ({self.attention_sinks}) go with a window of the last tokens: give --window too"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be at least 1 token, got {self.window}")
        if self.attention_sinks is not None and self.attention_sinks < 0:
            raise ConfigError(f"attention sinks must be 0 or more, got {self.attention_sinks}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")
