"""Parse rendered metrics with prometheus_client, and compare the values with counters of prometheus_client."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import ArgumentError
from kvtier.metrics import SECONDS, Distribution, Histogram, Registry

values = st.floats(allow_nan=False, allow_infinity=False, width=32)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Parse rendered metrics with prometheus_client. Return the value of each sample by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_render_writes_prometheus_text_format():
    registry = Registry()
    hits = registry.counter("hits_total", "Tokens\nfound \\ used.", ("tier", "why"))
    hits.of("host", 'a "b"\\\n').add(3)
    hits.of("disk", "").add(0.5)
    registry.gauge("slots", "Slots in use.").of().set(-math.inf)
    loads = registry.histogram("load_seconds", "Loads.", ("tier",), (0.1, 1)).of("host")
    for seconds in (0.1, 0.2, 7):
        loads.observe(seconds)
    registry.gauge("empty", "No value yet.", ("tier",))
    assert registry.render() == (
        "# HELP hits_total Tokens\\nfound \\\\ used.\n"
        "# TYPE hits_total counter\n"
        'hits_total{tier="host",why="a \\"b\\"\\\\\\n"} 3\n'
        'hits_total{tier="disk",why=""} 0.5\n'
        "# HELP slots Slots in use.\n"
        "# TYPE slots gauge\n"
        "slots -Inf\n"
        "# HELP load_seconds Loads.\n"
        "# TYPE load_seconds histogram\n"
        'load_seconds_bucket{tier="host",le="0.1"} 1\n'
        'load_seconds_bucket{tier="host",le="1"} 2\n'
        'load_seconds_bucket{tier="host",le="+Inf"} 3\n'
        'load_seconds_sum{tier="host"} 7.3\n'
        'load_seconds_count{tier="host"} 3\n'
        "# HELP empty No value yet.\n"
        "# TYPE empty gauge\n"
    )


@given(
    st.text(),
    st.dictionaries(st.tuples(st.text(), st.text()), st.floats(min_value=0, allow_infinity=False), max_size=5),
    st.floats(),
    st.lists(values, max_size=30),
)
def test_prometheus_client_parses_rendered_values(text, counts, level, observed):
    registry = Registry()
    family = registry.counter("kvtier_things_total", text, ("one", "two"))
    for labels, count in counts.items():
        family.of(*labels).add(count)
    registry.gauge("kvtier_level", text).of().set(level)
    took = registry.histogram("kvtier_took", text, bounds=(-2.5, 0, 1, 1e9)).of()
    for value in observed:
        took.observe(value)
    found = samples(registry.render())
    for (one, two), count in counts.items():
        assert found["kvtier_things_total", frozenset({("one", one), ("two", two)})] == count
    assert found["kvtier_level", frozenset()] == pytest.approx(level, nan_ok=True, rel=0)
    for bound, le in ((-2.5, "-2.5"), (0, "0"), (1, "1"), (1e9, "1000000000"), (math.inf, "+Inf")):
        expected = sum(value <= bound for value in observed)
        assert found["kvtier_took_bucket", frozenset({("le", le)})] == expected
    assert found["kvtier_took_count", frozenset()] == len(observed)
    assert found["kvtier_took_sum", frozenset()] == pytest.approx(math.fsum(observed), rel=1e-9, abs=1e-3)


def test_rendered_values_equal_values_of_prometheus_client():
    theirs, ours = CollectorRegistry(), Registry()
    observed = np.random.default_rng(0).lognormal(-4, 3, 500)
    their_counter = TheirCounter("a_total", "A.", ["x"], registry=theirs)
    our_counter = ours.counter("a_total", "A.", ["x"])
    their_histogram = TheirHistogram("b", "B.", buckets=SECONDS, registry=theirs)
    our_histogram = ours.histogram("b", "B.").of()
    for i, value in enumerate(observed):
        their_counter.labels(str(i % 3)).inc(value)
        our_counter.of(str(i % 3)).add(value)
        their_histogram.observe(value)
        our_histogram.observe(value)

    def comparable(text: str) -> dict[object, float]:
        def labels(pairs: frozenset[tuple[str, str]]) -> frozenset[tuple[str, object]]:
            return frozenset((k, float(v) if k == "le" else v) for k, v in pairs)

        return {(name, labels(pairs)): value for (name, pairs), value in samples(text).items() if "created" not in name}

    assert comparable(ours.render()) == pytest.approx(comparable(generate_latest(theirs).decode()))


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
            registry.render()

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


def test_callback_updates_counter_before_render():
    registry = Registry()
    elsewhere = {"total": 3}
    counter = registry.counter("e_total", "E.").of()
    registry.before_render(lambda: counter.raise_to(elsewhere["total"]))
    assert samples(registry.render())["e_total", frozenset()] == 3
    elsewhere["total"] = 7
    registry.render()
    elsewhere["total"] = 0  # a reopened store counts from zero
    assert samples(registry.render())["e_total", frozenset()] == 7


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
