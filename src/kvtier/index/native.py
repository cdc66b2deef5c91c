"""Python interface of native.c: the learned policy's work per request. Each function has an equivalent in Python."""

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
    """State of a ReuseTracker and its TouchLog, shared by Python and C. Touches are numbered serially (tracker.py)."""

    now: float
    """Latest time that a call has passed as `now`."""
    lowest: float
    """Value of the last victim."""
    version: int
    """Changes whenever the values change."""
    is_lru: int
    """1 if the order is LRU: before the first fit, and for a while after an alarm of the guard."""
    capacity: int
    """Size in blocks of the simulated LRU cache. The guard compares the real cache with it."""
    next: int
    """Number of the next touch."""
    oldest: int
    """Number of the oldest touch that the last `sync` kept. `sync` keeps the latest NUM_TOUCHES."""
    frontier: int
    """Number of the oldest touch that LRU would still hold."""
    num_in_lru: int
    """How many blocks LRU would hold. The last use of each of them is touch `frontier` or a later touch."""
    num_requests: int
    """Requests since the last update of the guard. The next three fields count their blocks, hits and hits with LRU."""
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
    """The compiled functions. They hold the GIL, because they use Python objects."""

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
        """Return the highest ratio of hits to seconds from each edge to any later edge.

        `hits` and `seconds` contain sums up to each edge, [row, edge]. The result is [row, edge] without the last edge.
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
        """Return four functions for a new tracker: `enter`, `TouchLog.take`, `take_ghosts` and `add_ghost`."""
        return self._library.kvtier_log(state, ctypes.addressof(state))  # type: ignore[no-any-return]

    def shadow(
        self, sizes: I64, max_marks: int, place: int, ends: F64, uses_bin: I64
    ) -> tuple[Callable[..., Any], ...]:
        """Return `play`, `take` and `num_held` of a new LearnedShadow. `ends` and `uses_bin` must stay alive."""
        addresses = sizes.ctypes.data, max_marks, place, ends.ctypes.data, uses_bin.ctypes.data
        return self._library.kvtier_shadow(len(sizes), *addresses)  # type: ignore[no-any-return]


@functools.cache
def native() -> Native[IndexNative]:
    return load(SOURCE, IndexNative)
