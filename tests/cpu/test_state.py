"""State, warp and append agree with numpy or lists on every available placement. RowMap agrees with a dictionary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.errors import ArgumentError, DTypeError, RangeError
from kvtier.memory import CPU, PINNED, BatchCopy, Buffer, Placement, copy
from kvtier.memory.copy_plan import scan
from kvtier.memory.native import native
from kvtier.state import Added, Permutation, RowMap, State, append, warp, warp_ragged
from kvtier.state.warp import row_copies

dtypes = st.sampled_from([torch.uint8, torch.int32, torch.float64, torch.bfloat16])


def tensor(values, placement, dtype=torch.int32):
    """Return a tensor with these values at a placement."""
    host = torch.tensor(values, dtype=dtype)
    buffer = Buffer(host.numel(), dtype, placement)
    copy(Buffer.wrap(host.reshape(-1)), buffer)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return buffer.torch().view(host.shape)


def values(tensor):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return tensor.cpu().tolist()


# ---- worked examples ----


def test_warp_without_new_source_leaves_new_rows_unchanged(placement):
    functor = BatchCopy()
    out = tensor([[0], [0], [77]], placement)
    warp(tensor([[1], [2], [3]], placement), Permutation([2, 0, 5], 3), out, functor)
    functor.run()
    assert values(out) == [[3], [1], [77]]


def test_warp_reads_each_new_row_at_its_index_in_the_new_order(placement):
    functor = BatchCopy()
    out = tensor([[0]] * 4, placement)
    old, new = tensor([[1], [2], [3]], placement), tensor([[11], [12], [13], [14]], placement)
    warp(old, Permutation([2, 3, 0, 7], 3), out, functor, new=new)
    functor.run()
    assert values(out) == [[3], [12], [1], [14]]


def test_warp_ragged_moves_rows_of_different_lengths(placement):
    functor = BatchCopy()
    out = tensor([0] * 6, placement)
    old, new = tensor([1, 2, 31, 32, 33], placement), tensor([40], placement)
    perm = Permutation([2, 9, 0], 3)
    offsets = warp_ragged(old, [0, 2, 2, 5], perm, out, functor, new=new, new_offset=[0, 0, 1, 1])
    functor.run()
    assert values(out) == [31, 32, 33, 40, 1, 2]
    assert offsets.tolist() == [0, 3, 4, 6]


def test_append_extends_old_rows_and_copies_new_rows(placement):
    functor = BatchCopy()
    out = tensor([[0] * 4] * 3, placement)
    old = tensor([[1, 2, 0, 0], [3, 0, 0, 0]], placement)
    last, fresh = tensor([9, 8], placement), tensor([5, 6, 7], placement)
    sizes = append(old, [2, 1], last, fresh, [0, 0, 3, 3], Permutation([1, 4, 0], 2), out, functor)
    functor.run()
    assert sizes.tolist() == [2, 3, 3]
    assert values(out) == [[3, 8, 0, 0], [5, 6, 7, 0], [1, 2, 9, 0]]


# ---- random inputs against numpy ----


@st.composite
def permutations(draw):
    size0 = draw(st.integers(0, 10))
    return Permutation(draw(st.lists(st.integers(0, size0 + 2), max_size=12)), size0)


@given(perm=permutations(), width=st.integers(1, 5), with_new=st.booleans(), dtype=dtypes)
@settings(deadline=None, max_examples=60)
def test_warp_matches_numpy(placement, perm, width, with_new, dtype):
    old = np.arange(perm.size0 * width).reshape(perm.size0, width) % 100
    new = 100 + np.arange(len(perm) * width).reshape(len(perm), width) % 100
    expected = np.full((len(perm) + 1, width), 7)
    for i, (row, is_new) in enumerate(zip(perm.index, perm.is_new, strict=True)):
        if not is_new:
            expected[i] = old[row]
        elif with_new:
            expected[i] = new[i]
    functor = BatchCopy()
    out = tensor(np.full((len(perm) + 1, width), 7).tolist(), placement, dtype)
    source = tensor(old.tolist(), placement, dtype).view(perm.size0, width)
    fresh = tensor(new.tolist(), placement, dtype).view(len(perm), width)
    warp(source, perm, out, functor, new=fresh if with_new else None)
    functor.run()
    assert values(out) == expected.tolist()


@pytest.mark.skipif(native().code is None, reason="needs a C compiler")
@given(perm=permutations(), old=st.sampled_from([0, 1000]), new=st.sampled_from([0, 5000]), row_bytes=st.integers(0, 9))
def test_native_row_copies_match_numpy(perm, old, new, row_bytes):
    arguments = (perm.index, perm.size0, old, new, 9000, row_bytes)
    fast, slow = native().code.row_copies(*arguments), row_copies(*arguments)
    assert fast.flags.c_contiguous
    if row_bytes and fast.size:  # BatchCopy.table relies on these properties
        seen = scan(fast)
        assert (seen.independent, seen.starts) == (True, None)
        kept = sum(not is_new for is_new in perm.is_new)
        assert seen.nbytes == row_bytes * (kept * bool(old) + perm.num_new * bool(new))
    if row_bytes:
        assert fast.tolist() == slow.tolist()
    assert fast[2].sum() == slow[2].sum()


def test_row_copies_merge_adjacent_rows_but_not_old_with_new():
    # In memory, new row 3 directly follows old row 3. Even so, old rows 1 to 3 and new rows 3 and 4 need two copies.
    made = row_copies(np.array([1, 2, 3, 9, 9, 0, 9]), 4, 1000, 1000 + 4 * 8 - 3 * 8, 9000, 8)
    assert made.tolist() == [[1008, 1032, 1000, 1056], [9000, 9024, 9040, 9048], [24, 16, 8, 8]]


def test_warp_reads_new_rows_from_other_placement(placement):
    functor = BatchCopy()
    out, old = tensor([[0]] * 4, placement), tensor([[1], [2], [3]], placement)
    new = tensor([[11], [12], [13], [14]], PINNED if torch.cuda.is_available() else CPU)
    warp(old, Permutation([2, 3, 0, 7], 3), out, functor, new=new)
    functor.run()
    assert values(out) == [[3], [12], [1], [14]]


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_warp_in_place_reads_all_rows_before_writing(placement, data):
    size = data.draw(st.integers(1, 10))
    perm = Permutation(data.draw(st.lists(st.integers(0, size), min_size=1, max_size=size)), size)
    rows = (np.arange(size * 3).reshape(size, 3) % 100).tolist()
    expected = [rows[row] if row < size else rows[i] for i, row in enumerate(perm.index.tolist())] + rows[len(perm) :]
    functor = BatchCopy()
    here = tensor(rows, placement)
    warp(here, perm, here, functor, in_place=True)
    functor.run()
    assert values(here) == expected


def test_warp_in_place_copies_only_moved_rows():
    here = tensor([[k] for k in range(6)], Placement("cpu"))
    with BatchCopy() as batch:
        warp(here, Permutation([0, 2, 1, 3, 4, 5], 6), here, batch, in_place=True)
    assert batch.result.num_calls == 4  # two rows, each copied to scratch memory and back
    with BatchCopy() as batch:
        warp(here, Permutation.identity(6), here, batch, in_place=True)
    assert batch.result.num_calls == 0


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_warp_ragged_matches_lists(placement, data):
    perm = data.draw(permutations())
    old = data.draw(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=perm.size0, max_size=perm.size0))
    new = data.draw(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=len(perm), max_size=len(perm)))
    picked = [
        new[i] if is_new else old[row] for i, (row, is_new) in enumerate(zip(perm.index, perm.is_new, strict=True))
    ]
    functor = BatchCopy()
    out = tensor([7] * (sum(map(len, picked)) + 2), placement)
    offsets = warp_ragged(
        tensor([e for row in old for e in row], placement),
        np.cumsum([0, *map(len, old)]),
        perm,
        out,
        functor,
        new=tensor([e for row in new for e in row], placement),
        new_offset=np.cumsum([0, *map(len, new)]),
    )
    functor.run()
    assert values(out) == [*(e for row in picked for e in row), 7, 7]
    assert offsets.tolist() == np.cumsum([0, *map(len, picked)]).tolist()


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_append_matches_lists(placement, data):
    perm, capacity = data.draw(permutations()), 5
    rows = st.lists(st.integers(1, 99), max_size=capacity - 1)
    old = data.draw(st.lists(rows, min_size=perm.size0, max_size=perm.size0))
    new = data.draw(st.lists(rows, min_size=len(perm), max_size=len(perm)))
    last = data.draw(st.lists(st.integers(1, 99), min_size=perm.size0, max_size=perm.size0))
    picked = [
        new[i] if is_new else [*old[row], last[row]]
        for i, (row, is_new) in enumerate(zip(perm.index, perm.is_new, strict=True))
    ]
    padded = [row + [0] * (capacity - len(row)) for row in old]
    functor = BatchCopy()
    out = tensor([[0] * capacity] * (len(perm) + 1), placement)
    sizes = append(
        tensor(padded, placement).view(perm.size0, capacity),
        list(map(len, old)),
        tensor(last, placement),
        tensor([e for row in new for e in row], placement),
        np.cumsum([0, *map(len, new)]),
        perm,
        out,
        functor,
    )
    functor.run()
    assert sizes.tolist() == list(map(len, picked))
    assert values(out)[: len(perm)] == [row + [0] * (capacity - len(row)) for row in picked]


# ---- invalid arguments ----


def test_warp_with_mismatched_rows_raises(placement):
    rows = tensor([[1, 2], [3, 4]], placement)
    functor = BatchCopy()
    perm = Permutation([1, 0], 2)
    with pytest.raises(RangeError, match="a0 has 2 rows, but the old order needs 3"):
        warp(rows, Permutation([0], 3), tensor([[0, 0]], placement), functor)
    with pytest.raises(RangeError, match="b1 has 1 rows, but the new order needs 2"):
        warp(rows, perm, tensor([[0, 0]], placement), functor)
    with pytest.raises(ArgumentError, match=r"rows of a0 are \(2,\), rows of b1 are \(3,\)"):
        warp(rows, perm, tensor([[0] * 3] * 2, placement), functor)
    with pytest.raises(DTypeError, match=r"int32.*int64"):
        warp(rows, perm, tensor([[0, 0]] * 2, placement, torch.int64), functor)
    with pytest.raises(ArgumentError, match="in_place"):
        warp(rows, perm, rows, functor)
    with pytest.raises(ArgumentError, match="in_place"):
        warp(rows, perm, tensor([[0, 0]] * 2, placement), functor, in_place=True)
    with pytest.raises(RangeError, match="new has 1 rows"):
        warp(rows, Permutation([1, 5], 2), tensor([[0, 0]] * 2, placement), functor, new=tensor([[0, 0]], placement))
    functor.discard()


def test_warp_with_overlapping_memory_raises(placement):
    rows, functor, perm = tensor([[1], [2], [3]], placement), BatchCopy(), Permutation([1, 0], 2)
    with pytest.raises(ArgumentError, match="a0 and b1 overlap"):
        warp(rows[:2], perm, rows[1:], functor)
    with pytest.raises(ArgumentError, match="new and b1 overlap"):
        warp(tensor([[1], [2]], placement), Permutation([1, 5], 2), rows[:2], functor, new=rows[1:])
    flat = tensor([1, 2, 3], placement)
    with pytest.raises(ArgumentError, match="a0 and out overlap"):
        warp_ragged(flat[:2], [0, 1, 2], perm, flat, functor, new=tensor([0], placement), new_offset=[0, 0, 0])
    assert len(functor) == 0


def test_invalid_offsets_and_capacities_raise(placement):
    flat, out, functor = tensor([1, 2, 3], placement), tensor([0, 0, 0], placement), BatchCopy()
    perm = Permutation([1, 0], 2)
    new = {"new": flat, "new_offset": [0, 0, 0]}
    with pytest.raises(ArgumentError, match="offset0 must not decrease, but 1 follows 2 at index 1"):
        warp_ragged(flat, [0, 2, 1], perm, out, functor, **new)
    with pytest.raises(RangeError, match="offset0 ends at 9, but there are 3"):
        warp_ragged(flat, [0, 2, 9], perm, out, functor, **new)
    with pytest.raises(ArgumentError, match="3 integers"):
        warp_ragged(flat, [0, 2], perm, out, functor, **new)
    with pytest.raises(RangeError, match="out has 2 rows, but the new order needs 3"):
        warp_ragged(flat, [0, 2, 3], perm, out[:2], functor, **new)
    full = tensor([[1, 2], [3, 4]], placement)
    with pytest.raises(RangeError, match="row 0 would have 3 elements, but its capacity is 2"):
        append(full, [1, 2], flat, flat, [0, 0, 0], perm, tensor([[0, 0]] * 2, placement), functor)
    with pytest.raises(ArgumentError, match="equal row capacities"):
        append(full, [1, 2], flat, flat, [0, 0, 0], perm, tensor([[0] * 3] * 2, placement), functor)
    with pytest.raises(RangeError, match=r"a0_size\[0\] is negative"):
        append(full, [-1, 1], flat, flat, [0, 0, 0], perm, tensor([[0, 0]] * 2, placement), functor)
    functor.discard()


# ---- State ----


def test_state_warp_with_identity_does_nothing(placement):
    state, functor = State((4, 2), "i32", placement), BatchCopy()
    front = state.front.data_ptr()
    assert not state.warp(Permutation.identity(3), functor)
    assert (state.front.data_ptr(), len(functor)) == (front, 0)


def test_state_warp_moves_rows_and_swaps_front_and_back(placement):
    state = State((4,), torch.int32, placement)
    state.front.copy_(torch.tensor([10, 20, 30, 40]))
    with BatchCopy() as functor:
        assert state.warp(Permutation([2, 0, 9], 3), functor, new=tensor([0, 0, 99], placement))
    assert values(state.front)[:3] == [30, 10, 99]
    assert values(state.back) == [10, 20, 30, 40]
    state.swap()
    assert values(state.front) == [10, 20, 30, 40]


@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_state_append_matches_lists(placement, data):
    """Each step removes, moves and adds rows at random and changes elements. Each row is compared with a list."""
    capacity, max_rows = 5, 8
    state, functor = State((max_rows, capacity), "i32", placement), BatchCopy()
    state.front.zero_()
    state.back.zero_()
    lists: list[list[int]] = []
    for step in range(4):
        index = data.draw(st.lists(st.integers(0, len(lists) + 1), max_size=max_rows))
        if data.draw(st.booleans()):  # old rows keep their places, as in most steps of an engine
            index = [*range(len(lists)), *index][: data.draw(st.integers(0, max_rows))]
        perm, front = Permutation(index, len(lists)), state.front.data_ptr()
        moves = any(row != at for at, row in enumerate(index) if row < len(lists))
        source = 1 + np.arange(max_rows * capacity).reshape(max_rows, capacity) + 100 * step
        added, after = Added([], [], []), []
        for at, row in enumerate(index):
            kept = lists[row] if row < len(lists) else []
            first = data.draw(st.integers(0, len(kept)))
            count = data.draw(st.integers(0, capacity - first))
            if data.draw(st.booleans()) or row >= len(lists):
                for column, value in zip(added, (at, first, count), strict=True):
                    column.append(value)
                kept = [*kept[:first], *source[at, first : first + count]]
            after.append(kept)
        given_rows = tensor(source.tolist(), placement)
        assert state.append(perm, [len(row) for row in after], added, given_rows, functor) == moves
        functor.run()
        assert (state.front.data_ptr() == front) != moves
        lists = after
        assert [row[: len(kept)] for row, kept in zip(values(state.front), lists, strict=False)] == lists


def test_state_append_copies_only_new_elements_of_rows_that_stay(placement):
    state, functor = State((3, 4), "i32", placement), BatchCopy()
    source = tensor([[1, 2, 3, 4]] * 3, placement)
    state.append(Permutation([9, 9], 0), [2, 3], Added([0, 1], [0, 0], [2, 3]), source, functor)
    assert functor.run().nbytes == 5 * 4
    state.append(Permutation([0, 9], 2), [2, 1], Added([1], [0], [1]), source, functor)
    assert functor.run().nbytes == 4
    state.append(Permutation([1], 2), [1], Added([], [], []), source, functor)
    assert functor.run().nbytes == 4, "one element of one row moves"
    assert values(state.front)[0][0] == 1


def test_state_append_with_invalid_rows_raises(placement):
    state, functor, stay = State((3, 4), "i32", placement), BatchCopy(), Permutation.identity(2)
    source = tensor([[0] * 4] * 3, placement)
    for added in (Added([2], [0], [1]), Added([0], [2], [3]), Added([0], [-1], [1]), Added([-1], [0], [1])):
        with pytest.raises(RangeError, match="there are 2 rows of 4 elements"):
            state.append(stay, [0, 0], added, source, functor)
    with pytest.raises(RangeError, match="row 1 has 5 elements"):
        state.append(Permutation([1, 0], 2), [1, 5], Added([], [], []), source, functor)
    with pytest.raises(ArgumentError, match="sizes must contain at least 2"):
        state.append(Permutation([1, 0], 2), [1], Added([], [], []), source, functor)
    with pytest.raises(RangeError, match="the new order needs 4"):
        state.append(Permutation([9] * 4, 0), [0] * 4, Added([], [], []), source, functor)
    with pytest.raises(DTypeError, match="int64"):
        state.append(stay, [0, 0], Added([], [], []), tensor([[0] * 4] * 3, placement, torch.int64), functor)
    assert len(functor) == 0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_state_accepts_zero_rows_or_empty_rows(placement, shape):
    state = State(shape, "u8", placement)
    size0 = shape[0]
    with BatchCopy() as functor:
        state.warp(Permutation(range(1, size0), size0) if size0 else Permutation([], 0), functor)


def test_permutation_accepts_numpy_integers(placement):
    state = State((3,), "i32", placement)
    state.front.copy_(torch.tensor([1, 2, 3]))
    with BatchCopy() as functor:
        state.warp(Permutation(np.array([2, 0], np.uint8), np.int64(3)), functor)
    assert values(state.front)[:2] == [3, 1]
    with pytest.raises(TypeError):
        Permutation([0], 1.5)


def test_state_without_rows_raises():
    for shape in ((), (-1, 2)):
        with pytest.raises(ArgumentError, match="needs rows"):
            State(shape, "u8")


# ---- RowMap ----


class RowMapMachine(RuleBasedStateMachine):
    """Adds, removes and reorders sequences at random. Each sequence must keep its assigned row."""

    CAPACITY = 9

    @initialize()
    def start(self):
        self.map, self.order, self.row_of, self.next_name = RowMap(self.CAPACITY), [], {}, 0

    @rule(data=st.data(), new=st.integers(0, 4))
    def step(self, data, new):
        kept = data.draw(st.permutations(range(len(self.order))))[: data.draw(st.integers(0, len(self.order)))]
        index = data.draw(st.permutations([*kept, *[len(self.order) + 1] * new]))
        perm = Permutation(index, len(self.order))
        if len(kept) + new > self.CAPACITY:
            with pytest.raises(RangeError, match=f"{new} new sequences need rows"):
                self.map.apply(perm)
            return
        assigned = self.map.apply(perm).tolist()
        names = []
        for row in index:
            if row < len(self.order):
                names.append(self.order[row])
            else:
                names.append(self.next_name)
                self.row_of[self.next_name] = assigned.pop(0)
                self.next_name += 1
        self.order = names

    @invariant()
    def rows_match_model(self):
        if hasattr(self, "map"):
            rows = sorted([*self.map.rows.tolist(), *self.map._free.tolist()])
            assert rows == list(range(self.CAPACITY)), "a row is lost or assigned twice"
            assert self.map.rows.tolist() == [self.row_of[name] for name in self.order]
            assert self.map.num_free == self.CAPACITY - len(self.order)


TestRowMap = RowMapMachine.TestCase


def test_row_map_with_invalid_permutation_raises():
    rows = RowMap(3)
    rows.apply(Permutation([5, 5], 0))
    with pytest.raises(ArgumentError, match="has 1 old rows, but the map has 2"):
        rows.apply(Permutation([0], 1))
    with pytest.raises(ArgumentError, match="fork"):
        rows.apply(Permutation([0, 0], 2))
    with pytest.raises(RangeError, match="-1 rows"):
        RowMap(-1)
    with pytest.raises(ValueError, match="read-only"):
        rows.rows[0] = 2
