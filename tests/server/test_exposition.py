"""prometheus-client can parse the metrics page, and writes the same samples for the same values."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvtier.metrics import SECONDS, Registry
from kvtier.server.exposition import Exposition

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
OF_PROCESSES = ("process_", "kvtier_engine_process_", "python_gc_")
"""Prefixes of the metrics that Exposition adds to the metrics of the registry."""

values = st.floats(min_value=0, allow_infinity=False, width=32)


def encode(registry: Registry, accept: str = "") -> tuple[str, str]:
    exposition = Exposition(os.getpid)
    exposition.update(registry.collect())
    page, content_type = exposition.encode(accept)
    return page.decode(), content_type


def samples(text: str, parse=parse_text) -> dict[tuple[str, frozenset[tuple[str, object]]], float]:
    """Return the value of each sample by its name and labels. The bound of a bucket (label `le`) is a number.

    Leave out the metrics with a prefix in OF_PROCESSES, and samples of creation times (`_created`).
    """
    return {
        (sample.name, frozenset((k, float(v) if k == "le" else v) for k, v in sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
        if not sample.name.startswith(OF_PROCESSES) and not sample.name.endswith("_created")
    }


@given(
    st.text(),
    st.dictionaries(st.tuples(st.text(), st.text()), st.floats(min_value=0, allow_infinity=False), max_size=5),
    st.floats(),
    st.lists(values, max_size=30),
)
def test_encoded_values_are_parsed_back(text, counts, level, observed):
    registry = Registry()
    family = registry.counter("kvtier_things_total", text, ("one", "two"))
    for labels, count in counts.items():
        family.of(*labels).add(count)
    registry.gauge("kvtier_level", text).of().set(level)
    took = registry.histogram("kvtier_took", text, bounds=(0, 0.5, 1, 1e9)).of()
    for value in observed:
        took.observe(value)
    found = samples(encode(registry)[0])
    for (one, two), count in counts.items():
        assert found["kvtier_things_total", frozenset({("one", one), ("two", two)})] == count
    assert found["kvtier_level", frozenset()] == pytest.approx(level, nan_ok=True, rel=0)
    for bound in (0, 0.5, 1, 1e9, math.inf):
        assert found["kvtier_took_bucket", frozenset({("le", bound)})] == sum(value <= bound for value in observed)
    assert found["kvtier_took_count", frozenset()] == len(observed)
    assert found["kvtier_took_sum", frozenset()] == pytest.approx(math.fsum(observed), rel=1e-9, abs=1e-3)


def test_both_formats_have_equal_values():
    registry = Registry()
    registry.counter("kvtier_things_total", "Things.", ("one",)).of('a "b"\\\n').add(3)
    registry.gauge("vllm:cache_config_info", "Configuration.", ("size",)).of("16").set(1)
    registry.histogram("kvtier_took_seconds", "Times.").of().observe(0.2)
    text, text_type = encode(registry, "text/html, */*")
    opened, opened_type = encode(registry, OPEN_METRICS)
    assert text_type.startswith("text/plain; version=0.0.4")
    assert opened_type.startswith("application/openmetrics-text; version=1.0.0")
    assert opened.endswith("# EOF\n")
    assert samples(text) == samples(opened, parse_open_metrics)
    # A counter, a gauge, the buckets of SECONDS, and the infinite bucket, sum and count of the histogram.
    assert len(samples(text)) == 2 + len(SECONDS) + 3


def test_samples_equal_those_of_prometheus_client():
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
    assert samples(encode(ours)[0]) == pytest.approx(samples(generate_latest(theirs).decode()))


def test_page_has_metrics_of_both_processes_and_of_the_gc():
    families = {family.name: family for family in parse_text(encode(Registry())[0])}
    for prefix in ("process_", "kvtier_engine_process_"):
        assert families[f"{prefix}resident_memory_bytes"].samples[0].value > 1 << 20
        assert families[f"{prefix}open_fds"].samples[0].value > 0
    assert len(families["python_gc_collections"].samples) == 3


def test_page_after_engine_exit_has_no_engine_process_metrics():
    exposition = Exposition(lambda: 2**22 + 1)  # above the highest process id
    assert not [family for family in parse_text(exposition.encode("")[0].decode()) if "engine" in family.name]


@pytest.mark.parametrize(
    "accept",
    ["", ",", ";;", "application/openmetrics-text; version=x", "application/openmetrics-text;version=9;escaping=y"],
)
def test_any_accept_header_gets_text_or_openmetrics(accept):
    content_type = encode(Registry(), accept)[1]
    assert content_type in {encode(Registry(), "")[1], encode(Registry(), OPEN_METRICS)[1]}
