"""The cost table: estimates and the JSON format."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import FormatError
from kvtier.memory import CPU, PINNED, CostTable, Placement
from kvtier.memory.copy_paths import CopyContext
from kvtier.memory.costs import _SIZES, Cost

GPU = Placement("cuda")
TO_HOST = CopyContext(GPU, PINNED, None)
EMPTY = {"format": 2, "origin": "", "seconds": 0, "costs": {}, "links": {}, "lost": {}}


def table(**paths):
    """Build a table for one direction. Each path has a fixed cost and a cost per piece of 4 KiB, in microseconds.

    The cost of a larger piece is proportional to its size.
    """
    rows = {
        path: tuple(Cost(size, fixed, piece * size / _SIZES[0]) for size in _SIZES)
        for path, (fixed, piece) in paths.items()
    }
    return CostTable("a test", {"cuda>pinned": rows})


@pytest.mark.parametrize("size", _SIZES)
def test_estimate_at_measured_size_equals_measurement(size):
    measured = table(driver=(10.0, 2.0))
    expected = 10.0 + 7 * 2.0 * size / 4096
    assert measured.estimate_us(TO_HOST, 7, 7 * size)["driver"] == pytest.approx(expected)


@given(size=st.integers(4096, 1 << 30), count=st.integers(1, 100_000))
def test_estimate_above_smallest_size_scales_with_bytes(size, count):
    expected = 10.0 + count * 2.0 * size / 4096
    assert table(driver=(10.0, 2.0)).estimate_us(TO_HOST, count, count * size)["driver"] == pytest.approx(expected)


@given(size=st.integers(1, 4096), count=st.integers(1, 1000))
def test_estimate_below_smallest_size_ignores_the_size(size, count):
    estimate = table(gather=(5.0, 1.0)).estimate_us(TO_HOST, count, count * size)["gather"]
    assert estimate == pytest.approx(5.0 + count)


def test_estimate_covers_only_measured_paths():
    assert set(table(driver=(1, 1), loop=(1, 1)).estimate_us(TO_HOST, 1, 1)) == {"driver", "loop"}
    assert table(driver=(1, 1)).estimate_us(CopyContext(CPU, GPU, None), 1, 1) == {}


def test_cost_table_json_round_trips():
    measured = table(driver=(10.0, 2.0), gather=(math.pi, 0.001))
    parsed = CostTable.from_json(measured.to_json())
    assert (parsed.origin, parsed.costs) == (measured.origin, measured.costs)


def test_cost_table_json_keeps_links_and_losses():
    measured = CostTable("a test", {}, {"cuda>pinned": 55.0}, {"cuda>pinned": {"driver": 0.02, "gather": 0.9}}, 1.5)
    parsed = CostTable.from_json(measured.to_json())
    assert (parsed.links, parsed.lost, parsed.seconds) == (measured.links, measured.lost, 1.5)
    assert CostTable.from_json(json.dumps(EMPTY)).links == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 2}',
        json.dumps({**EMPTY, "format": 1}),
        json.dumps({**EMPTY, "costs": {"a>b": {"driver": [{"nbytes": 1}]}}}),
        json.dumps({**EMPTY, "costs": {"a>b": {"driver": []}}}),
        json.dumps({**EMPTY, "costs": {"a>b": []}}),
        json.dumps({**EMPTY, "links": {"a>b": "fast"}}),
        json.dumps({**EMPTY, "lost": {"a>b": 0.5}}),
        table(driver=(1, 1)).to_json().replace('"fixed_us": 1', '"fixed_us": "a"'),
        table(driver=(1, 1)).to_json().replace('"fixed_us": 1', '"fixed_us": NaN'),
        table(driver=(1, 0)).to_json(),  # the cost of a piece is 0
    ],
)
def test_cost_table_from_invalid_json_raises(text):
    with pytest.raises(FormatError):
        CostTable.from_json(text)
