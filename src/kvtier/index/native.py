"""Python interface of native.c, which runs the learned policy. Each function of native.c also exists in Python."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import UnavailableError
from kvtier.native_code import Native, NativeSource, load

SOURCE = NativeSource(
    "kvtier.index",
    ("native.c", "native_policy.h", "native_tracker.h", "native_shadow.h"),
    ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-lm"),
)
I64 = np.ndarray[Any, np.dtype[np.int64]]
F64 = np.ndarray[Any, np.dtype[np.float64]]
_DOUBLE, _INT, _POINTER = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p


class TrackerState(ctypes.Structure):
    """State of a ReuseTracker and its TouchLog, shared by Python and C."""

    now: float
    """Latest time that a call has passed as `now`."""
    lowest: float
    """Value of the last victim."""
    version: int
    """Changes whenever the values of the classes or `is_lru` change."""
    is_lru: int
    """1 if blocks are evicted in LRU order: before the first fit, and for a while after an alarm of LRUGuard."""
    capacity: int
    """Size in blocks of a simulated LRU cache, called LRU below. LRUGuard compares hits in LRU with real hits."""
    next: int
    """Number of the next touch. A touch is one use of a run of blocks by a request (see tracker.py)."""
    oldest: int
    """Number of the oldest touch that the last `TouchLog.sync` kept."""
    frontier: int
    """LRU holds the blocks whose last use is the touch with this number or a later touch."""
    num_in_lru: int
    """Number of blocks in LRU."""
    num_requests: int
    """Requests since the last update of LRUGuard. The next three fields count their blocks, hits, and hits in LRU."""
    num_blocks: int
    num_hits: int
    num_lru_hits: int
    until_fit: int
    """Requests until the next fit."""

    _fields_ = [  # ctypes requires a list
        *((name, _DOUBLE) for name in ("now", "lowest")),
        *((name, _INT) for name in ("version", "is_lru", "capacity", "next", "oldest", "frontier", "num_in_lru")),
        *((name, _INT) for name in ("num_requests", "num_blocks", "num_hits", "num_lru_hits", "until_fit")),
        *((name, _INT) for name in ("num_touches", "ring", "max_runs", "guard_requests", "running")),
        # arrays of the tracker
        *((name, _POINTER) for name in ("left", "ends", "values", "floors", "rises_until", "uses_bin")),
    ]


class IndexNative:
    """The compiled functions. They hold the GIL, because most of them use Python objects."""

    def __init__(self, path: Path) -> None:
        if platform.python_implementation() != "CPython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise UnavailableError("native code of the index needs CPython with a GIL")
        library = ctypes.PyDLL(str(path))
        for name in ("policy", "log"):
            function = getattr(library, f"kvtier_{name}")
            function.restype, function.argtypes = ctypes.py_object, (ctypes.py_object, _POINTER)
        library.kvtier_best_ratios.restype, library.kvtier_best_ratios.argtypes = None, (_INT, *[_POINTER] * 3)
        library.kvtier_shadow.restype = ctypes.py_object
        library.kvtier_shadow.argtypes = (_INT, _POINTER, _INT, _INT, _POINTER, _POINTER)
        self._library = library

    def best_ratios(self, hits: F64, seconds: F64) -> F64:
        """Return the highest ratio of hits to seconds between the start of each age bucket and any later age.

        `hits` and `seconds` have one row per class. Element [row, i] is the sum over all age buckets before bucket i.
        """
        best = np.empty((len(hits), hits.shape[1] - 1))
        addresses = (array.ctypes.data for array in (hits, seconds, best))
        self._library.kvtier_best_ratios(len(hits), *addresses)
        return best

    def policy(self, tracker: object, state: TrackerState) -> tuple[Callable[..., Any], ...]:
        """Return the methods of a new policy: offer, withdraw, victim, contains, sizes (see NativeLearned).

        The methods keep `tracker` alive, because they read the values from its arrays.
        """
        return self._library.kvtier_policy(tracker, ctypes.addressof(state))  # type: ignore[no-any-return]

    def log(self, state: TrackerState) -> tuple[Callable[..., Any], ...]:
        """Return native versions of `enter`, `TouchLog.take`, `take_ghosts` and `add_ghost` (see tracker.py)."""
        return self._library.kvtier_log(state, ctypes.addressof(state))  # type: ignore[no-any-return]

    def shadow(
        self, sizes: I64, max_marks: int, place: int, ends: F64, uses_bin: I64
    ) -> tuple[Callable[..., Any], ...]:
        """Return native versions of `play`, `_take` and `num_held` for a LearnedShadow. The arrays must stay alive."""
        addresses = sizes.ctypes.data, max_marks, place, ends.ctypes.data, uses_bin.ctypes.data
        return self._library.kvtier_shadow(len(sizes), *addresses)  # type: ignore[no-any-return]


@functools.cache
def native() -> Native[IndexNative]:
    return load(SOURCE, IndexNative)
