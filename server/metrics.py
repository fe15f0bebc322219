"""Every Prometheus metric of Octavo, fed by the engine's plain counts. The only writer of its registry.

Gauges are read from the engine's last word at scrape time, so they cost nothing per step and stay true while idle.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from engine.request import FinishReason
from engine.stats import Admission, CacheStats, EngineInfo, StepStats
from server import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80)
_ITL_BUCKETS = (
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 40, 80, 160, 320, 640)
_QUEUE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STEP_BUCKETS = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.006,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2,
    5,
    10,
)
_STEP_TOKEN_BUCKETS = tuple(2**power for power in range(15))


class RateWindow:
    """Mean events per second over the last ``seconds``. Falls to 0 by itself when nothing is added."""

    _RESOLUTION = 0.1

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._slots: deque[tuple[float, int]] = deque()

    def add(self, count: int) -> None:
        if not count:
            return
        now = self._clock()
        if self._slots and now - self._slots[-1][0] < self._RESOLUTION:
            start, so_far = self._slots.pop()
            self._slots.append((start, so_far + count))
        else:
            self._drop_old(now)
            self._slots.append((now, count))

    def rate(self) -> float:
        self._drop_old(self._clock())
        return sum(count for _, count in self._slots) / self._seconds

    def _drop_old(self, now: float) -> None:
        while self._slots and now - self._slots[0][0] >= self._seconds:
            self._slots.popleft()


class _WithoutCreated(Collector):
    """The registry's families without their ``_created`` series, which double the exposition and answer no question."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Metrics:
    """An EngineListener. All methods run on one event loop; ``clock`` is in seconds and never goes back."""

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._step: StepStats | None = None
        self._prompt_rate = RateWindow(10.0, clock)
        self._generation_rate = RateWindow(10.0, clock)
        self._add_cache_gauges()
        self._add_load_gauges()
        self._add_counters()
        self._add_histograms()
        self._add_infos()

    def render(self) -> bytes:
        """The text exposition, format 0.0.4 (CONTENT_TYPE)."""
        return generate_latest(_WithoutCreated(self._registry))

    def set_info(self, info: EngineInfo) -> None:
        """The engine is ready: say what it settled on, and that its cache is empty unless a step has said more."""
        labels = {name: str(getattr(info, name)) for name in _CACHE_LABELS}
        self._cache_info.clear()
        self._cache_info.labels(**labels).set(1)
        if self._step is None:
            self._step = _idle_step(info)

    def on_step(self, stats: StepStats) -> None:
        self._step = stats
        self._prompt_rate.add(stats.num_prompt_tokens)
        self._generation_rate.add(stats.num_sampled_tokens)
        self._preemptions.inc(stats.num_preemptions)
        self._recomputed.inc(stats.num_recomputed_tokens)
        self._evicted.inc(stats.num_evicted_blocks)
        if stats.num_scheduled_tokens:
            self._step_duration.observe(stats.step_seconds)
            self._step_tokens.observe(stats.num_scheduled_tokens)

    def on_admission(self, admission: Admission) -> None:
        self._prompt_tokens.inc(admission.num_prompt_tokens)
        self._query_tokens.inc(admission.num_prompt_tokens)
        self._hit_tokens.inc(admission.num_cached_tokens)
        self._queue.observe(admission.queue_seconds)

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
        self._recomputed = counter("octavo_recomputed_tokens_total", "Tokens computed again after a preemption.")
        self._evicted = counter("octavo_evicted_blocks_total", "Cached blocks forgotten to make room.")
        self._requests = Counter(
            "octavo_requests_total", "Requests that ended, by the reason.", ["finish_reason"], registry=self._registry
        )
        for reason in FinishReason:
            self._requests.labels(finish_reason=reason.value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def _add_histograms(self) -> None:
        histogram = self._histogram
        self._ttft = histogram(
            "octavo_time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS
        )
        self._itl = histogram("octavo_inter_token_latency_seconds", "Between two tokens of one request.", _ITL_BUCKETS)
        self._duration = histogram(
            "octavo_request_duration_seconds", "From a request's arrival to its end, whatever the reason.", _REQUEST_BUCKETS
        )
        self._queue = histogram(
            "octavo_request_queue_seconds", "From a request's arrival to its first admission.", _QUEUE_BUCKETS
        )
        self._step_duration = histogram("octavo_step_duration_seconds", "Duration of an engine step.", _STEP_BUCKETS)
        self._step_tokens = histogram("octavo_step_tokens", "Tokens computed in an engine step.", _STEP_TOKEN_BUCKETS)

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
