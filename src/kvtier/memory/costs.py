"""CostTable: the time of every copy path, the slowdown of a model by copies, and the bandwidth of the link to the host.

The table is measured once per GPU and driver, saved in a file, and used to choose copy paths and transfer strategies.
The time of a path for n pieces of one size is fixed + n * per_piece. Both values are measured at a few sizes and
interpolated on a logarithmic scale. Pieces of mixed sizes are treated as pieces of the mean size.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvtier.errors import FormatError, UnavailableError
from kvtier.files import cache_dir, write_atomically
from kvtier.memory import cuda
from kvtier.memory.buffer import Buffer
from kvtier.memory.copy_paths import PATH_NAMES, CopyContext, PathName, Pieces, run_path, why_not
from kvtier.memory.copy_plan import DST, NBYTES, SRC
from kvtier.memory.placement import CPU, PINNED, Placement
from kvtier.memory.stream import Stream

_ROUNDS = 3  # number of measurements; the shortest one is used
_PIECE_BYTES = 1 << 20  # large enough for DMA, and typical for blocks
_MATRIX = 4096  # rows of a square bf16 matrix; a product takes 0.2 ms on an H200
_PRODUCTS = 12  # matrix products per measurement
_TIMED_PATHS: tuple[PathName, ...] = ("driver", "gather", "loop")


def _measure_links(device: Buffer, host: Buffer, stream: Stream) -> dict[str, float]:
    """Return the GB/s of one contiguous copy, by direction ("cuda>pinned")."""
    links = {}
    for src, dst in ((device, host), (host, device)):
        job = CopyContext(src.placement, dst.placement, stream)
        links[cost_key(job)] = src.nbytes / _time_us("loop", job, _scattered(src, dst, src.nbytes, 1)) / 1e3
    return links


def _measure_lost(
    placement: Placement, device: Buffer, host: Buffer, links: Mapping[str, float]
) -> dict[str, dict[PathName, float]]:
    """Return the share of time that a matrix product loses while a path copies, by direction and path."""
    compute, stream = Stream(placement), Stream(placement)
    with torch.cuda.stream(compute.native):
        a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=placement.torch) for _ in range(2))
        out = torch.empty_like(a)

    def seconds(*copies: tuple[PathName, CopyContext, Pieces]) -> float:
        """Return the time of `_PRODUCTS` products while these copies run on the other stream."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for copy in copies:
            run_path(*copy)
        with torch.cuda.stream(compute.native):
            begin.record()
            for _ in range(_PRODUCTS):
                torch.mm(a, b, out=out)
            end.record()
        end.synchronize()
        stream.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    alone = min(seconds() for _ in range(_ROUNDS))
    lost: dict[str, dict[PathName, float]] = {}
    for src, dst in ((device, host), (host, device)):
        job = CopyContext(src.placement, dst.placement, stream)
        pieces = _scattered(src, dst, _PIECE_BYTES, src.nbytes // _PIECE_BYTES)
        # enough copies to run until the products have ended
        num_copies = int(2 * alone * links[cost_key(job)] * 1e9 / pieces.nbytes) + 1
        for path in _TIMED_PATHS:
            if why_not(path, job) is None:
                shared = min(seconds(*[(path, job, pieces)] * num_copies) for _ in range(_ROUNDS))
                lost.setdefault(cost_key(job), {})[path] = max(0.0, 1 - alone / shared)
    return lost


def _scattered(src: Buffer, dst: Buffer, size: int, count: int) -> Pieces:
    """Return `count` copies of `size` bytes each, between random offsets."""
    random, slots = np.random.default_rng(size), src.nbytes // size
    table = np.empty((3, count), np.int64)
    table[SRC] = src.data() + random.permutation(slots)[:count] * size
    table[DST] = dst.data() + random.permutation(slots)[:count] * size
    table[NBYTES] = size
    return Pieces(table)


_FORMAT = 2  # version of the saved file
_SIZE_STEP = 2  # log2 of the ratio between consecutive sizes
_SIZES = tuple(4096 << shift for shift in range(0, 12, _SIZE_STEP))  # 4 KiB to 4 MiB
_POOL_BYTES = 64 << 20  # size of each Buffer for the measurements
_FEW_PIECES, _MAX_PIECES = 8, 1024  # the times for few and for many pieces yield the two values of a Cost
_BRIEF_PIECES, _BRIEF_BYTES = 256, 16 << 20  # limits for slow paths, see `_measure`
_REPEATS, _PAGEABLE_REPEATS = 5, 2  # copies of pageable memory take ten times as long and need less precision


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one path at one piece size, in microseconds."""

    nbytes: int
    fixed_us: float
    per_piece_us: float


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity, because copy_steps uses it as a cache key
class CostTable:
    """Costs by direction ("cuda>pinned") and path, sorted by piece size. `origin` names the GPU and the driver."""

    origin: str
    costs: Mapping[str, Mapping[PathName, tuple[Cost, ...]]]
    links: Mapping[str, float] = field(default_factory=dict)
    """GB/s of one contiguous copy, by direction."""
    lost: Mapping[str, Mapping[PathName, float]] = field(default_factory=dict)
    """Share of time that a matrix product loses while a path copies, by direction and path."""
    seconds: float = 0.0  # duration of the calibration

    def estimate_us(self, job: CopyContext, num_pieces: int, nbytes: int) -> dict[PathName, float]:
        """Return the expected microseconds of each measured path for `num_pieces` pieces of `nbytes` in total."""
        size = nbytes / num_pieces
        # interpolate between rows k and k + 1; beyond the last row, the cost of a piece is proportional to its size
        place = (math.log2(size) - math.log2(_SIZES[0])) / _SIZE_STEP if size > _SIZES[0] else 0.0
        k = min(int(place), len(_SIZES) - 2)
        share, beyond = min(place - k, 1.0), max(size / _SIZES[-1], 1.0)
        estimates: dict[PathName, float] = {}
        for path, rows in self.costs.get(cost_key(job), {}).items():
            low, high = rows[k], rows[k + 1]
            fixed = low.fixed_us + share * (high.fixed_us - low.fixed_us)
            per_piece = low.per_piece_us * (high.per_piece_us / low.per_piece_us) ** share
            estimates[path] = fixed + num_pieces * per_piece * beyond
        return estimates

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Read the output of `to_json`. Raise FormatError for any other text."""
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise FormatError(f"the cost table has format {content['format']}, but this build reads {_FORMAT}")
            costs = {
                name: {path: tuple(Cost(**row) for row in rows) for path, rows in paths.items()}
                for name, paths in content["costs"].items()
            }
            for rows in (rows for paths in costs.values() for rows in paths.values()):
                if [row.nbytes for row in rows] != [*_SIZES]:
                    raise FormatError(f"the piece sizes of the cost table are not {_SIZES}")
                if not all(row.fixed_us >= 0 and row.per_piece_us > 0 for row in rows):
                    raise FormatError(f"invalid cost in a cost table: {rows}")
            links = {name: float(rate) for name, rate in content["links"].items()}
            lost = {
                name: {path: float(share) for path, share in paths.items()} for name, paths in content["lost"].items()
            }
            return cls(content["origin"], costs, links, lost, float(content["seconds"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FormatError(f"not a cost table: {error!r}") from error


def cost_key(job: CopyContext) -> str:
    """Return the key of the costs for a job, such as "cuda>pinned". The key contains no GPU index."""
    return f"{job.src.kind}>{job.dst.kind}"


@functools.cache  # read once per process and GPU
def cost_table(placement: Placement) -> CostTable:
    """Return the saved costs of this GPU and driver. If there are none, measure and save them, which takes seconds."""
    return saved_costs(placement) or calibrate(placement)


def saved_costs(placement: Placement) -> CostTable | None:
    """Return the saved costs of this GPU and driver, or None if there are none or they cannot be read."""
    try:
        path = _file(placement)
        return CostTable.from_json(path.read_text()) if path.exists() else None
    except (FormatError, UnavailableError, OSError, UnicodeDecodeError):
        return None  # the file has another version or is damaged, or there is no cache directory


def calibrate(placement: Placement, progress: Callable[[str], None] = lambda _: None) -> CostTable:
    """Measure every usable path in every direction of this GPU, and save the result in the cache directory.

    `cost_table` calls this function if there are no saved costs. Without a cache directory, each process measures.
    """
    begin = time.perf_counter()
    with cuda.current_context(placement):
        stream = Stream(placement)
        pools = {where: Buffer(_POOL_BYTES, "u8", where) for where in (placement, PINNED, CPU)}
        other = Buffer(_POOL_BYTES, "u8", placement)
        for pool in (*pools.values(), other):
            pool.fill(1, stream if pool.placement.is_device else None)  # so that page faults are not measured
        stream.synchronize()
        costs: dict[str, dict[PathName, tuple[Cost, ...]]] = {}
        over_link = ((placement, PINNED), (PINNED, placement), (placement, CPU), (CPU, placement))
        for src, dst in ((placement, placement), *over_link):
            job = CopyContext(src, dst, stream)
            target = other if src == dst else pools[dst]
            for path in PATH_NAMES:
                if why_not(path, job) is None:
                    progress(f"{cost_key(job)} {path}")
                    rows = tuple(_measure(path, job, pools[src], target, size) for size in _SIZES)
                    costs.setdefault(cost_key(job), {})[path] = rows
        progress("links, and the time that the model loses to copies")
        links = _measure_links(pools[placement], pools[PINNED], stream)
        lost = _measure_lost(placement, pools[placement], pools[PINNED], links)
    origin = f"{torch.cuda.get_device_name(placement.torch)}, driver {cuda.driver_release()}"
    table = CostTable(origin, costs, links, lost, time.perf_counter() - begin)
    with contextlib.suppress(UnavailableError, OSError):  # without a cache directory, the next process measures again
        write_atomically(_file(placement), table.to_json().encode())
    cost_table.cache_clear()
    return table


def _measure(path: PathName, job: CopyContext, src: Buffer, dst: Buffer, size: int) -> Cost:
    few = _FEW_PIECES
    # use fewer pieces for the path "loop", whose time is linear, and for pageable memory, which is slow
    brief = path == "loop" or CPU in (job.src, job.dst)
    many = max(2 * few, min(_BRIEF_PIECES, _BRIEF_BYTES // size)) if brief else min(_MAX_PIECES, _POOL_BYTES // size)
    pieces = _scattered(src, dst, size, many)
    few_us = _time_us(path, job, pieces.part(slice(few)))
    many_us = _time_us(path, job, pieces)
    per_piece = max((many_us - few_us) / (many - few), 1e-3)
    return Cost(size, max(few_us - few * per_piece, 0.0), per_piece)


def _time_us(path: PathName, job: CopyContext, pieces: Pieces) -> float:
    """Return the shortest time in us from the call to the end of the copy, over a few runs after a warm-up run."""
    assert job.stream is not None
    best = math.inf
    for attempt in range((_PAGEABLE_REPEATS if CPU in (job.src, job.dst) else _REPEATS) + 1):
        job.stream.synchronize()
        start = time.perf_counter()
        run_path(path, job, pieces)
        job.stream.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best * 1e6


def _file(placement: Placement) -> Path:
    name = torch.cuda.get_device_name(placement.torch).replace(" ", "-").replace("/", "-")
    return cache_dir() / f"costs-{name}-{cuda.driver_release()}.json"
