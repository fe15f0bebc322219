"""What prometheus-client does not have: a rate that falls by itself, a histogram fed in bulk, and the exposition without noise."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engine.stats import TokenSource


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


class WithoutCreated(Collector):
    """The registry's families without their ``_created`` series, which double the exposition and answer no question."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class TenantView(Collector):
    """The families as tenants may see them: what others have cached counts as ``unseen``, or they could find out their prompts."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Metric]:
        for family in self._collector.collect():
            if any("source" in sample.labels for sample in family.samples):
                family.samples = _without_other_namespaces(family.samples)
            yield family


def _without_other_namespaces(samples: list[Sample]) -> list[Sample]:
    hidden = sum(sample.value for sample in samples if sample.labels["source"] == TokenSource.OTHER_NAMESPACE)
    shift = {TokenSource.OTHER_NAMESPACE.value: -hidden, TokenSource.UNSEEN.value: hidden}
    return [sample._replace(value=sample.value + shift.get(sample.labels["source"], 0.0)) for sample in samples]


class CountedHistogram(Collector):
    """A histogram without labels of values that come with how often each was seen: a thousand blocks of one age cost one step."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)  # the last is for values above all bounds
        self._sum = 0.0
        registry.register(self)

    def observe(self, values: Iterable[tuple[float, int]]) -> None:
        for value, count in values:
            self._counts[bisect_left(self._bounds, value)] += count
            self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        bounds = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        cumulative = accumulate(self._counts)
        buckets = [(bound, float(count)) for bound, count in zip(bounds, cumulative, strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
