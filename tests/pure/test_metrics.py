"""Metrics: what is rendered is read back by prometheus_client's own parser; counts and quantiles against numpy."""

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
from kvtier.metrics import BYTES, SECONDS, Distribution, Histogram, Registry

values = st.floats(allow_nan=False, allow_infinity=False, width=32)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of an exposition, as prometheus_client reads it."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_render_text_format():
    registry = Registry()
    hits = registry.counter("hits_total", "Tokens\nfound \\ used.", ("tier", "why"))
    hits.of("host", 'a "b"\\\n').add(3)
    hits.of("disk", "").add(0.5)
    registry.gauge("slots", "Slots in use.").of().set(-math.inf)
    registry.histogram("load_seconds", "Loads.", ("tier",), (0.1, 1)).of("host").observe_many([0.1, 0.2, 7])
    registry.gauge("empty", "Nobody counted yet.", ("tier",))
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
        "# HELP empty Nobody counted yet.\n"
        "# TYPE empty gauge\n"
    )


@given(
    st.text(),
    st.dictionaries(st.tuples(st.text(), st.text()), st.floats(min_value=0, allow_infinity=False), max_size=5),
    st.floats(),
    st.lists(values, max_size=30),
)
def test_rendered_values_are_parsed_by_prometheus_client(text, counts, level, observed):
    registry = Registry()
    family = registry.counter("kvtier_things_total", text, ("one", "two"))
    for labels, count in counts.items():
        family.of(*labels).add(count)
    registry.gauge("kvtier_level", text).of().set(level)
    registry.histogram("kvtier_took", text, bounds=(-2.5, 0, 1, 1e9)).of().observe_many(observed)
    found = samples(registry.render())
    for (one, two), count in counts.items():
        assert found["kvtier_things_total", frozenset({("one", one), ("two", two)})] == count
    assert found["kvtier_level", frozenset()] == pytest.approx(level, nan_ok=True, rel=0)
    for bound, le in ((-2.5, "-2.5"), (0, "0"), (1, "1"), (1e9, "1000000000"), (math.inf, "+Inf")):
        expected = sum(value <= bound for value in observed)
        assert found["kvtier_took_bucket", frozenset({("le", le)})] == expected
    assert found["kvtier_took_count", frozenset()] == len(observed)
    assert found["kvtier_took_sum", frozenset()] == pytest.approx(math.fsum(observed), rel=1e-9, abs=1e-3)


def test_values_equal_prometheus_client():
    theirs, ours = CollectorRegistry(), Registry()
    told = np.random.default_rng(0).lognormal(-4, 3, 500)
    their_counter = TheirCounter("a_total", "A.", ["x"], registry=theirs)
    our_counter = ours.counter("a_total", "A.", ["x"])
    their_histogram = TheirHistogram("b", "B.", buckets=SECONDS, registry=theirs)
    our_histogram = ours.histogram("b", "B.").of()
    for i, value in enumerate(told):
        their_counter.labels(str(i % 3)).inc(value)
        our_counter.of(str(i % 3)).add(value)
        their_histogram.observe(value)
        our_histogram.observe(value)

    def comparable(text: str) -> dict[object, float]:
        def labels(pairs: frozenset[tuple[str, str]]) -> frozenset[tuple[str, object]]:
            return frozenset((k, float(v) if k == "le" else v) for k, v in pairs)

        return {(name, labels(pairs)): value for (name, pairs), value in samples(text).items() if "created" not in name}

    assert comparable(ours.render()) == pytest.approx(comparable(generate_latest(theirs).decode()))


@given(st.lists(st.lists(values, max_size=20), max_size=5))
def test_observe_many_equals_single_observes(batches):
    once, many = Histogram((-1, 0, 0.5, 3e4)), Histogram((-1, 0, 0.5, 3e4))
    for batch in batches:
        many.observe_many(batch)
        for value in batch:
            once.observe(value)
    assert many.value.counts == once.value.counts
    assert many.value.total == pytest.approx(once.value.total, rel=1e-9, abs=1e-3)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0, 1))
def test_quantile_lies_in_bucket_of_true_quantile(observed, q):
    bounds = (0.5, 1.0, 2.0, 4.0, 8.0)
    histogram = Histogram(bounds)
    histogram.observe_many(observed)
    true = float(np.quantile(observed, q, method="inverted_cdf"))
    high = next((bound for bound in bounds if true <= bound), math.inf)
    low = max((bound for bound in bounds if bound < true), default=0.0)
    assert min(low, 8.0) <= histogram.value.quantile(q) <= min(high, 8.0)


def test_quantiles_of_uniform_values():
    histogram = Histogram(np.arange(1, 101).tolist())
    histogram.observe_many(np.linspace(0.005, 99.995, 10_000))
    for q in (0.0, 0.01, 0.5, 0.99, 1.0):
        assert histogram.value.quantile(q) == pytest.approx(100 * q, abs=0.011)
    assert histogram.value.mean == pytest.approx(50)
    assert math.isnan(Histogram((1,)).value.quantile(0.5))
    assert math.isnan(Histogram((1,)).value.mean)


def test_since_is_difference_of_two_readings():
    histogram = Histogram((1, 2))
    histogram.observe_many([0.5, 5])
    earlier = histogram.value
    histogram.observe_many([1.5, 1.5])
    assert histogram.value.since(earlier) == Distribution((1.0, 2.0), (0, 2, 0), 3.0)
    with pytest.raises(ArgumentError, match="earlier"):
        earlier.since(histogram.value)


def test_concurrent_counts_are_exact_and_untorn():
    registry = Registry()
    family = registry.counter("n_total", "N.", ("of",))
    histogram = registry.histogram("h", "H.", bounds=(1, 10)).of()
    is_over = threading.Event()
    torn: list[Distribution] = []

    def count() -> None:
        for _ in range(2000):
            family.of("all").add()
            histogram.observe(5)

    def read() -> None:
        while not is_over.is_set():
            seen = histogram.value
            if seen.total != 5 * seen.count:
                torn.append(seen)
            registry.render()

    reader = threading.Thread(target=read)
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    reader.join()
    assert family.of("all").value == histogram.value.count == 8000
    assert not torn


def test_before_render_updates_external_counter():
    registry = Registry()
    elsewhere = {"total": 3}
    counter = registry.counter("e_total", "E.").of()
    registry.before_render(lambda: counter.raise_to(elsewhere["total"]))
    assert samples(registry.render())["e_total", frozenset()] == 3
    elsewhere["total"] = 7
    registry.render()
    elsewhere["total"] = 0  # a store that was opened again counts from zero
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
    with pytest.raises(ArgumentError, match="declared already, as counter"):
        registry.counter("a_total", "A.", ("x",))
    with pytest.raises(ArgumentError, match="labels"):
        counter.of()
    for amount in (-1, math.nan):
        with pytest.raises(ArgumentError, match="cannot change by"):
            counter.of("x").add(amount)
    for bounds in ((), (1, 1), (2, 1), (1, math.inf), (math.nan,)):
        with pytest.raises(ArgumentError, match="finite and ascending"):
            registry.histogram("b", "B.", bounds=bounds)
    histogram = Histogram(BYTES)
    for observe in (histogram.observe, lambda value: histogram.observe_many([1, value])):
        with pytest.raises(ArgumentError, match="NaN"):
            observe(math.nan)
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        histogram.value.quantile(99)
    assert histogram.value.count == 0
