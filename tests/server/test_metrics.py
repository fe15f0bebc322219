"""The exposition: the names that dashboards rely on, true values, and truth while idle."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.request import FinishReason
from engine.stats import Admission, CacheStats, PromptSources, StepStats
from server.instruments import CountedHistogram, RateWindow
from server.metrics import Metrics
from tests.fakes import fake_info

# The golden list: what issue 2 fixes, with types and label names. Renaming any of these breaks dashboards and alerts.
FAMILIES = {
    "octavo_kv_cache_bytes_per_token": ("gauge", ()),
    "octavo_kv_cache_effective_bytes_per_token": ("gauge", ()),
    "octavo_kv_cache_capacity_bytes": ("gauge", ()),
    "octavo_kv_cache_bytes": ("gauge", ("state",)),
    "octavo_kv_cache_blocks": ("gauge", ("state",)),
    "octavo_kv_cache_usage_ratio": ("gauge", ()),
    "octavo_kv_cache_efficiency_ratio": ("gauge", ()),
    "octavo_kv_cache_sharing_factor": ("gauge", ()),
    "octavo_kv_cache_internal_waste_ratio": ("gauge", ()),
    "octavo_kv_cache_pinned_bytes": ("gauge", ()),
    "octavo_kv_cache_tier_bytes": ("gauge", ("tier",)),
    "octavo_kv_cache_duplicate_bytes_saved_total": ("counter", ()),
    "octavo_kv_cache_reuse_gap_seconds": ("histogram", ()),
    "octavo_kv_cache_idle_before_evict_seconds": ("histogram", ()),
    "octavo_prompt_tokens_by_source_total": ("counter", ("source",)),
    "octavo_requests_by_rope_class_total": ("counter", ("rope_class",)),
    "octavo_prefix_cache_query_tokens_total": ("counter", ()),
    "octavo_prefix_cache_hit_tokens_total": ("counter", ()),
    "octavo_prompt_tokens_total": ("counter", ()),
    "octavo_generation_tokens_total": ("counter", ()),
    "octavo_throughput_tokens_per_second": ("gauge", ("kind",)),
    "octavo_requests_running": ("gauge", ()),
    "octavo_requests_waiting": ("gauge", ()),
    "octavo_requests_total": ("counter", ("finish_reason",)),
    "octavo_preemptions_total": ("counter", ()),
    "octavo_recomputed_tokens_total": ("counter", ("reason",)),
    "octavo_evicted_blocks_total": ("counter", ()),
    "octavo_time_to_first_token_seconds": ("histogram", ()),
    "octavo_inter_token_latency_seconds": ("histogram", ()),
    "octavo_request_duration_seconds": ("histogram", ()),
    "octavo_request_queue_seconds": ("histogram", ()),
    "octavo_step_duration_seconds": ("histogram", ()),
    "octavo_step_tokens": ("histogram", ()),
    "octavo_cache_config_info": (
        "gauge",
        ("block_bytes", "block_size", "head_dim", "kv_dtype", "max_model_len", "num_blocks", "num_kv_heads", "num_layers"),
    ),
    "octavo_build_info": ("gauge", ("python", "version")),
}


SOURCES = ("device", "host", "disk", "in_flight", "evicted", "other_namespace", "unseen")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by name and labels, as Prometheus would read it."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(for_operator=True).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


def step(**changes: Any) -> StepStats:
    cache = CacheStats(
        num_blocks=40,
        num_free_blocks=20,
        num_cached_blocks=12,
        num_referenced_blocks=8,
        block_bytes=1600,
        block_size=16,
        num_context_tokens=100,
        num_block_references=20,
        num_filled_slots=96,
        num_pinned_blocks=5,
        num_host_blocks=3,
        disk_bytes=90,
    )
    values: dict[str, Any] = {
        "num_scheduled_tokens": 70,
        "num_prompt_tokens": 64,
        "num_sampled_tokens": 6,
        "num_recomputed_tokens": 5,
        "num_preemptions": 2,
        "num_evicted_blocks": 3,
        "num_running": 6,
        "num_waiting": 4,
        "step_seconds": 0.025,
        "cache": cache,
        "num_merged_blocks": 2,
        "num_regrown_tokens": 11,
        "reuse_gaps": ((0.5, 3), (90_000.0, 1)),
        "evict_idles": ((2.0, 4),),
    }
    return StepStats(**(values | changes))


IDLE = {
    "num_scheduled_tokens": 0,
    "num_prompt_tokens": 0,
    "num_sampled_tokens": 0,
    "num_recomputed_tokens": 0,
    "num_preemptions": 0,
    "num_evicted_blocks": 0,
    "num_running": 0,
    "num_waiting": 0,
    "num_regrown_tokens": 0,
    "step_seconds": 0.0,
    "cache": CacheStats(40, 28, 12, 0, 1600, 16, 0),
    "num_merged_blocks": 0,
    "reuse_gaps": (),
    "evict_idles": (),
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock) -> Metrics:
    return Metrics(CollectorRegistry(), clock=clock)


def test_families_are_the_golden_list(metrics) -> None:
    metrics.on_ready(fake_info())
    found = {}
    for family in text_string_to_metric_families(metrics.render(for_operator=True).decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, tuple(sorted(labels)))
        assert family.documentation
        assert "\n" not in family.documentation
    assert found == FAMILIES


def test_every_label_value_exists_from_the_start(metrics) -> None:
    found = samples(metrics)
    for reason in ("stop", "length", "abort", "error"):
        assert found[f"octavo_requests_total{{finish_reason={reason}}}"] == 0
    for state in ("referenced", "cached", "free"):
        assert found[f"octavo_kv_cache_blocks{{state={state}}}"] == 0
        assert found[f"octavo_kv_cache_bytes{{state={state}}}"] == 0
    for tier in ("device", "host", "disk"):
        assert found[f"octavo_kv_cache_tier_bytes{{tier={tier}}}"] == 0
    for source in SOURCES:
        assert found[f"octavo_prompt_tokens_by_source_total{{source={source}}}"] == 0
    for kind in ("prompt", "generation"):
        assert found[f"octavo_throughput_tokens_per_second{{kind={kind}}}"] == 0
    assert not [name for name in found if "_created" in name]


def test_nothing_goes_to_the_global_registry(metrics) -> None:
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("octavo")]
    Metrics(CollectorRegistry())  # a second one does not clash


def test_cache_gauges_tell_what_the_last_step_said(metrics) -> None:
    metrics.on_step(step())
    found = samples(metrics)
    assert found["octavo_kv_cache_bytes_per_token"] == 100
    assert found["octavo_kv_cache_effective_bytes_per_token"] == 128
    assert found["octavo_kv_cache_efficiency_ratio"] == pytest.approx(100 / 128)
    assert found["octavo_kv_cache_capacity_bytes"] == 64_000
    assert found["octavo_kv_cache_usage_ratio"] == 0.2
    blocks = {state: found[f"octavo_kv_cache_blocks{{state={state}}}"] for state in ("referenced", "cached", "free")}
    assert blocks == {"referenced": 8, "cached": 12, "free": 20}
    for state, count in blocks.items():
        assert found[f"octavo_kv_cache_bytes{{state={state}}}"] == count * 1600
    assert found["octavo_requests_running"] == 6
    assert found["octavo_requests_waiting"] == 4


def test_what_sharing_saves_and_waste_costs(metrics) -> None:
    found = samples(metrics)
    assert found["octavo_kv_cache_reuse_gap_seconds_count"] == found["octavo_kv_cache_idle_before_evict_seconds_sum"] == 0
    metrics.on_step(step())
    metrics.on_step(step())
    found = samples(metrics)
    assert found["octavo_kv_cache_sharing_factor"] == 20 / 8
    assert found["octavo_kv_cache_internal_waste_ratio"] == pytest.approx(1 - 96 / 128)
    assert found["octavo_kv_cache_pinned_bytes"] == 5 * 1600
    tiers = {tier: found[f"octavo_kv_cache_tier_bytes{{tier={tier}}}"] for tier in ("device", "host", "disk")}
    assert tiers == {"device": 20 * 1600, "host": 3 * 1600, "disk": 90}
    assert found["octavo_kv_cache_duplicate_bytes_saved_total"] == 2 * 2 * 1600
    gap = "octavo_kv_cache_reuse_gap_seconds"
    assert (found[f"{gap}_count"], found[f"{gap}_sum"]) == (8, 2 * (1.5 + 90_000))
    assert [found[f"{gap}_bucket{{le={bound}}}"] for bound in ("0.3", "1.0", "86400.0", "+Inf")] == [0, 6, 6, 8]
    assert found["octavo_kv_cache_idle_before_evict_seconds_count"] == 8
    metrics.on_step(step(**IDLE))
    found = samples(metrics)
    assert (found["octavo_kv_cache_sharing_factor"], found["octavo_kv_cache_internal_waste_ratio"]) == (1, 0)


def test_a_value_on_a_bound_is_below_it_as_prometheus_has_it() -> None:
    registry, plain = CollectorRegistry(), CollectorRegistry()
    bulk, one_by_one = CountedHistogram("h", "x", (1, 2), registry), Histogram("h", "x", buckets=(1, 2), registry=plain)
    values = ((0.5, 2), (1.0, 3), (1.5, 1), (2.0, 1), (7.0, 4))
    bulk.observe(values)
    for value, count in values:
        for _ in range(count):
            one_by_one.observe(value)

    def lines(source: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(source).decode().splitlines() if "_created" not in line]

    assert lines(registry) == lines(plain)


def test_step_counts_add_up_and_steps_without_tokens_are_no_steps(metrics) -> None:
    metrics.on_step(step())
    metrics.on_step(step(step_seconds=0.07))
    metrics.on_step(step(**IDLE))
    found = samples(metrics)
    assert found["octavo_preemptions_total"] == 4
    assert found["octavo_recomputed_tokens_total{reason=preemption}"] == 10
    assert found["octavo_recomputed_tokens_total{reason=rope_class}"] == 22
    assert found["octavo_evicted_blocks_total"] == 6
    assert found["octavo_step_tokens_count"] == 2
    assert found["octavo_step_tokens_sum"] == 140
    assert found["octavo_step_duration_seconds_sum"] == pytest.approx(0.095)
    assert found["octavo_step_duration_seconds_bucket{le=0.03}"] == 1
    assert found["octavo_requests_running"] == 0


def test_admissions_tokens_and_ends_are_counted(metrics) -> None:
    metrics.on_ready(fake_info(rope_classes=(("default", 64), ("yarn-2", 128))))
    metrics.on_admission(Admission("a", 100, 64, 0.004, PromptSources(device=48, in_flight=16, evicted=30, unseen=6)))
    metrics.on_admission(Admission("b", 20, 0, 0.2, PromptSources(other_namespace=16, unseen=4), rope_class=1))
    metrics.on_token(0.120, first=True)
    metrics.on_token(0.030, first=False)
    metrics.on_token(0.050, first=False)
    metrics.on_finish(FinishReason.STOP, 0.2)
    metrics.on_finish(FinishReason.ABORT, 1.5)
    found = samples(metrics)
    assert found["octavo_prompt_tokens_total"] == 120
    assert found["octavo_prefix_cache_query_tokens_total"] == 120
    assert found["octavo_prefix_cache_hit_tokens_total"] == 64
    assert found["octavo_requests_by_rope_class_total{rope_class=default}"] == 1
    assert found["octavo_requests_by_rope_class_total{rope_class=yarn-2}"] == 1
    sources = {source: found[f"octavo_prompt_tokens_by_source_total{{source={source}}}"] for source in SOURCES}
    assert sources == {
        "device": 48,
        "host": 0,
        "disk": 0,
        "in_flight": 16,
        "evicted": 30,
        "other_namespace": 16,
        "unseen": 10,
    }
    assert sum(sources.values()) == found["octavo_prompt_tokens_total"]
    assert found["octavo_request_queue_seconds_count"] == 2
    assert found["octavo_request_queue_seconds_sum"] == pytest.approx(0.204)
    assert found["octavo_generation_tokens_total"] == 3
    assert found["octavo_time_to_first_token_seconds_count"] == 1
    assert found["octavo_time_to_first_token_seconds_sum"] == pytest.approx(0.12)
    assert found["octavo_inter_token_latency_seconds_count"] == 2
    assert found["octavo_inter_token_latency_seconds_bucket{le=0.03}"] == 1
    assert found["octavo_requests_total{finish_reason=stop}"] == 1
    assert found["octavo_requests_total{finish_reason=abort}"] == 1
    assert found["octavo_requests_total{finish_reason=error}"] == 0
    assert found["octavo_request_duration_seconds_count"] == 2


def test_tenants_do_not_see_what_is_cached_for_others(metrics) -> None:
    metrics.on_ready(fake_info())
    metrics.on_admission(Admission("a", 100, 64, 0.0, PromptSources(device=64, evicted=30, unseen=6)))
    metrics.on_admission(Admission("b", 20, 0, 0.0, PromptSources(other_namespace=16, unseen=4)))
    theirs, ours = (metrics.render(for_operator=operator).decode().splitlines() for operator in (False, True))
    changed = sorted(set(theirs) ^ set(ours))
    assert changed == [
        f'octavo_prompt_tokens_by_source_total{{source="{source}"}} {count}'
        for source, count in (("other_namespace", "0.0"), ("other_namespace", "16.0"), ("unseen", "10.0"), ("unseen", "26.0"))
    ]
    assert len(theirs) == len(ours)


@pytest.mark.parametrize(
    "name", ["time_to_first_token", "inter_token_latency", "request_duration", "request_queue", "step_duration"]
)
def test_buckets_are_fine_below_300_ms(metrics, name) -> None:
    prefix = f"octavo_{name}_seconds_bucket{{le="
    bounds = sorted(float(key.removeprefix(prefix).rstrip("}")) for key in samples(metrics) if key.startswith(prefix))
    assert len([bound for bound in bounds if bound <= 0.3]) >= 8
    assert 0.3 in bounds


def test_throughput_is_true_while_idle(metrics, clock) -> None:
    prompt, generation = (f"octavo_throughput_tokens_per_second{{kind={kind}}}" for kind in ("prompt", "generation"))
    for _ in range(10):
        metrics.on_step(step())
        clock.now += 0.5
    found = samples(metrics)
    assert found[prompt] == pytest.approx(64.0)
    assert found[generation] == pytest.approx(6.0)
    clock.now += 7.0  # no step any more: the first two seconds have left the window
    assert samples(metrics)[generation] == pytest.approx(3.6, abs=0.7)
    clock.now += 10.0
    assert samples(metrics)[prompt] == 0
    assert samples(metrics)[generation] == 0


def test_a_rate_window_stays_small(clock) -> None:
    window = RateWindow(10.0, clock)
    for _ in range(100_000):
        window.add(1)
        clock.now += 0.001
    assert window.rate() == pytest.approx(1000, rel=0.02)
    assert len(window._slots) <= 101


def test_gauges_fall_to_zero_when_the_engine_dies_and_counters_stay(metrics) -> None:
    metrics.on_ready(fake_info())
    metrics.on_step(step())
    metrics.on_restart()
    found = samples(metrics)
    for name, (kind, _) in FAMILIES.items():
        if kind == "gauge" and not name.endswith("_info") and "throughput" not in name:
            assert all(value == 0 for key, value in found.items() if key.partition("{")[0] == name), name
    assert found["octavo_preemptions_total"] == 2
    metrics.on_step(step(**IDLE))
    assert samples(metrics)["octavo_kv_cache_capacity_bytes"] == 64_000


def test_a_new_engine_shows_its_empty_cache_before_any_step(metrics) -> None:
    metrics.on_ready(fake_info())
    found = samples(metrics)
    assert found["octavo_kv_cache_blocks{state=free}"] == 40
    assert found["octavo_kv_cache_capacity_bytes"] == 40 * 32_768
    assert found["octavo_kv_cache_bytes_per_token"] == 2048
    assert found["octavo_kv_cache_usage_ratio"] == 0
    (info,) = [key for key in found if key.startswith("octavo_cache_config_info")]
    assert "block_size=16" in info
    assert "num_blocks=40" in info
    metrics.on_ready(fake_info(num_blocks=50))
    (info,) = [key for key in samples(metrics) if key.startswith("octavo_cache_config_info")]
    assert "num_blocks=50" in info


def test_info_does_not_overwrite_what_a_step_has_said(metrics) -> None:
    metrics.on_step(step())
    metrics.on_ready(fake_info())
    assert samples(metrics)["octavo_requests_running"] == 6
