"""Permutation compared with plain lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ArgumentError, RangeError
from kvtier.state import Permutation
from kvtier.state.permutation import find_runs


@st.composite
def permutations(draw):
    size0 = draw(st.integers(0, 12))
    return Permutation(draw(st.lists(st.integers(0, size0 + 3), max_size=16)), size0)


def rows_of(perm):
    return [None if new else int(row) for row, new in zip(perm.index, perm.is_new, strict=True)]


@given(perm=permutations())
def test_runs_of_old_rows_are_minimal_and_complete(perm):
    runs = find_runs(~perm.is_new, perm.index)
    copied = {}
    for new, old, length in zip(*runs, strict=True):
        copied |= {int(new) + k: int(old) + k for k in range(length)}
    rows = rows_of(perm)
    assert copied == {i: row for i, row in enumerate(rows) if row is not None}
    starts = [
        i
        for i, row in enumerate(rows)
        if row is not None and not (i and rows[i - 1] is not None and rows[i - 1] + 1 == row)
    ]
    assert runs[0].tolist() == starts


@given(perm=permutations())
def test_permutation_moved_rows_are_old_rows_at_other_places(perm):
    moved = np.flatnonzero(perm.is_moved).tolist()
    assert moved == [i for i, row in enumerate(rows_of(perm)) if row not in (None, i)]


@given(perm=permutations(), size=st.integers(0, 12))
def test_permutation_is_identity_if_all_rows_keep_their_place(perm, size):
    assert perm.is_identity == (rows_of(perm) == list(range(perm.size0)))
    assert Permutation.identity(size).is_identity
    assert Permutation.identity(len(perm)).size0 == len(perm)


def test_permutation_equality_ignores_the_index_of_new_rows():
    assert Permutation([0, 3], 2) == Permutation([0, 9], 2) != Permutation([3, 0], 2)
    assert hash(Permutation([0, 3], 2)) == hash(Permutation([0, 9], 2))
    assert repr(Permutation([1, 7], 2)) == "Permutation([1, new], size0=2)"


def test_permutation_with_invalid_rows_raises():
    with pytest.raises(RangeError, match="row 1 has the index -1"):
        Permutation([0, -1], 3)
    with pytest.raises(RangeError, match="-2 rows"):
        Permutation([], -2)
    with pytest.raises(ArgumentError, match="float"):
        Permutation([0.5], 3)
    with pytest.raises(ArgumentError, match=r"\(1, 2\)"):
        Permutation([[0, 1]], 3)


def test_permutation_copies_the_given_array():
    rows = np.array([1, 0])
    perm = Permutation(rows, 2)
    rows[0] = 0
    assert perm.index.tolist() == [1, 0]
    with pytest.raises(ValueError, match="read-only"):
        perm.index[0] = 0
