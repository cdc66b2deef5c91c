"""Many scattered copies as one batch: gather the blocks of a sequence from a paged KV cache, and compact rows.

BatchCopy merges adjacent copies and runs dependent copies in order. It chooses the cheapest path of the machine: host
copies, the driver's batch call, or a gather kernel on a GPU.
"""

from __future__ import annotations

import numpy as np

from kvtier.memory import BatchCopy, Buffer

NUM_BLOCKS, BLOCK_ELEMENTS = 64, 4096


def gather(cache: Buffer, table: list[int], target: Buffer) -> None:
    """Copy the blocks of a block table to consecutive places of `target`."""
    sources = np.array(table) * BLOCK_ELEMENTS
    targets = np.arange(len(table)) * BLOCK_ELEMENTS
    with BatchCopy() as copy:  # runs the copies at the end of the `with` body
        copy.pieces(cache, sources, BLOCK_ELEMENTS, target, targets)
    result = copy.result
    assert result is not None
    print(f"gathered {len(table)} blocks in {result.num_entries} copies, {result.nbytes >> 10} KiB, path {result.path}")


def shift(rows: Buffer, row_elements: int, first: int) -> None:
    """Move row `first` and all later rows one place towards row 0. Each copy overwrites the source of the previous."""
    num_rows = rows.size // row_elements
    with BatchCopy() as copy:
        for row in range(first, num_rows):
            copy(rows.slice(row * row_elements), row_elements, rows.slice((row - 1) * row_elements))
    result = copy.result
    assert result is not None
    print(f"moved {result.num_calls} rows in {result.num_waves} waves of independent copies")


def main() -> None:
    cache = Buffer(NUM_BLOCKS * BLOCK_ELEMENTS, "f32")
    cache.numpy()[:] = np.arange(cache.size, dtype=np.float32)
    table = [5, 6, 7, 8, 40, 41, 3, 60]  # consecutive blocks become one copy
    target = Buffer(len(table) * BLOCK_ELEMENTS, "f32")
    gather(cache, table, target)
    assert (target.numpy().reshape(len(table), -1) == cache.numpy().reshape(NUM_BLOCKS, -1)[table]).all()

    rows = Buffer(10 * 256, "i32")
    rows.numpy()[:] = np.repeat(np.arange(10), 256)
    shift(rows, 256, first=4)
    assert rows.numpy().reshape(10, 256)[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 9]


if __name__ == "__main__":
    main()
