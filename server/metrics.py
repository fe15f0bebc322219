"""Every Prometheus metric of Octavo, fed by the engine's plain counts. The only writer of its registry.

Gauges are read from the engine's last word at scrape time, so they cost nothing per step and stay true while idle.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.request import FinishReason
from engine.stats import Admission, CacheStats, EngineInfo, StepStats, TokenSource
from server import __version__
from server.buckets import (
    AGE_BUCKETS,
    ITL_BUCKETS,
    QUEUE_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKEN_BUCKETS,
    TTFT_BUCKETS,
)
from server.instruments import CountedHistogram, RateWindow, TenantView, WithoutCreated

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """An EngineListener. All methods run on one event loop; ``clock`` is in seconds and never goes back."""

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rope_class_names: tuple[str, ...] = ()
        self._registry = registry
        self._step: StepStats | None = None
        self._prompt_rate = RateWindow(10.0, clock)
        self._generation_rate = RateWindow(10.0, clock)
        self._add_cache_gauges()
        self._add_load_gauges()
        self._add_counters()
        self._add_histograms()
        self._add_infos()

    def render(self, *, for_operator: bool) -> bytes:
        """The text exposition, format 0.0.4 (CONTENT_TYPE). Only the operator sees what is cached in other namespaces."""
        families = WithoutCreated(self._registry)
        return generate_latest(families if for_operator else TenantView(families))

    def on_ready(self, info: EngineInfo) -> None:
        """The engine is up: say what it settled on, and that its cache is empty unless a step has said more."""
        labels = {name: str(getattr(info, name)) for name in _CACHE_LABELS}
        self._cache_info.clear()
        self._cache_info.labels(**labels).set(1)
        self._rope_class_names = tuple(name for name, _ in info.rope_classes)
        for name in self._rope_class_names:
            self._rope_classes.labels(rope_class=name)
        if self._step is None:
            self._step = _idle_step(info)

    def on_step(self, stats: StepStats) -> None:
        self._step = stats
        self._prompt_rate.add(stats.num_prompt_tokens)
        self._generation_rate.add(stats.num_sampled_tokens)
        self._preemptions.inc(stats.num_preemptions)
        self._recomputed.labels(reason="preemption").inc(stats.num_recomputed_tokens)
        self._recomputed.labels(reason="rope_class").inc(stats.num_regrown_tokens)
        self._evicted.inc(stats.num_evicted_blocks)
        self._duplicate_bytes.inc(stats.num_merged_blocks * stats.cache.block_bytes)
        self._reuse_gaps.observe(stats.reuse_gaps)
        self._evict_idles.observe(stats.evict_idles)
        if stats.num_scheduled_tokens:
            self._step_duration.observe(stats.step_seconds)
            self._step_tokens.observe(stats.num_scheduled_tokens)

    def on_admission(self, admission: Admission) -> None:
        self._prompt_tokens.inc(admission.num_prompt_tokens)
        self._query_tokens.inc(admission.num_prompt_tokens)
        self._hit_tokens.inc(admission.num_cached_tokens)
        self._queue.observe(admission.queue_seconds)
        self._rope_classes.labels(rope_class=self._rope_class_names[admission.rope_class]).inc()
        for source in TokenSource:
            self._sources.labels(source=source.value).inc(admission.sources.count(source))

    def on_token(self, seconds: float, *, first: bool) -> None:
        self._generation_tokens.inc()
        (self._ttft if first else self._itl).observe(seconds)

    def on_finish(self, reason: FinishReason, seconds: float) -> None:
        self._requests.labels(finish_reason=reason.value).inc()
        self._duration.observe(seconds)

    def on_restart(self) -> None:
        self._step = None

    def _gauge(self, name: str, text: str, read: Callable[[StepStats], float]) -> None:
        gauge = Gauge(name, text, registry=self._registry)
        gauge.set_function(lambda: read(self._step) if self._step else 0.0)

    def _state_gauge(self, name: str, text: str, scale: Callable[[CacheStats], int]) -> None:
        """One series for each state that a block can be in; they sum to the whole pool."""
        gauge = Gauge(name, text, ["state"], registry=self._registry)
        for state, count in _BLOCK_STATES.items():
            gauge.labels(state=state).set_function(partial(self._read_state, count, scale))

    def _read_state(self, count: Callable[[CacheStats], int], scale: Callable[[CacheStats], int]) -> float:
        return count(self._step.cache) * scale(self._step.cache) if self._step else 0.0

    def _add_cache_gauges(self) -> None:
        gauge = self._gauge
        gauge(
            "octavo_kv_cache_bytes_per_token",
            "Bytes that the KV format costs for each token: block bytes over block size.",
            lambda step: step.cache.bytes_per_token,
        )
        gauge(
            "octavo_kv_cache_effective_bytes_per_token",
            "Bytes of blocks referenced by running requests over their context tokens; 0 while nothing runs.",
            lambda step: step.cache.effective_bytes_per_token,
        )
        gauge(
            "octavo_kv_cache_capacity_bytes",
            "Bytes of the whole block pool.",
            lambda step: step.cache.num_blocks * step.cache.block_bytes,
        )
        gauge(
            "octavo_kv_cache_usage_ratio",
            "Share of the blocks that running requests hold, 0 to 1; cached blocks can be taken and do not count.",
            lambda step: step.cache.usage,
        )
        gauge(
            "octavo_kv_cache_efficiency_ratio",
            "Bytes per token of the format over effective bytes per token; above 1 when sharing outweighs waste, 1 while idle.",
            lambda step: step.cache.efficiency,
        )
        gauge(
            "octavo_kv_cache_sharing_factor",
            "Block references of running requests over the distinct blocks that they hold; 1 while idle.",
            lambda step: step.cache.sharing_factor,
        )
        gauge(
            "octavo_kv_cache_internal_waste_ratio",
            "Share of the slots of referenced blocks that hold no token; 0 while idle.",
            lambda step: step.cache.internal_waste,
        )
        gauge(
            "octavo_kv_cache_pinned_bytes",
            "Bytes of blocks that pins protect from eviction, in use or not.",
            lambda step: step.cache.num_pinned_blocks * step.cache.block_bytes,
        )
        tiers = Gauge(
            "octavo_kv_cache_tier_bytes",
            "Bytes of K and V that each tier holds: on the device in blocks in use or cached, below it in files or host memory.",
            ["tier"],
            registry=self._registry,
        )
        for tier, read in _TIERS.items():
            tiers.labels(tier=tier).set_function(partial(self._read_state, read, lambda _: 1))
        self._state_gauge(
            "octavo_kv_cache_blocks",
            "KV cache blocks: referenced by running requests, cached for reuse, or free.",
            lambda _: 1,
        )
        self._state_gauge(
            "octavo_kv_cache_bytes",
            "KV cache bytes: referenced by running requests, cached for reuse, or free.",
            lambda cache: cache.block_bytes,
        )

    def _add_load_gauges(self) -> None:
        self._gauge(
            "octavo_requests_running", "Requests that hold blocks and take part in steps.", lambda step: step.num_running
        )
        self._gauge("octavo_requests_waiting", "Requests that wait for admission or resumption.", lambda step: step.num_waiting)
        throughput = Gauge(
            "octavo_throughput_tokens_per_second",
            "Mean over the last 10 seconds: prompt tokens covered (computed or found in the cache), or tokens generated.",
            ["kind"],
            registry=self._registry,
        )
        throughput.labels(kind="prompt").set_function(self._prompt_rate.rate)
        throughput.labels(kind="generation").set_function(self._generation_rate.rate)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def _add_counters(self) -> None:
        counter = self._counter
        self._query_tokens = counter(
            "octavo_prefix_cache_query_tokens_total", "Prompt tokens looked up in the prefix cache, once per admitted request."
        )
        self._hit_tokens = counter(
            "octavo_prefix_cache_hit_tokens_total", "Prompt tokens served from the prefix cache, once per admitted request."
        )
        self._prompt_tokens = counter("octavo_prompt_tokens_total", "Prompt tokens of admitted requests, cached ones included.")
        self._generation_tokens = counter("octavo_generation_tokens_total", "Tokens generated and given to their request.")
        self._preemptions = counter("octavo_preemptions_total", "Times that a running request gave its blocks back to wait.")
        self._recomputed = Counter(
            "octavo_recomputed_tokens_total",
            "Tokens computed again: after a preemption, or in the next RoPE class of a request that outgrew its own.",
            ["reason"],
            registry=self._registry,
        )
        for again in ("preemption", "rope_class"):
            self._recomputed.labels(reason=again)
        self._evicted = counter("octavo_evicted_blocks_total", "Cached blocks forgotten to make room.")
        self._requests = Counter(
            "octavo_requests_total", "Requests that ended, by the reason.", ["finish_reason"], registry=self._registry
        )
        for reason in FinishReason:
            self._requests.labels(finish_reason=reason.value)
        self._duplicate_bytes = counter(
            "octavo_kv_cache_duplicate_bytes_saved_total",
            "Bytes of blocks freed at once because another request had published the same tokens.",
        )
        self._sources = Counter(
            "octavo_prompt_tokens_by_source_total",
            "Prompt tokens of admitted requests by where they were found, or why they were computed.",
            ["source"],
            registry=self._registry,
        )
        for source in TokenSource:
            self._sources.labels(source=source.value)
        self._rope_classes = Counter(
            "octavo_requests_by_rope_class_total",
            "Admitted requests by the rotation that their length was given.",
            ["rope_class"],
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def _add_histograms(self) -> None:
        histogram = self._histogram
        self._ttft = histogram(
            "octavo_time_to_first_token_seconds", "From a request's arrival to its first token.", TTFT_BUCKETS
        )
        self._itl = histogram("octavo_inter_token_latency_seconds", "Between two tokens of one request.", ITL_BUCKETS)
        self._duration = histogram(
            "octavo_request_duration_seconds", "From a request's arrival to its end, whatever the reason.", REQUEST_BUCKETS
        )
        self._queue = histogram(
            "octavo_request_queue_seconds", "From a request's arrival to its first admission.", QUEUE_BUCKETS
        )
        self._reuse_gaps = CountedHistogram(
            "octavo_kv_cache_reuse_gap_seconds",
            "How long cached blocks had lain unused when a request found them again.",
            AGE_BUCKETS,
            self._registry,
        )
        self._evict_idles = CountedHistogram(
            "octavo_kv_cache_idle_before_evict_seconds",
            "How long cached blocks had lain unused when they were evicted.",
            AGE_BUCKETS,
            self._registry,
        )
        self._step_duration = histogram("octavo_step_duration_seconds", "Duration of an engine step.", STEP_BUCKETS)
        self._step_tokens = histogram("octavo_step_tokens", "Tokens computed in an engine step.", STEP_TOKEN_BUCKETS)

    def _add_infos(self) -> None:
        self._cache_info = Gauge(
            "octavo_cache_config_info", "Shape of the KV cache, in labels; always 1.", _CACHE_LABELS, registry=self._registry
        )
        build = Gauge(
            "octavo_build_info", "Version of Octavo and of Python; always 1.", ["version", "python"], registry=self._registry
        )
        build.labels(version=__version__, python=platform.python_version()).set(1)


_CACHE_LABELS = (
    "block_size",
    "num_blocks",
    "block_bytes",
    "kv_dtype",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
)

_TIERS: dict[str, Callable[[CacheStats], int]] = {
    "device": lambda cache: cache.device_bytes,
    "host": lambda cache: cache.host_bytes,
    "disk": lambda cache: cache.disk_bytes,
}

_BLOCK_STATES: dict[str, Callable[[CacheStats], int]] = {
    "referenced": lambda cache: cache.num_referenced_blocks,
    "cached": lambda cache: cache.num_cached_blocks,
    "free": lambda cache: cache.num_free_blocks,
}


def _idle_step(info: EngineInfo) -> StepStats:
    """A new engine, before its first step: every block free."""
    cache = CacheStats(
        num_blocks=info.num_blocks,
        num_free_blocks=info.num_blocks,
        num_cached_blocks=0,
        num_referenced_blocks=0,
        block_bytes=info.block_bytes,
        block_size=info.block_size,
        num_context_tokens=0,
    )
    return StepStats(
        num_scheduled_tokens=0,
        num_prompt_tokens=0,
        num_sampled_tokens=0,
        num_recomputed_tokens=0,
        num_preemptions=0,
        num_evicted_blocks=0,
        num_running=0,
        num_waiting=0,
        step_seconds=0.0,
        cache=cache,
    )
