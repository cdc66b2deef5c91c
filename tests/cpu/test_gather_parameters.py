"""Parameter blocks of the gather kernel encode a table of pieces. The tests decode the blocks as the kernel does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.memory.gather import fill_pieces, fill_rows
from kvtier.memory.native import native

CAPACITY = 50
"""Number of pieces that fit into a parameter block in most tests."""
ROWS_HEADER_WORDS, PIECES_HEADER_WORDS = 10, 2
"""Number of 4-byte words before the arrays in the structs Rows<N> and Pieces<N> of gather.cu."""


def decode_rows(block, capacity):
    """Decode `block` as a Rows<capacity> of the kernel. Return the table and the shift of the offsets."""
    src_base, dst_base, nbytes = block[:6].view(np.int64).tolist()
    count, shift = int(block[6]), int(block[8])
    offsets = block[ROWS_HEADER_WORDS:].reshape(2, capacity)[:, :count].astype(np.int64) << shift
    return np.stack([offsets[0] + src_base, offsets[1] + dst_base, np.full(count, nbytes)]), shift


@st.composite
def tables(draw):
    count = draw(st.integers(1, 40))
    unit = draw(st.sampled_from([1, 2, 4, 8, 16, 64, 4096]))
    span = draw(st.sampled_from([100, 1 << 20, 1 << 33]))
    base = draw(st.integers(1, 1 << 46))
    column = st.lists(st.integers(0, span), min_size=count, max_size=count)
    nbytes = draw(st.integers(1, 9)) if draw(st.booleans()) else np.array(draw(column)) + 1
    return np.stack(
        [np.array(draw(column)) * unit + base, np.array(draw(column)) * unit + base, np.full(count, nbytes)]
    )


def fillers():
    return [fill_rows] if native().code is None else [fill_rows, native().code.fill_rows]


@given(table=tables())
def test_fill_rows_encodes_table_or_returns_zero(table):
    results = []
    for fill in fillers():
        block = np.zeros(ROWS_HEADER_WORDS + 2 * CAPACITY, np.uint32)
        size = fill(table, CAPACITY, block)
        results.append((size, block.tolist()))
        uniform = len(set(table[2].tolist())) == 1
        if size:
            decoded, shift = decode_rows(block, CAPACITY)
            assert uniform
            assert size == table[2, 0]
            assert decoded.tolist() == table.tolist()
            assert shift <= 4
        else:
            offsets = np.concatenate([table[0] - table[0].min(), table[1] - table[1].min()])
            aligned = not np.any(offsets % 16)
            # an offset is stored as a 32-bit number of units, and a unit has at most 16 bytes
            assert not uniform or int(offsets.max()) >= (1 << 36 if aligned else 1 << 32)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("fill", fillers())
def test_fill_rows_encodes_aligned_offsets_below_64_gib(fill):
    last_offset = (64 << 30) - 16  # the largest multiple of 16 below 64 GiB
    table = np.array([[16, 16 + last_offset], [32, 48], [16, 16]])  # source offsets 0 and last_offset
    block = np.zeros(ROWS_HEADER_WORDS + 4, np.uint32)
    assert fill(table, 2, block) == 16
    assert decode_rows(block, 2)[0].tolist() == table.tolist()
    table[0, 1] += 16
    assert fill(table, 2, block) == 0


@given(table=tables())
def test_fill_pieces_encodes_table(table):
    for fill in [fill_pieces] if native().code is None else [fill_pieces, native().code.fill_pieces]:
        block = np.zeros(PIECES_HEADER_WORDS + 6 * CAPACITY, np.uint32)
        assert fill(table, CAPACITY, block) == table[2].max()
        assert block[0] == table.shape[1]
        pieces = block[PIECES_HEADER_WORDS:][: 6 * table.shape[1]].view(np.int64).reshape(-1, 3)
        assert pieces.T.tolist() == table.tolist()


def test_fill_rows_accepts_slice_of_columns():
    table = np.arange(30, dtype=np.int64).reshape(3, 10) + 100
    table[2] = 7
    for fill in fillers():
        block = np.zeros(ROWS_HEADER_WORDS + 2 * 5, np.uint32)
        assert fill(table[:, 3:7], 5, block) == 7
        assert decode_rows(block, 5)[0].tolist() == table[:, 3:7].tolist()
