"""Metrics: counters, gauges and histograms, without dependencies.

    registry = Registry()
    hits = registry.counter("kvtier_hit_tokens_total", "Tokens found in a tier.", ("tier",))
    host_hits = hits.of("host")                     # keep this object to avoid lookups
    host_hits.add(48)
    registry.collect()                              # (CollectedMetric("counter", "kvtier_hit_tokens_total", ..),)

A registry is passed explicitly; there is no global registry. Several threads may update and read metrics. Counters and
histograms have locks, so that no update is lost. The counts and the sum of a histogram are always consistent. The
server formats collected metrics with prometheus-client (`kvtier.server.exposition`).
"""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from kvtier.errors import ArgumentError

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?<!_bucket)(?<!_sum)(?<!_count)")
_LABEL_NAME = re.compile(r"(?!__|le$)[a-zA-Z_][a-zA-Z0-9_]*")

# 1, 2 and 5 in every decade, from 10 us (for copies of one block) to 500 s (for waiting prompts).
SECONDS = tuple(float(f"{digit}e{decade}") for decade in range(-5, 3) for digit in (1, 2, 5))


class Counter:
    """A number that only increases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        if not amount >= 0:
            raise ArgumentError(f"a counter cannot change by {amount}; use a gauge for values that decrease")
        with self._lock:
            self.value += amount

    def raise_to(self, total: float) -> None:
        """Set the counter to a total that was counted elsewhere. A total below the current value has no effect."""
        with self._lock:
            self.value = max(self.value, total)


@dataclass(slots=True)
class Gauge:
    """A number that increases and decreases."""

    value: float = 0.0

    def set(self, value: float) -> None:
        self.value = value


@dataclass(frozen=True, slots=True)
class Distribution:
    """Contents of a histogram at one time. `total` is the sum of the observed values."""

    bounds: tuple[float, ...]
    """Inclusive upper bounds of the buckets. The last bucket has no bound."""
    counts: tuple[int, ...]
    """Number of values in each bucket, including the last bucket."""
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class CollectedMetric:
    """All series of one metric at one time. Can be pickled."""

    kind: str
    """One of counter, gauge and histogram."""
    name: str
    text: str
    labels: tuple[str, ...]
    series: tuple[tuple[tuple[str, ...], float | Distribution], ...]
    """Pairs of label values and metric value, one pair per series, in the order of creation."""


class Histogram:
    """Counts of values in fixed buckets, and the sum of the values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        if not bounds or not all(low < high for low, high in pairwise((-math.inf, *self._bounds, math.inf))):
            raise ArgumentError(f"the bounds of a histogram must be finite and ascending, got {bounds}")
        self._lock = threading.Lock()
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        if math.isnan(value):
            raise ArgumentError("a histogram does not accept NaN")
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._total += value

    @property
    def value(self) -> Distribution:
        """A consistent copy of the contents."""
        with self._lock:
            return Distribution(self._bounds, tuple(self._counts), self._total)


Series = TypeVar("Series", bound=Counter | Gauge | Histogram)


class Family(Generic[Series]):
    """The series of one metric, one for each combination of label values. Created by a Registry.

    Series are never removed, so use labels with few values, such as tiers, and never request ids.
    """

    def __init__(self, kind: str, name: str, text: str, labels: tuple[str, ...], make: Callable[[], Series]) -> None:
        self.kind, self.name, self.text, self.labels = kind, name, text, labels
        self._make = make
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], Series] = {}

    def of(self, *values: str) -> Series:
        """Return the series for these label values. The values must be in the order of the labels."""
        if len(values) != len(self.labels):
            raise ArgumentError(f"{self.name} needs one value for each of the labels {self.labels}, got {values}")
        with self._lock:
            if values not in self._series:
                self._series[values] = self._make()
            return self._series[values]

    @property
    def series(self) -> dict[tuple[str, ...], Series]:
        """Series by label values."""
        with self._lock:
            return dict(self._series)


class Registry:
    """A set of metrics. Each name can be declared once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, Any] = {}  # families of any kind
        self._tasks: list[Callable[[], object]] = []

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Counter]:
        """Declare a counter. The name of a counter must end in _total."""
        return self._declare(Family("counter", name, text, tuple(labels), Counter))

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Gauge]:
        return self._declare(Family("gauge", name, text, tuple(labels), Gauge))

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS
    ) -> Family[Histogram]:
        Histogram(bounds)  # raises now if the bounds are invalid, not at the first value
        return self._declare(Family("histogram", name, text, tuple(labels), lambda: Histogram(bounds)))

    def _declare(self, family: Family[Series]) -> Family[Series]:
        name, labels = family.name, family.labels
        is_named_well = _METRIC_NAME.fullmatch(name) and (family.kind == "counter") == name.endswith("_total")
        if not is_named_well or len(set(labels)) < len(labels) or not all(map(_LABEL_NAME.fullmatch, labels)):
            raise ArgumentError(
                f"{name!r} with the labels {labels} is not a valid {family.kind}: names consist of letters, digits, "
                "_ and :; counters, and only they, end in _total; _bucket, _sum, _count and le are for histograms only"
            )
        with self._lock:
            if name in self._families:
                raise ArgumentError(f"{name} is already declared as a {self._families[name].kind}")
            self._families[name] = family
        return family

    def before_collect(self, task: Callable[[], object]) -> None:
        """Run a task before each `collect`, in the same thread, for example to update metrics."""
        with self._lock:
            self._tasks.append(task)

    def collect(self) -> tuple[CollectedMetric, ...]:
        """Run the tasks of `before_collect` and return all metrics in the order of declaration."""
        with self._lock:
            tasks, families = list(self._tasks), list(self._families.values())
        for task in tasks:
            task()
        return tuple(_collected(family) for family in families)


def _collected(family: Family[Any]) -> CollectedMetric:
    series = tuple((labels, each.value) for labels, each in family.series.items())
    return CollectedMetric(family.kind, family.name, family.text, family.labels, series)
