"""Python interface of native.c. Each function has a Python equivalent, for machines without a compiler."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.memory.copy_plan import I64, Scan
from kvtier.native_code import Native, NativeSource, load, num_usable_cores

SOURCE = NativeSource("kvtier.memory", ("native.c",), ("-O3", "-shared", "-fPIC", "-pthread"))
# Minimum bytes per thread. Starting and joining a thread takes 20 to 60 us, during which one core copies 1 to 3 MB.
_BYTES_PER_THREAD = 2 << 20
# A few cores saturate the memory bandwidth of a socket. More threads would only take cores from the model.
_MAX_THREADS = 8

U32 = np.ndarray[Any, np.dtype[np.uint32]]
Strided = tuple[int, int]
"""Address of the first block, and bytes from one block to the next."""


class MemoryNative:
    """The compiled functions. All of them release the GIL.

    Methods without a docstring return the same results as the Python functions of the same names in other modules.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, size, number, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
        table = (size, pointer, pointer, pointer)
        signatures: dict[str, tuple[Any, ...]] = {  # result, then arguments
            "copy_pieces": (flag, *table, number, flag),
            "scan": (None, *table, pointer, pointer, pointer),
            "row_copies": (size, size, pointer, *[number] * 5, pointer),
            "fill_rows": (number, *table, size, pointer),
            "fill_pieces": (number, *table, pointer),
            "sort_moves": (flag, size, pointer, pointer, number, number, flag, pointer),
            "block_copies": (size, size, pointer, pointer, *[number] * 6, flag, pointer),
            "crc32": (None, *table, flag),
        }
        for name, (result, *arguments) in signatures.items():
            function = getattr(library, f"kvtier_{name}")
            function.restype, function.argtypes = result, arguments
        self._library = library
        self._num_threads = min(_MAX_THREADS, num_usable_cores())

    def copy(self, table: I64, total: int | None = None) -> int:
        """Copy independent pieces (rows SRC, DST, NBYTES), `total` bytes in all. Return the number of threads."""
        if not table.shape[1]:
            return 1
        if total is None:
            total = int(np.add.reduce(table[2]))
        threads = max(1, min(self._num_threads, total // _BYTES_PER_THREAD))
        return int(self._library.kvtier_copy_pieces(table.shape[1], *row_addresses(table), total, threads))

    def scan(self, table: I64, scopes: I64 | None = None) -> Scan:
        n = table.shape[1]
        starts, result = np.empty(n, np.int64), (ctypes.c_int64 * 4)()
        scope = None if scopes is None else scopes.ctypes.data
        outputs = address_of(starts), ctypes.addressof(result)
        self._library.kvtier_scan(n, *row_addresses(table), scope, *outputs)
        disjoint, independent, total, num_pieces = result
        return Scan(bool(disjoint), bool(independent), total, None if num_pieces == n else starts[:num_pieces])

    def row_copies(self, index: I64, size0: int, old: int, new: int, out: int, row_bytes: int) -> I64:
        n = len(index)
        if not n:
            return np.empty((3, 0), np.int64)
        flat = np.empty(3 * n, np.int64)
        # tobytes, because getting the address of a read-only array costs ten times as much as copying 256 numbers
        count = self._library.kvtier_row_copies(n, index.tobytes(), size0, old, new, out, row_bytes, address_of(flat))
        return flat[: 3 * count].reshape(3, count)

    def fill_rows(self, table: I64, capacity: int, block: U32) -> int:
        rows = row_addresses(table)
        return int(self._library.kvtier_fill_rows(table.shape[1], *rows, capacity, address_of(block)))

    def fill_pieces(self, table: I64, _capacity: int, block: U32) -> int:
        return int(self._library.kvtier_fill_pieces(table.shape[1], *row_addresses(table), address_of(block)))

    def sort_moves(
        self, device_ids: I64, host_ids: I64, num_device: int, num_host: int, *, to_host: bool
    ) -> I64 | None:
        """Return rows (order, sorted device ids, sorted host ids), or None if an id is invalid or a target repeats."""
        n = len(device_ids)
        flat = np.empty(4 * n, np.int64)
        ids = address_of(device_ids), address_of(host_ids)
        good = self._library.kvtier_sort_moves(n, *ids, num_device, num_host, to_host, address_of(flat))
        return flat[: 3 * n].reshape(3, n) if good else None

    def block_copies(
        self,
        device_ids: I64,
        host_ids: I64,
        device: Strided,
        host: Strided,
        nbytes: int,
        run_blocks: int,
        *,
        to_host: bool,
    ) -> I64:
        n = len(device_ids)
        flat = np.empty(3 * n, np.int64)
        ids = address_of(device_ids), address_of(host_ids)
        count = self._library.kvtier_block_copies(
            n, *ids, *device, *host, nbytes, run_blocks, to_host, address_of(flat)
        )
        return flat[: 3 * count].reshape(3, count)

    def crc32(self, pointers: I64, nbytes: I64, threads: int) -> U32:
        """Return zlib.crc32 of the bytes at each address, computed by at most `threads` threads."""
        sums = np.zeros(len(pointers), np.uint32)
        if len(sums):
            workers = max(1, min(self._num_threads, threads, len(sums)))
            self._library.kvtier_crc32(len(sums), pointers.ctypes.data, nbytes.ctypes.data, sums.ctypes.data, workers)
        return sums


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return array.ctypes.data, at a third of the cost. The array must be contiguous, writable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type] # an ndarray is a buffer


def row_addresses(table: I64) -> tuple[int, int, int]:
    """Return the addresses of the three rows. Each row must be contiguous; the table may be a slice of columns."""
    between_rows, between_columns = table.strides
    if table.flags.c_contiguous:
        first = address_of(table)
    elif between_columns == table.itemsize or table.shape[1] <= 1:
        first = table.ctypes.data
    else:
        raise ArgumentError(f"a table of copies must have contiguous rows, but this one has strides {table.strides}")
    return first, first + between_rows, first + 2 * between_rows


@functools.cache
def native() -> Native[MemoryNative]:
    return load(SOURCE, MemoryNative)
