"""The functions of native.c. Each has a Python equivalent, for machines without a compiler."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.memory.copy_plan import I64, Scan
from kvtier.native_code import Native, load

_FLAGS = ("-O3", "-shared", "-fPIC", "-pthread")
# Below this a thread (20 to 60 us to start and join) costs more than it saves: cached memory copies at 50 GB/s.
_BYTES_PER_THREAD = 2 << 20
# A few cores saturate a socket's memory; more only take them from the model.
_MAX_THREADS = 8


class MemoryNative:
    """The compiled functions. All of them release the GIL."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        self._copy = library.kvtier_copy_pieces
        self._copy.argtypes = [size, pointer, pointer, pointer, number, ctypes.c_int]
        self._scan = library.kvtier_scan
        self._scan.argtypes = [size, pointer, pointer, pointer, pointer, pointer, pointer]
        self._scan.restype = None
        self._row_copies = library.kvtier_row_copies
        self._row_copies.argtypes = [size, pointer, number, number, number, number, number, pointer]
        self._row_copies.restype = size
        self._fill_rows = library.kvtier_fill_rows
        self._fill_rows.argtypes = [size, pointer, pointer, pointer, size, pointer]
        self._fill_rows.restype = number
        self._fill_pieces = library.kvtier_fill_pieces
        self._fill_pieces.argtypes = [size, pointer, pointer, pointer, pointer]
        self._fill_pieces.restype = number
        self._sort_moves = library.kvtier_sort_moves
        self._sort_moves.argtypes = [size, pointer, pointer, number, number, ctypes.c_int, pointer]
        self._block_copies = library.kvtier_block_copies
        self._block_copies.argtypes = [size, pointer, pointer, *[number] * 6, ctypes.c_int, pointer]
        self._block_copies.restype = size
        self._crc32 = library.kvtier_crc32
        self._crc32.argtypes = [size, pointer, pointer, pointer, ctypes.c_int]
        self._crc32.restype = None
        self._num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))

    def copy(self, table: I64, total: int | None = None) -> int:
        """Copy independent pieces (rows SRC, DST, NBYTES) of `total` bytes. Returns the number of threads used."""
        if not table.shape[1]:
            return 1
        if total is None:
            total = int(np.add.reduce(table[2]))
        threads = max(1, min(self._num_threads, total // _BYTES_PER_THREAD))
        src, dst, nbytes = row_addresses(table)
        return int(self._copy(table.shape[1], src, dst, nbytes, total, threads))

    def scan(self, table: I64, scopes: I64 | None = None) -> Scan:
        """copy_plan.scan in one pass."""
        n = table.shape[1]
        starts, result = np.empty(n, np.int64), (ctypes.c_int64 * 4)()
        src, dst, nbytes = row_addresses(table)
        scope = None if scopes is None else scopes.ctypes.data
        self._scan(n, src, dst, nbytes, scope, address_of(starts), ctypes.addressof(result))
        disjoint, independent, total, num_pieces = result
        return Scan(bool(disjoint), bool(independent), total, None if num_pieces == n else starts[:num_pieces])

    def row_copies(self, index: I64, size0: int, old: int, new: int, out: int, row_bytes: int) -> I64:
        """kvtier.state.warp.row_copies in one pass."""
        n = len(index)
        if not n:
            return np.empty((3, 0), np.int64)
        flat = np.empty(3 * n, np.int64)
        # tobytes: the address of a read-only array costs ten times as much as copying 256 numbers
        count = self._row_copies(n, index.tobytes(), size0, old, new, out, row_bytes, address_of(flat))
        return flat[: 3 * count].reshape(3, count)

    def fill_rows(self, table: I64, capacity: int, block: int) -> int:
        """gather.fill_rows into the memory at address `block`."""
        src, dst, nbytes = row_addresses(table)
        return int(self._fill_rows(table.shape[1], src, dst, nbytes, capacity, block))

    def fill_pieces(self, table: I64, block: int) -> int:
        """gather.fill_pieces into the memory at address `block`."""
        return int(self._fill_pieces(table.shape[1], *row_addresses(table), block))

    def sort_moves(
        self, device_ids: I64, host_ids: I64, num_device: int, num_host: int, *, to_host: bool
    ) -> I64 | None:
        """kvtier.transfer.compiled.sort_moves, as rows order, device ids, host ids. None if an id is wrong."""
        n = len(device_ids)
        flat = np.empty(4 * n, np.int64)
        ids = address_of(device_ids), address_of(host_ids)
        good = self._sort_moves(n, *ids, num_device, num_host, to_host, address_of(flat))
        return flat[: 3 * n].reshape(3, n) if good else None

    def block_copies(
        self,
        device_ids: I64,
        host_ids: I64,
        device: tuple[int, int],
        host: tuple[int, int],
        nbytes: int,
        run_blocks: int,
        *,
        to_host: bool,
    ) -> I64:
        """kvtier.transfer.compiled.block_copies in one pass."""
        n = len(device_ids)
        flat = np.empty(3 * n, np.int64)
        ids = address_of(device_ids), address_of(host_ids)
        count = self._block_copies(n, *ids, *device, *host, nbytes, run_blocks, to_host, address_of(flat))
        return flat[: 3 * count].reshape(3, count)

    def crc32(self, pointers: I64, nbytes: I64, threads: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """zlib.crc32 of the bytes at each address, with at most `threads` threads."""
        sums = np.zeros(len(pointers), np.uint32)
        if len(sums):
            workers = max(1, min(self._num_threads, threads, len(sums)))
            self._crc32(len(sums), pointers.ctypes.data, nbytes.ctypes.data, sums.ctypes.data, workers)
        return sums


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return array.ctypes.data at a third of its cost, for arrays that are contiguous, writable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type] # an ndarray is a buffer


def row_addresses(table: I64) -> tuple[int, int, int]:
    """Return the addresses of the three rows, each of which must be contiguous (as in a slice of columns)."""
    between_rows, between_columns = table.strides
    if table.flags.c_contiguous:
        first = address_of(table)
        return first, first + between_rows, first + 2 * between_rows
    if between_columns != table.itemsize and table.shape[1] > 1:
        raise ArgumentError(f"a table of copies must have contiguous rows, this one has strides {table.strides}")
    first = table.ctypes.data
    return first, first + between_rows, first + 2 * between_rows


@functools.cache
def native() -> Native[MemoryNative]:
    return load("kvtier.memory", ["native.c"], _FLAGS, MemoryNative)
