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
"""Registry that is scraped, for code that only passes it on."""

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
    """The findings of one scrape. What is added twice to one series is summed: sources may be of the same kind."""

    def __init__(self, specs: Iterable[MetricSpec]) -> None:
        # Those without a value are there too, as a name and its meaning.
        self._specs = {spec.name: spec for spec in specs}
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._specs}
        self._histograms: dict[str, dict[tuple[str, ...], _Sum]] = {
            name: {} for name in self._specs
        }

    def add(self, spec: MetricSpec, value: float, *labels: str) -> None:
        """One series of a counter or gauge; labels in the order of the metric's."""
        assert len(labels) == len(spec.labels), spec
        series = self._values[spec.name]
        series[labels] = series.get(labels, 0) + value

    def add_all(self, spec: MetricSpec, values: Mapping[str, float]) -> None:
        """The series of a metric with one label, by its value."""
        for label, value in values.items():
            self.add(spec, value, label)

    def add_histogram(self, spec: MetricSpec, histogram: Histogram, *labels: str) -> None:
        """One series of a histogram."""
        assert len(labels) == len(spec.labels), spec
        series = self._histograms[spec.name]
        cumulative, total = dict(histogram.cumulative), histogram.total
        if labels in series:
            before = series[labels]
            assert before.cumulative.keys() == cumulative.keys(), spec
            cumulative = {
                bound: count + before.cumulative[bound] for bound, count in cumulative.items()
            }
            total += before.total
        series[labels] = _Sum(cumulative, total)

    @property
    def families(self) -> Sequence[Metric]:
        """All metrics with their series, in the order in which they were named."""
        return [self._family(spec) for spec in self._specs.values()]

    def _family(self, spec: MetricSpec) -> Metric:
        if spec.kind == "histogram":
            histogram = HistogramMetricFamily(spec.name, spec.meaning, labels=spec.labels)
            for labels, found in self._histograms[spec.name].items():
                buckets = [
                    ("+Inf" if bound == float("inf") else repr(float(bound)), float(count))
                    for bound, count in found.cumulative.items()
                ]
                histogram.add_metric(labels, buckets, found.total)
            return histogram
        kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = kind(spec.name, spec.meaning, labels=spec.labels)
        for labels, value in self._values[spec.name].items():
            family.add_metric(labels, value)
        return family


@dataclass(frozen=True)
class _Sum:
    """Histograms of one series: values up to each bound, infinity the last, and the sum of all."""

    cumulative: Mapping[float, int]
    total: float


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
