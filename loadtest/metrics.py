"""Prometheus' text format as a mapping, and the difference of two readings. Knows no metric by name."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator, Mapping

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*(?:\{.*\})?) (\S+)$")


class Metrics(Mapping[str, float]):
    """Values by ``name`` or ``name{label="value"}``, as the server writes them."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)

    @classmethod
    def parse(cls, text: str) -> Metrics:
        matches = (_SAMPLE.match(line) for line in text.splitlines())
        return cls({match[1]: float(match[2]) for match in matches if match})

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric that has this one label."""
        pattern = re.compile(rf'{re.escape(name)}\{{{re.escape(label)}="([^"]*)"\}}')
        return {match[1]: value for key, value in self.items() if (match := pattern.fullmatch(key))}

    def since(self, earlier: Metrics) -> Metrics:
        """How much each value has grown. For counters."""
        return Metrics({name: value - earlier._values.get(name, 0.0) for name, value in self.items()})


def read_metrics(url: str) -> Metrics:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return Metrics.parse(answer.read().decode())
