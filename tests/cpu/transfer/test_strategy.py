"""The price of each strategy, from a made-up calibration: link time plus what the model loses."""

import pytest

from kvtier.memory import CPU, PINNED, CostTable, Placement
from kvtier.memory.copy_paths import Job
from kvtier.memory.costs import _SIZES, Cost
from kvtier.transfer import TransferConfig
from kvtier.transfer.strategy import Choice, Shape, _Options, _prices, _Reckoning, choose

GPU = Placement("cuda")
MIB = 1 << 20


def rows(gbs, piece_us):
    """A path of this rate, and so much time for each piece."""
    return tuple(Cost(size, 10.0, piece_us + size / gbs / 1e3) for size in _SIZES)


TABLE = CostTable(
    "a test",
    {
        "cuda>pinned": {"driver": rows(50, 1.0), "gather": rows(50, 0.01)},
        "cuda>cuda": {"gather": rows(2000, 0.001)},
    },
    {"cuda>pinned": 50.0},
    {"cuda>pinned": {"driver": 0.0, "gather": 0.8}},
)
ALL = _Options(
    {"direct": "driver", "kernel": "gather", "staged": "driver"}, {}, Job(GPU, PINNED, None), Job(GPU, GPU, None)
)


def cheapest(shape, table=TABLE):
    prices = _prices(shape, ALL, table)[1]
    return min(prices, key=prices.get)


@pytest.mark.parametrize(("parts", "best"), [(32, "direct"), (32 * 64, "staged"), (32 * 512, "staged")])
def test_large_parts_go_directly_and_small_ones_are_staged(parts, best):
    assert cheapest(Shape(GPU, PINNED, 64 * MIB, parts, 32)) == best


def test_a_kernel_is_best_where_the_model_loses_nothing_to_it():
    harmless = CostTable("a test", TABLE.costs, TABLE.links, {"cuda>pinned": {"driver": 0.0, "gather": 0.0}})
    shape = Shape(GPU, PINNED, 64 * 4096, 64, 64)
    assert cheapest(shape, harmless) == "kernel"


def test_prices_are_times_and_what_is_lost():
    times, prices = _prices(Shape(GPU, PINNED, 50 * MIB, 50, 50), ALL, TABLE)
    assert prices["direct"] == times["direct"] == pytest.approx(10 + 50 * (1 + MIB / 50e3), rel=0.02)
    assert prices["kernel"] == pytest.approx(1.8 * times["kernel"])
    assert prices["staged"] > times["staged"] > times["direct"]


def test_a_choice_tells_its_reason_and_what_it_expects():
    shape = Shape(GPU, PINNED, 64 * MIB, 2048, 32)
    choice = Choice("staged", "driver", "no kernel: a test; ", _Reckoning(shape, ALL, TABLE))
    assert choice.expected_us == _prices(shape, ALL, TABLE)[0]["staged"]
    assert choice.why.startswith("no kernel: a test; estimated direct ")
    assert "us lost" in choice.why


@pytest.mark.parametrize("forced", [None, "direct", "kernel", "staged"])
def test_between_host_memories_there_is_one_way(forced):
    choice = choose(Shape(CPU, CPU, MIB, 64, 1), forced)
    assert choice.strategy == "direct"
    assert choice.path in ("host", "loop")
    assert choice.expected_us is None
    assert choice.why


def test_an_unknown_strategy_or_an_empty_bound_is_refused():
    with pytest.raises(ValueError, match="direct, kernel, staged"):
        TransferConfig(strategy="teleport")
    with pytest.raises(ValueError, match="slice_bytes"):
        TransferConfig(slice_bytes=0)
