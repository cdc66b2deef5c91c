"""Running the pieces of a copy plan has the same result as running its entries one after another.

An entry is one copy that the caller added. A piece is one or more entries merged into one copy. If scopes are given,
only entries of the same scope can merge, and entries with the scope ALONE never merge. Pieces of one wave are
independent, and waves run one after another. If too many waves are needed, the plan is `in_order`: its pieces run one
after another.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.memory.copy_plan import ALONE, DST, MAX_WAVES, NBYTES, SRC, plan_copies, scan
from kvtier.memory.native import native

MEMORY = 300


def entries_of(*copies, scope=None):
    """Build entries from (src, nbytes, dst) triples."""
    src, nbytes, dst = zip(*copies, strict=True)
    return np.array([src, dst, nbytes]), None if scope is None else np.array(scope)


def pieces_of(plan):
    return list(zip(plan.table[SRC].tolist(), plan.table[NBYTES].tolist(), plan.table[DST].tolist(), strict=True))


@st.composite
def any_entries(draw, has_own_halves=False):
    """Generate random copies within one memory. With `has_own_halves`, no source overlaps a destination.

    All sources are then in the first half of the memory, and all destinations are in the second half.
    """
    size, low_dst = (MEMORY // 2, MEMORY // 2) if has_own_halves else (MEMORY, 0)
    count = draw(st.integers(1, 30))
    nbytes = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    src = [draw(st.integers(0, size - n)) for n in nbytes]
    dst = [low_dst + draw(st.integers(0, size - n)) for n in nbytes]
    scope = draw(st.none() | st.lists(st.integers(ALONE, 1), min_size=count, max_size=count))
    return entries_of(*zip(src, nbytes, dst, strict=True), scope=scope)


def run_entries(entries_in_order, memory):
    result = memory.copy()
    for src, nbytes, dst in entries_in_order:
        result[dst : dst + nbytes] = result[src : src + nbytes].copy()
    return result


def check(plan, entries):
    """Check that each entry occurs once, and that merges stay within a scope.

    Unless the plan is `in_order`, also check that the pieces of each wave are independent.
    """
    seen = [plan.caller_entry(part) for piece in range(plan.num_pieces) for part in plan.parts(piece)]
    assert sorted(seen) == list(range(entries[0].shape[1]))
    assert plan.first_entries().tolist() == [plan.caller_entry(plan.parts(k)[0]) for k in range(plan.num_pieces)]
    for piece, (src, nbytes, dst) in enumerate(pieces_of(plan)):
        members = [plan.caller_entry(part) for part in plan.parts(piece)]
        assert entries[0][NBYTES][members].sum() == nbytes
        assert (entries[0][SRC][members[0]], entries[0][DST][members[0]]) == (src, dst)
        if len(members) > 1 and entries[1] is not None:
            assert len(set(entries[1][members].tolist())) == 1
            assert entries[1][members[0]] != ALONE
    assert plan.wave_starts[0] == 0
    assert plan.wave_starts[-1] == plan.num_pieces
    if not plan.in_order:
        for wave in range(plan.num_waves):
            check_independent(pieces_of(plan)[plan.wave_starts[wave] : plan.wave_starts[wave + 1]])


def check_independent(pieces):
    """Check that no piece reads or writes the destination of another piece."""
    for k, (_, n, dst) in enumerate(pieces):
        for j, (other_src, m, other_dst) in enumerate(pieces):
            if j != k:
                assert dst + n <= other_dst or other_dst + m <= dst
                assert dst + n <= other_src or other_src + m <= dst


def scans():
    code = native().code
    return [scan] if code is None else [scan, code.scan]


@given(entries=st.one_of(any_entries(), any_entries(has_own_halves=True)), seed=st.integers(0, 99))
def test_any_order_within_waves_gives_the_sequential_result(entries, seed):
    memory = np.random.default_rng(seed).integers(0, 256, MEMORY, dtype=np.uint8)
    expected = run_entries(zip(entries[0][SRC], entries[0][NBYTES], entries[0][DST], strict=True), memory)
    for scan_entries in scans():
        plan = plan_copies(*entries, scan_entries)
        check(plan, entries)
        pieces, order = pieces_of(plan), []
        for wave in range(len(plan.wave_starts) - 1):
            numbers = np.arange(plan.wave_starts[wave], plan.wave_starts[wave + 1])
            order += numbers.tolist() if plan.in_order else np.random.default_rng(seed).permutation(numbers).tolist()
        assert np.array_equal(run_entries([pieces[k] for k in order], memory), expected)


@pytest.mark.skipif(native().code is None, reason="needs a C compiler")
@given(entries=st.one_of(any_entries(), any_entries(has_own_halves=True)))
def test_compiled_scan_matches_numpy_scan(entries):
    slow, fast = scan(*entries), native().code.scan(*entries)
    assert (slow.disjoint, slow.independent, slow.nbytes) == (fast.disjoint, fast.independent, fast.nbytes)
    assert (None if slow.starts is None else slow.starts.tolist()) == (
        None if fast.starts is None else fast.starts.tolist()
    )


GROUPED = [(100, 4, 200), (104, 4, 204), (120, 4, 208), (124, 4, 212), (112, 4, 216)]


def test_adjacent_entries_merge():
    assert pieces_of(plan_copies(*entries_of(*GROUPED))) == [(100, 8, 200), (120, 8, 208), (112, 4, 216)]


def test_adjacent_entries_merge_in_any_order():
    plan = plan_copies(*entries_of(*reversed(GROUPED)))
    assert pieces_of(plan) == [(100, 8, 200), (120, 8, 208), (112, 4, 216)]
    assert [[plan.caller_entry(part) for part in plan.parts(k)] for k in range(3)] == [[4, 3], [2, 1], [0]]


def test_entries_in_different_scopes_do_not_merge():
    assert plan_copies(*entries_of(*GROUPED, scope=[ALONE] * 5)).num_pieces == 5
    pieces = pieces_of(plan_copies(*entries_of(*GROUPED, scope=[0, 1, 2, 2, 2])))
    assert pieces == [(100, 4, 200), (104, 4, 204), (120, 8, 208), (112, 4, 216)]


def test_entries_adjacent_only_in_source_or_target_do_not_merge():
    assert plan_copies(*entries_of((0, 4, 100), (4, 4, 108))).num_pieces == 2
    assert plan_copies(*entries_of((0, 4, 100), (8, 4, 104))).num_pieces == 2


def test_shuffled_adjacent_entries_merge_into_one_piece():
    slots = np.random.default_rng(0).permutation(100_000) * 64
    plan = plan_copies(np.stack([slots, slots + (1 << 40), np.full(100_000, 64)]))
    assert pieces_of(plan) == [(0, 6_400_000, 1 << 40)]


def test_entry_that_reads_written_bytes_runs_in_later_wave():
    plan = plan_copies(*entries_of((0, 4, 100), (100, 4, 200), (200, 4, 250), (8, 4, 16)))
    assert plan.num_waves == 3
    assert sorted(pieces_of(plan)[:2]) == [(0, 4, 100), (8, 4, 16)]


def test_adjacent_entries_in_different_waves_do_not_merge():
    # the last entry reads the result of the first entry
    plan = plan_copies(*entries_of((50, 4, 4), (0, 4, 100), (4, 4, 104)))
    assert pieces_of(plan) == [(50, 4, 4), (0, 4, 100), (4, 4, 104)]
    assert plan.wave_starts == [0, 2, 3]
    # the third entry reads the result of the first entry, so it runs in a later wave than the entries adjacent to it
    plan = plan_copies(*entries_of((50, 4, 4), (0, 4, 100), (4, 4, 104), (8, 4, 108), (12, 4, 112)))
    assert pieces_of(plan) == [(50, 4, 4), (0, 4, 100), (8, 8, 108), (4, 4, 104)]
    assert plan.wave_starts == [0, 3, 4]


def test_writes_to_overlapping_destinations_keep_order():
    plan = plan_copies(*entries_of((0, 4, 100), (8, 4, 102)))
    assert pieces_of(plan) == [(0, 4, 100), (8, 4, 102)]
    assert plan.num_waves == 2


def test_source_is_read_before_it_is_overwritten():
    plan = plan_copies(*entries_of((50, 4, 100), (0, 4, 50)))
    assert pieces_of(plan) == [(50, 4, 100), (0, 4, 50)]
    assert plan.num_waves == 2


def test_entries_with_shared_source_run_in_one_wave():
    plan = plan_copies(*entries_of(*((0, 4, 100 + 4 * k) for k in range(40))))
    assert (plan.num_waves, plan.num_pieces) == (1, 40)


def test_self_overlapping_entry_is_marked():
    plan = plan_copies(*entries_of((0, 10, 5)))
    assert plan.overlapping
    assert not plan_copies(*entries_of((0, 10, 10))).overlapping
    assert not plan_copies(*entries_of((0, 10, 10), (10, 10, 30))).overlapping
    with_another = plan_copies(*entries_of((0, 10, 5), (100, 4, 200)))
    assert (with_another.overlapping, with_another.in_order, with_another.num_waves) == (True, False, 1)


def test_long_dependency_chain_runs_in_order():
    chain = [(4 * k, 4, 4 * (k + 1)) for k in range(MAX_WAVES + 1)]
    plan = plan_copies(*entries_of(*chain))
    assert plan.in_order
    assert pieces_of(plan) == chain
    shorter = plan_copies(*entries_of(*chain[:-1]))
    assert not shorter.in_order
    assert shorter.num_waves == MAX_WAVES


def test_many_writes_to_same_address_run_in_order():
    n = 10_000
    plan = plan_copies(np.stack([np.arange(n) * 8, np.full(n, 1 << 30), np.full(n, 8)]))
    assert plan.in_order


def test_plan_without_entries_is_empty():
    plan = plan_copies(np.empty((3, 0), np.int64))
    assert (plan.num_pieces, plan.num_waves, plan.nbytes, plan.wave_starts) == (0, 0, 0, [0])
