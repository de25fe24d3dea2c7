"""Metrics as Prometheus has them: what each is called, and what one scrape finds.

A process object (a coordinator, a worker) has a registry of its own, so that several live in one process. Sources
are functions that read what is there; they run in the thread that is asked for the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from neurogrid.node.histogram import Histogram

__all__ = ["MetricSpec", "Reading", "Registry", "Source", "make_registry"]

Registry: TypeAlias = CollectorRegistry
"""What is scraped, for those who only pass it on."""

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class MetricSpec:
    """A metric.

    Attributes:
        name: as it is exposed: `_total` for counters, and the unit before that.
        kind: what may be done with it.
        meaning: a sentence.
        labels: what its series are told apart by.
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()


class Reading:
    """The findings of one scrape."""

    def __init__(self, specs: Iterable[MetricSpec]) -> None:
        # Those without a value are there too, as a name and its meaning.
        self._specs = {spec.name: spec for spec in specs}
        self._plain: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        self._histograms: dict[str, HistogramMetricFamily] = {}
        for name, spec in self._specs.items():
            if spec.kind == "histogram":
                family = HistogramMetricFamily(name, spec.meaning, labels=spec.labels)
                self._histograms[name] = family
            else:
                kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                self._plain[name] = kind(name, spec.meaning, labels=spec.labels)

    def add(self, spec: MetricSpec, value: float, *labels: str) -> None:
        """One series of a counter or gauge; labels in the order of the metric's."""
        assert len(labels) == len(spec.labels), spec
        self._plain[spec.name].add_metric(labels, value)

    def add_all(self, spec: MetricSpec, values: Mapping[str, float]) -> None:
        """The series of a metric with one label, by its value."""
        for label, value in values.items():
            self.add(spec, value, label)

    def add_histogram(self, spec: MetricSpec, histogram: Histogram, *labels: str) -> None:
        """One series of a histogram."""
        assert len(labels) == len(spec.labels), spec
        buckets = [
            ("+Inf" if bound == float("inf") else repr(float(bound)), float(count))
            for bound, count in histogram.cumulative
        ]
        self._histograms[spec.name].add_metric(labels, buckets, histogram.total)

    @property
    def families(self) -> Sequence[Metric]:
        """All metrics with their series, in the order in which they were named."""
        return [
            self._histograms[name] if spec.kind == "histogram" else self._plain[name]
            for name, spec in self._specs.items()
        ]


Source: TypeAlias = Callable[[Reading], None]


def make_registry(sources: Mapping[Source, Sequence[MetricSpec]]) -> CollectorRegistry:
    """A registry of what `sources` read, each with the metrics that it may add to, and of this process."""
    registry = CollectorRegistry()
    registry.register(_Sources(sources))
    ProcessCollector(registry=registry)
    return registry


class _Sources(Collector):
    def __init__(self, sources: Mapping[Source, Sequence[MetricSpec]]) -> None:
        self._sources = tuple(sources)
        self._specs = [spec for specs in sources.values() for spec in specs]

    def collect(self) -> Iterable[Metric]:
        reading = Reading(self._specs)
        for source in self._sources:
            source(reading)
        return reading.families
