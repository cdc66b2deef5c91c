"""The values that a metrics registry collects."""

from __future__ import annotations

import math
import pickle
import threading

import pytest

from kvtier.errors import ArgumentError
from kvtier.metrics import SECONDS, CollectedMetric, Distribution, Histogram, Registry


def test_collect_returns_all_series_in_declaration_order():
    registry = Registry()
    hits = registry.counter("hits_total", "Tokens found.", ("tier",))
    hits.of("host").add(3)
    hits.of("disk").add(0.5)
    loads = registry.histogram("load_seconds", "Loads.", ("tier",), (0.1, 1)).of("host")
    for seconds in (0.1, 0.2, 7):
        loads.observe(seconds)
    registry.gauge("empty", "No value yet.", ("tier",))
    registry.gauge("slots", "Slots in use.").of().set(-4)
    collected = registry.collect()
    assert collected == (
        CollectedMetric("counter", "hits_total", "Tokens found.", ("tier",), ((("host",), 3.0), (("disk",), 0.5))),
        CollectedMetric(
            "histogram",
            "load_seconds",
            "Loads.",
            ("tier",),
            ((("host",), Distribution((0.1, 1.0), (1, 1, 1), pytest.approx(7.3))),),
        ),
        CollectedMetric("gauge", "empty", "No value yet.", ("tier",), ()),
        CollectedMetric("gauge", "slots", "Slots in use.", (), (((), -4.0),)),
    )
    assert pickle.loads(pickle.dumps(collected)) == collected


def test_concurrent_updates_are_counted_and_reads_are_consistent():
    registry = Registry()
    family = registry.counter("n_total", "N.", ("of",))
    histogram = registry.histogram("h", "H.", bounds=(1, 10)).of()
    stop = threading.Event()
    inconsistent: list[Distribution] = []

    def count() -> None:
        for _ in range(2000):
            family.of("all").add()
            histogram.observe(5)

    def read() -> None:
        while not stop.is_set():
            seen = histogram.value
            if seen.total != 5 * seen.count:
                inconsistent.append(seen)
            registry.collect()

    reader = threading.Thread(target=read)
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    assert family.of("all").value == histogram.value.count == 8000
    assert not inconsistent


def test_before_collect_task_updates_counter():
    registry = Registry()
    elsewhere = {"total": 3}
    counter = registry.counter("e_total", "E.").of()
    registry.before_collect(lambda: counter.raise_to(elsewhere["total"]))

    def value() -> object:
        ((_, value),) = registry.collect()[0].series
        return value

    assert value() == 3
    elsewhere["total"] = 7
    assert value() == 7
    elsewhere["total"] = 0  # a reopened store counts from zero
    assert value() == 7


@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        ("counter", "hits", ()),
        ("gauge", "hits_total", ()),
        ("gauge", "2hits", ()),
        ("gauge", "", ()),
        ("gauge", "hits-of-tier", ()),
        ("gauge", "hits_bucket", ()),
        ("histogram", "hits_sum", ()),
        ("gauge", "hits", ("le",)),
        ("gauge", "hits", ("__name",)),
        ("gauge", "hits", ("a b",)),
        ("gauge", "hits", ("a", "a")),
    ],
)
def test_invalid_metric_names_raise(kind, name, labels):
    with pytest.raises(ArgumentError, match="is not a valid"):
        getattr(Registry(), kind)(name, "Text.", labels)


def test_invalid_metric_use_raises():
    registry = Registry()
    counter = registry.counter("a_total", "A.", ("x",))
    with pytest.raises(ArgumentError, match="already declared as a counter"):
        registry.counter("a_total", "A.", ("x",))
    with pytest.raises(ArgumentError, match="labels"):
        counter.of()
    for amount in (-1, math.nan):
        with pytest.raises(ArgumentError, match="cannot change by"):
            counter.of("x").add(amount)
    for bounds in ((), (1, 1), (2, 1), (1, math.inf), (math.nan,)):
        with pytest.raises(ArgumentError, match="finite and ascending"):
            registry.histogram("b", "B.", bounds=bounds)
    histogram = Histogram(SECONDS)
    with pytest.raises(ArgumentError, match="NaN"):
        histogram.observe(math.nan)
    assert histogram.value.count == 0
