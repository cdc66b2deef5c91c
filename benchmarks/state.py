"""State: warp of a batch with churn compared with one copy per row, and an identity step.

python -m benchmarks.state                 on the GPU if there is one, else on the CPU
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.report import Bar, Row, arguments, at_least, at_most, best, print_table, report
from kvtier.memory import BatchCopy, Placement, Stream, context, cuda
from kvtier.state import Permutation, RowMap, State

ROWS, ROW_BYTES, CHURN = 256, 4096, 0.1
ROUNDS = 600  # total seconds: slow periods of a shared machine have this length, and affect Python most
OTHER_ROW_BYTES = (8, 64 << 10)  # to choose between State and RowMap, which does not move the rows


def main() -> None:
    parser = arguments("Warp of a State on this machine.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    place = Placement.parse(options.device)
    if place.is_device:
        stream = Stream(place)
        with context(stream=stream), torch.cuda.stream(stream.native):
            rows, bars = measure(place, stream)
    else:
        rows, bars = measure(place, None)
    report(f"state_{'gpu' if place.is_device else 'cpu'}", rows, bars, options.results)


def measure(place: Placement, stream: Stream | None) -> tuple[list[Row], list[Bar]]:
    """Measure warp with 10 % churn, an identity step, and the alternatives."""
    perm = churned(np.random.default_rng(0))
    state = State((ROWS, ROW_BYTES), "u8", place)
    new = torch.randint(0, 256, (ROWS, ROW_BYTES), dtype=torch.uint8, device=place.torch)
    state.front.random_(0, 256)
    batch, identity, row_map = BatchCopy(), Permutation.identity(ROWS), RowMap(2 * ROWS)
    row_map.apply(Permutation([ROWS] * ROWS, 0))

    def warp() -> None:
        state.warp(perm, batch, new=new)
        batch.run()

    def stay() -> None:
        state.warp(identity, batch, new=new)
        batch.run()

    before = state.front.clone()
    warp()
    expected = torch.where(
        torch.tensor(perm.is_new, device=place.torch)[:, None],
        new,
        before[torch.from_numpy(np.where(perm.is_new, 0, perm.index)).to(place.torch)],
    )
    _wait(stream)
    assert torch.equal(state.front, expected), "warp moved wrong rows"
    tasks: dict[str, Callable[[], object]] = {
        "warp, 10 % churn": _until_done(warp, stream),
        "one copy per row, torch": _until_done(lambda: _row_by_row_torch(state, perm, new), stream),
        "one copy per row, driver": _until_done(lambda: _row_by_row_driver(state, perm, new, stream), stream),
        "identity step (host)": stay,
        "RowMap, 10 % churn (host)": lambda: row_map.apply(perm),
    }
    if stream is None:
        del tasks["one copy per row, driver"]
    others = {f"warp, rows of {size} B": _until_done(_warp(perm, place, size), stream) for size in OTHER_ROW_BYTES}
    seconds = {**best(tasks, rounds=ROUNDS), **best(others, rounds=ROUNDS)}  # separately: large rows flush the caches
    rows: list[Row] = [{"case": name, "us": value * 1e6} for name, value in seconds.items()]
    print_table(rows)
    per_row = min(value for name, value in seconds.items() if name.startswith("one copy per row"))
    bars = [at_least("warp over one copy per row", per_row / seconds["warp, 10 % churn"], 10 if place.is_device else 5)]
    if place.is_device:
        bars.append(at_most("identity step, host us", seconds["identity step (host)"] * 1e6, 20))
    return rows, bars


def _warp(perm: Permutation, place: Placement, row_bytes: int) -> Callable[[], object]:
    state, batch = State((ROWS, row_bytes), "u8", place), BatchCopy()
    state.front.zero_()
    new = torch.zeros((ROWS, row_bytes), dtype=torch.uint8, device=place.torch)
    return lambda: (state.warp(perm, batch, new=new), batch.run())


def churned(random: np.random.Generator) -> Permutation:
    """Return the order after a tenth of the rows left and new rows were appended."""
    num_new = int(ROWS * CHURN)
    kept = np.sort(random.permutation(ROWS)[num_new:])
    return Permutation(np.concatenate((kept, np.full(num_new, ROWS))), ROWS)


def _row_by_row_torch(state: State, perm: Permutation, new: torch.Tensor) -> None:
    for i, (row, is_new) in enumerate(zip(perm.index.tolist(), perm.is_new.tolist(), strict=True)):
        state.back[i].copy_(new[i] if is_new else state.front[row], non_blocking=True)


def _row_by_row_driver(state: State, perm: Permutation, new: torch.Tensor, stream: Stream | None) -> None:
    assert stream is not None
    old, fresh, out = state.front.data_ptr(), new.data_ptr(), state.back.data_ptr()
    for i, (row, is_new) in enumerate(zip(perm.index.tolist(), perm.is_new.tolist(), strict=True)):
        source = fresh + i * ROW_BYTES if is_new else old + row * ROW_BYTES
        cuda.memcpy_async(out + i * ROW_BYTES, source, ROW_BYTES, stream)


def _until_done(task: Callable[[], object], stream: Stream | None) -> Callable[[], object]:
    def run() -> None:
        task()
        _wait(stream)

    return run


def _wait(stream: Stream | None) -> None:
    if stream is not None:
        stream.synchronize()


if __name__ == "__main__":
    main()
