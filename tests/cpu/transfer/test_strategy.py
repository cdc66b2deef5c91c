"""The estimated prices of transfer strategies. The calibration is made up, so that the prices are known.

A price is the transfer time plus the time by which the transfer delays the LLM's computation.
"""

import pytest
import torch

from kvtier.memory import CPU, PINNED, CostTable, Placement
from kvtier.memory.copy_paths import CopyContext
from kvtier.memory.costs import _SIZES, Cost
from kvtier.transfer import TransferConfig
from kvtier.transfer.strategy import (
    FIRST_CHUNK_BYTES,
    StrategyChoice,
    TransferShape,
    _prices,
    choose,
)

GPU = Placement("cuda")
MIB = 1 << 20


def rows(gbs, piece_us):
    """Return the costs of a path: 10 us per transfer, `piece_us` per piece, and the time of the bytes at `gbs` GB/s."""
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
ALL = {"direct": "driver", "kernel": "gather", "staged": "driver"}
LINK, INSIDE = CopyContext(GPU, PINNED, None), CopyContext(GPU, GPU, None)


def cheapest(shape, table=TABLE):
    prices = _prices(shape, ALL, table)[1]
    return min(prices, key=prices.get)


@pytest.mark.parametrize(("parts", "best"), [(32, "direct"), (32 * 64, "staged"), (32 * 512, "staged")])
def test_cheapest_strategy_depends_on_size_of_parts(parts, best):
    assert cheapest(TransferShape(GPU, PINNED, 64 * MIB, parts, 32)) == best


def test_kernel_is_cheapest_if_it_does_not_slow_down_the_model():
    harmless = CostTable("a test", TABLE.costs, TABLE.links, {"cuda>pinned": {"driver": 0.0, "gather": 0.0}})
    shape = TransferShape(GPU, PINNED, 64 * 4096, 64, 64)
    assert cheapest(shape, harmless) == "kernel"


def test_prices_are_transfer_times_plus_delay_of_model():
    times, prices = _prices(TransferShape(GPU, PINNED, 50 * MIB, 50, 50), ALL, TABLE)
    assert prices["direct"] == times["direct"] == pytest.approx(10 + 50 * (1 + MIB / 50e3), rel=0.02)
    assert prices["kernel"] == pytest.approx(1.8 * times["kernel"])
    assert prices["staged"] > times["staged"] > times["direct"]


def test_prices_equal_manual_calculation_from_calibration():
    table = CostTable("a test", TABLE.costs, TABLE.links, {"cuda>pinned": {"driver": 0.25, "gather": 0.5}})
    for nbytes in (2 * MIB, 64 * MIB):  # smaller and larger than the first chunk
        shape = TransferShape(GPU, PINNED, nbytes, 2048, 32)
        times, prices = _prices(shape, ALL, table)
        over_link = table.estimate_us(LINK, 2048, nbytes)
        blocks = table.estimate_us(LINK, 32, nbytes)["driver"]
        gather = table.estimate_us(INSIDE, 2048, nbytes)["gather"]
        first = gather * min(1.0, FIRST_CHUNK_BYTES / nbytes)
        assert times == pytest.approx(
            {"direct": over_link["driver"], "kernel": over_link["gather"], "staged": blocks + first}
        )
        assert prices["direct"] == pytest.approx(1.25 * times["direct"])
        assert prices["kernel"] == pytest.approx(1.5 * times["kernel"])
        assert prices["staged"] == pytest.approx(1.25 * times["staged"] + gather)
    # Without measured losses, a kernel copy delays the LLM by the whole time of the copy, and a driver copy by 0 us.
    unknown = CostTable("a test", TABLE.costs, TABLE.links, {})
    times, prices = _prices(TransferShape(GPU, PINNED, MIB, 64, 64), ALL, unknown)
    assert (prices["direct"], prices["kernel"]) == pytest.approx((times["direct"], 2 * times["kernel"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("sides", [(GPU, PINNED), (PINNED, GPU)], ids=str)
def test_choose_without_gpu_returns_direct_and_reasons(sides):
    choice = choose(TransferShape(*sides, MIB, 64, 1))
    assert (choice.strategy, choice.path) == ("direct", "loop")
    reasons = {each.partition(": ")[0]: each.partition(": ")[2] for each in choice.why.split("; ")}
    assert [*reasons] == ["no kernel", "no staged"]
    assert "contiguous" not in choice.why
    assert "no staged: blocks are contiguous on both sides" in choose(TransferShape(*sides, MIB, 64, 64)).why
    # a forced "staged" is not rejected for contiguous blocks; here it is rejected only because there is no GPU
    forced = choose(TransferShape(*sides, MIB, 64, 64), "staged")
    assert forced.why.startswith(f"staged was forced, but {reasons['no staged']}; no kernel: ")
    assert "contiguous" not in forced.why
    assert choose(TransferShape(*sides, MIB, 64, 1), "direct").why == "forced"


def test_strategy_choice_has_reason_and_estimate():
    shape = TransferShape(GPU, PINNED, 64 * MIB, 2048, 32)
    choice = StrategyChoice("staged", "driver", "no kernel: a test; ", lambda: _prices(shape, ALL, TABLE))
    assert choice.expected_us == _prices(shape, ALL, TABLE)[0]["staged"]
    assert choice.why.startswith("no kernel: a test; estimated direct ")
    assert "us lost" in choice.why


@pytest.mark.parametrize("forced", [None, "direct", "kernel", "staged"])
def test_choose_between_host_memories_returns_direct(forced):
    choice = choose(TransferShape(CPU, CPU, MIB, 64, 1), forced)
    assert choice.strategy == "direct"
    assert choice.path in ("host", "loop")
    assert choice.expected_us is None
    assert choice.why


def test_transfer_config_accepts_minimum_values():
    config = TransferConfig("staged", 1, 1, 1, chunk_bytes=1, num_chunks=1)
    assert (config.slice_bytes, config.num_chunks) == (1, 1)


def test_transfer_config_with_invalid_value_raises():
    with pytest.raises(ValueError, match="direct, kernel, staged"):
        TransferConfig(strategy="teleport")
    with pytest.raises(ValueError, match="slice_bytes"):
        TransferConfig(slice_bytes=0)
