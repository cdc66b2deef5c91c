"""Native code and numpy reject the same block ids, sort valid ids in the same order, and return the same copies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ArgumentError, RangeError
from kvtier.native_code import Native
from kvtier.transfer import Direction, compiled
from kvtier.transfer.block_view import check_moves
from kvtier.transfer.compiled import block_copies, sort_moves

ids_of_both = st.integers(1, 5000).flatmap(
    lambda num_blocks: st.tuples(
        st.just(num_blocks), st.lists(st.tuples(st.integers(0, num_blocks - 1), st.integers(0, num_blocks - 1)))
    )
)


def in_numpy(function, *arguments):
    """Call a function without native code, as on a machine without a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "native", lambda: Native(None, "a test"))
        return function(*arguments)


@given(ids_of_both, st.sampled_from(Direction))
def test_sort_moves_sorts_by_destination_or_raises(ids, direction):
    num_blocks, pairs = ids
    device, host = [a for a, _ in pairs], [b for _, b in pairs]
    targets = host if direction is Direction.D2H else device
    if len({*targets}) < len(targets):
        for call in (sort_moves, lambda *arguments: in_numpy(sort_moves, *arguments)):
            with pytest.raises(ArgumentError, match="twice"):
                call(device, host, direction, num_blocks, num_blocks)
        return
    actual, twin = (
        call(device, host, direction, num_blocks, num_blocks)
        for call in (sort_moves, lambda *arguments: in_numpy(sort_moves, *arguments))
    )
    assert actual.device_ids.tolist() == device
    assert actual.host_ids.tolist() == host
    assert sorted(actual.order.tolist()) == list(range(len(pairs)))
    assert (actual.sorted_host if direction is Direction.D2H else actual.sorted_device).tolist() == sorted(targets)
    for name in ("order", "sorted_device", "sorted_host"):
        assert getattr(actual, name).tolist() == getattr(twin, name).tolist()


def test_sort_moves_sorts_ids_beyond_32_bits():
    random = np.random.default_rng(0)
    num_blocks = 1 << 33
    host = random.choice(1 << 30, 3000, replace=False) * 8 + random.integers(0, 8, 3000)
    actual = sort_moves(np.arange(3000), host, Direction.D2H, 3000, num_blocks)
    assert actual.sorted_host.tolist() == sorted(host.tolist())
    assert actual.sorted_device.tolist() == np.argsort(host).tolist()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("device", "host", "error", "match"),
    [
        ([0, 4], [0, 1], RangeError, r"device_ids\[1\] is 4, outside 0..3"),
        ([0, 1], [-1, 1], RangeError, r"host_ids\[0\] is -1, outside 0..8"),
        ([0], [0, 1], ArgumentError, "must have the same length"),
        ([0.5], [0], ArgumentError, "whole numbers"),
        ([[0]], [[0]], ArgumentError, "list of whole numbers"),
    ],
)
def test_sort_moves_of_invalid_ids_raises(device, host, error, match, direction):
    with pytest.raises(error, match=match):
        sort_moves(device, host, direction, 4, 9)


@given(
    st.lists(st.integers(-2, 6), max_size=6),
    st.lists(st.integers(-2, 6), max_size=6),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(Direction),
)
def test_check_moves_accepts_exactly_the_valid_ids(device, host, num_device, num_host, direction):
    targets = host if direction is Direction.D2H else device
    bad_device = next((k for k, each in enumerate(device) if not 0 <= each < num_device), None)
    bad_host = next((k for k, each in enumerate(host) if not 0 <= each < num_host), None)
    for call in (sort_moves, check_moves):
        if bad_device is not None:
            with pytest.raises(
                RangeError, match=rf"device_ids\[{bad_device}\] is {device[bad_device]}, outside 0..{num_device - 1}"
            ):
                call(device, host, direction, num_device, num_host)
        elif bad_host is not None:
            with pytest.raises(
                RangeError, match=rf"host_ids\[{bad_host}\] is {host[bad_host]}, outside 0..{num_host - 1}"
            ):
                call(device, host, direction, num_device, num_host)
        elif len(device) != len(host):
            with pytest.raises(ArgumentError, match=f"got {len(device)} and {len(host)}"):
                call(device, host, direction, num_device, num_host)
        elif len({*targets}) < len(targets):
            again = min(each for each in targets if targets.count(each) > 1)
            with pytest.raises(ArgumentError, match=f"block {again} occurs twice"):
                call(device, host, direction, num_device, num_host)
        else:
            call(device, host, direction, num_device, num_host)


def test_sort_moves_accepts_ids_of_any_integer_type():
    for ids in (range(3), np.array([0, 1, 2], np.int32), np.arange(6)[::-2] // 2, (0, 1, 2), np.arange(3)[::-1]):
        frozen = np.array(ids)
        frozen.flags.writeable = False
        for given_ids in (ids, frozen):
            actual = sort_moves(given_ids, [5, 3, 4], Direction.D2H, 3, 9)
            assert actual.sorted_host.tolist() == [3, 4, 5]
            assert actual.sorted_device.tolist() == np.array(ids)[[1, 2, 0]].tolist()


def test_sort_moves_copies_the_ids():
    ids = np.array([2, 0, 1])
    actual = sort_moves(ids, ids, Direction.H2D, 3, 3)
    ids[:] = 7
    assert actual.device_ids.tolist() == actual.host_ids.tolist() == [2, 0, 1]


@given(
    st.lists(st.integers(0, 30), unique=True, min_size=1),
    st.randoms(use_true_random=False),
    st.integers(0, 6),
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from(Direction),
)
def test_native_and_numpy_block_copies_are_equal(host, random, run_blocks, device_gap, host_gap, direction):
    device = (
        sorted(random.sample(range(40), len(host))) if random.random() < 0.5 else random.sample(range(40), len(host))
    )
    host = sorted(host)
    arguments = (
        np.array(device),
        np.array(host),
        (1 << 40, 64 + device_gap),
        (1 << 20, 64 + host_gap),
        64,
        run_blocks,
        direction,
    )
    actual, twin = block_copies(*arguments), in_numpy(block_copies, *arguments)
    assert actual.tolist() == twin.tolist()
    device_row, host_row = (0, 1) if direction is Direction.D2H else (1, 0)
    moved = {
        (int(copy[device_row]) + k, int(copy[host_row]) + k) for copy in actual.T for k in range(0, int(copy[2]), 64)
    }
    places = zip(device, host, strict=True)
    assert moved == {((1 << 40) + a * (64 + device_gap), (1 << 20) + b * (64 + host_gap)) for a, b in places}
    # a piece of the host memory has `run_blocks` blocks; 0 means that there is only one piece
    if run_blocks:
        for copy in actual.T:
            first = (int(copy[host_row]) - (1 << 20)) // (64 + host_gap)
            last = first + int(copy[2]) // 64 - 1
            assert first // run_blocks == last // run_blocks, "a copy spans two pieces of the host memory"


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("run_blocks", "sizes"), [(0, [10]), (1, [1] * 10), (4, [2, 4, 4]), (5, [3, 5, 2]), (20, [10])]
)
def test_block_copies_join_adjacent_blocks_within_a_piece(run_blocks, sizes, direction):
    ids = np.arange(10)
    for call in (block_copies, lambda *arguments: in_numpy(block_copies, *arguments)):
        # on the host, the blocks have the ids 2 to 11; a piece of the host memory has `run_blocks` blocks
        table = call(ids, ids + 2, (1 << 20, 64), (1 << 30, 64), 64, run_blocks, direction)
        assert (table[2] // 64).tolist() == sizes
