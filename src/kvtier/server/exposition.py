"""Exposition: formats collected metrics with prometheus-client, and adds the metrics of the server's processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import cast

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvtier.metrics import CollectedMetric, Distribution

_OPEN_METRICS = "application/openmetrics-text"


class Exposition:
    """Formats the metrics page of a server.

    The page has the collected metrics and those of the front end's garbage collector. Metrics about the front-end
    process itself are named `process_*`, and metrics about the engine process `kvtier_engine_process_*`.
    """

    def __init__(self, engine_pid: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._collected = _Collected()
        self._pages: dict[str, bytes] = {}  # by content type
        self._registry.register(self._collected)
        ProcessCollector(registry=self._registry)
        ProcessCollector("kvtier_engine", engine_pid, registry=self._registry)
        GCCollector(self._registry)

    def update(self, metrics: Iterable[CollectedMetric]) -> None:
        """Replace the metrics that `encode` formats."""
        self._collected.metrics = tuple(metrics)
        self._pages.clear()

    def encode(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type. Between two updates, each format is encoded at most once.

        `accept` is the value of the header Accept. The format is OpenMetrics if the header lists it, and Prometheus'
        text format otherwise. Parameters of media types (such as `;version=1.0.0`) are ignored, so there are only two
        formats. Clients of the metrics port, which need no API key, can therefore cause at most two encodings per
        update.
        """
        media_types = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
        content_type = openmetrics.CONTENT_TYPE_LATEST if _OPEN_METRICS in media_types else CONTENT_TYPE_PLAIN_0_0_4
        if content_type not in self._pages:
            self._pages[content_type] = self._encode(is_open=content_type == openmetrics.CONTENT_TYPE_LATEST)
        return self._pages[content_type], content_type

    def _encode(self, *, is_open: bool) -> bytes:
        if not is_open:
            return generate_latest(self._registry)
        # By default, the encoder of prometheus-client 0.26 escapes the colon in vLLM's names. ALLOWUTF8 disables
        # escaping. No name needs escaping, because a Registry accepts only names that are valid in both formats.
        return cast(bytes, openmetrics.generate_latest(self._registry, escaping=openmetrics.ALLOWUTF8))


class _Collected(Collector):
    def __init__(self) -> None:
        self.metrics: Sequence[CollectedMetric] = ()

    def collect(self) -> Iterator[Metric]:
        return map(family_of, self.metrics)


def family_of(metric: CollectedMetric) -> Metric:
    """Return a metric as a family of prometheus-client."""
    if metric.kind == "histogram":
        return _histogram_of(metric)
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.text, labels=metric.labels)
    for labels, value in metric.series:
        assert not isinstance(value, Distribution)
        family.add_metric(labels, value)
    return family


def _histogram_of(metric: CollectedMetric) -> HistogramMetricFamily:
    family = HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
    for labels, value in metric.series:
        assert isinstance(value, Distribution)
        bounds = [*map(floatToGoString, value.bounds), "+Inf"]
        buckets = zip(bounds, accumulate(value.counts), strict=True)  # both formats have cumulative buckets
        family.add_metric(labels, list(buckets), value.total)
    return family
