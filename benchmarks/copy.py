"""Scattered copies: BatchCopy compared with torch.index_select, the driver call, copy loops and one contiguous copy.

python -m benchmarks.copy                 on the GPU if there is one, else on the CPU
python -m benchmarks.copy --device cpu    on the CPU
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from benchmarks.report import Bar, Row, arguments, at_least, at_most, medians, print_table, report
from kvtier.memory import BatchCopy, Buffer, copy
from kvtier.memory.copy_plan import plan_copies, scan
from kvtier.memory.native import native

PIECE, PIECES, SLOTS = 4096, 10_000, 20_000
ENTRIES = 100_000


def main() -> None:
    parser = arguments("Scattered copies on this machine.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        from benchmarks.copy_gpu import measure_gpu

        name, (rows, bars) = "copy_gpu", measure_gpu()
    else:
        name, (rows, bars) = "copy_cpu", measure_cpu()
    report(name, rows, bars, options.results)


def measure_cpu() -> tuple[list[Row], list[Bar]]:
    """Measure 10,000 scattered pieces of 4 KiB between two buffers, and the planning of 100,000 entries."""
    random = np.random.default_rng(0)
    src, dst = Buffer(SLOTS * PIECE, "u8"), Buffer(SLOTS * PIECE, "u8")
    src.numpy()[:] = random.integers(0, 256, src.size, dtype=np.uint8)
    dst.fill(0)
    src_at, dst_at = (random.permutation(SLOTS)[:PIECES] * PIECE for _ in range(2))
    pairs = list(zip(src_at.tolist(), dst_at.tolist(), strict=True))
    a, b = src.numpy(), dst.numpy()
    a_view, b_view = src.memoryview(), dst.memoryview()
    moved = PIECES * PIECE
    whole_src, whole_dst = src.slice(0, moved), dst.slice(0, moved)

    def loop_numpy() -> None:
        for x, y in pairs:
            b[y : y + PIECE] = a[x : x + PIECE]

    def loop_memoryview() -> None:
        for x, y in pairs:
            b_view[y : y + PIECE] = a_view[x : x + PIECE]

    def batch() -> None:
        with BatchCopy() as pieces:
            pieces.pieces(src, src_at, PIECE, dst, dst_at)

    # torch's worker threads spin for a while after a parallel copy and occupy a core: follow it with a loop
    seconds = medians(
        {
            "BatchCopy": batch,
            "one contiguous copy, numpy": lambda: np.copyto(b[:moved], a[:moved]),
            "one contiguous copy, torch": lambda: copy(whole_src, whole_dst),
            "loop of memoryview slice copies": loop_memoryview,
            "loop of numpy slice copies": loop_numpy,
        },
        rounds=25,
    )
    dst.fill(0)
    batch()
    assert all((b[y : y + PIECE] == a[x : x + PIECE]).all() for x, y in pairs), "BatchCopy moved wrong bytes"
    contiguous = min(seconds["one contiguous copy, numpy"], seconds["one contiguous copy, torch"])
    loop = min(seconds["loop of numpy slice copies"], seconds["loop of memoryview slice copies"])
    rows: list[Row] = [
        {"case": name, "ms": value * 1e3, "GB/s": moved / value / 1e9, "of contiguous": contiguous / value}
        for name, value in seconds.items()
    ]
    plan_rows, plan_bar = _measure_planning(random)
    print_table(rows)
    print_table(plan_rows)
    bars = [
        at_least("10,000 x 4 KiB: speed over the faster Python loop", loop / seconds["BatchCopy"], 2.5),
        at_least("10,000 x 4 KiB: share of the faster contiguous copy", contiguous / seconds["BatchCopy"], 0.6),
        plan_bar,
    ]
    return rows + plan_rows, bars


def _measure_planning(random: np.random.Generator) -> tuple[list[Row], Bar]:
    slots, shuffled = random.permutation(ENTRIES), random.permutation(ENTRIES)
    sizes = np.full(ENTRIES, PIECE)
    mixed = random.integers(1, PIECE, ENTRIES)
    base = 1 << 40
    cases = {
        "nothing merges": np.stack([shuffled * PIECE, base + slots * PIECE, sizes]),
        "mixed sizes": np.stack([shuffled * PIECE, base + slots * PIECE, mixed]),
        "everything merges, shuffled": np.stack([slots * PIECE, base + slots * PIECE, sizes]),
    }
    code = native().code
    look = scan if code is None else code.scan  # as in BatchCopy
    planners = {name: functools.partial(plan_copies, table, None, look) for name, table in cases.items()}
    seconds = medians({"argsort": lambda: np.argsort(slots), **planners}, rounds=25)
    rows: list[Row] = [
        {"planning 100,000 entries": name, "ms": value * 1e3, "argsorts": value / seconds["argsort"]}
        for name, value in seconds.items()
    ]
    worst = max(seconds[name] for name in cases)
    return rows, at_most("planning 100,000 entries, in numpy argsorts", worst / seconds["argsort"], 4)


if __name__ == "__main__":
    main()
