"""Pipeline: what a second phase buys when host and device take equally long, and what the pipeline itself costs."""

from __future__ import annotations

import cProfile
import hashlib
import io
import pstats
import time
import timeit

from benchmarks.report import Bar, Row, arguments, at_least, print_table, report
from kvtier.batch import Environment, InlineExecutor, Module, Pipeline
from kvtier.memory import CPU, current_stream

STEP_SECONDS = 0.004
STEPS, ROWS, MODULES = 100, 256, 8


class HalfAndHalf(Module):
    """A step that keeps the host busy for a while, then the device for as long. The device is a stream that sleeps.

    The host hashes, which gives the GIL up as numpy and torch do. Pure Python would keep it for 5 ms at a time, and the
    executor would wait for it (two phases then reach 1.5x; sys.setswitchinterval is the remedy).
    """

    def __init__(self) -> None:
        self.block = bytes(1 << 18)
        best = min(timeit.repeat(lambda: hashlib.sha256(self.block), number=10, repeat=10)) / 10
        self.num_blocks = max(1, round(STEP_SECONDS / best))

    def setup(self, env: Environment) -> None:  # noqa: ARG002
        """Work on the host."""
        for _ in range(self.num_blocks):
            hashlib.sha256(self.block)

    def forward(self, env: Environment) -> None:  # noqa: ARG002
        """Work on the device: the host is free meanwhile."""
        stream = current_stream(CPU)
        assert stream is not None
        stream.enqueue(lambda: time.sleep(STEP_SECONDS))


def main() -> None:
    """Measure, print, keep."""
    options = arguments("The pipeline on this machine.").parse_args()
    seconds = {phases: _per_step([HalfAndHalf()], phases, 1) for phases in (1, 2, 3)}
    limit = STEP_SECONDS  # with perfect overlap a step takes as long as its longer half
    rows: list[Row] = [
        {"phases": phases, "ms per step": value * 1e3, "of limit": limit / value, "over one phase": seconds[1] / value}
        for phases, value in seconds.items()
    ]
    print_table(rows)
    overhead, profile = _overhead()
    print(profile)
    rows.append({"modules": MODULES, "rows": ROWS, "host us per step": overhead * 1e6})
    print_table(rows[-1:])
    bars: list[Bar] = [at_least("throughput of two phases over one", seconds[1] / seconds[2], 1.8)]
    report("pipeline", rows, bars, options.results)


def _per_step(modules: list[Module], phases: int, num_rows: int) -> float:
    pipeline = Pipeline(modules, phases=phases)
    tickets = [pipeline.add(k) for k in range(num_rows)]
    pipeline.step(tickets)
    pipeline.drain()
    start = time.perf_counter()
    for _ in range(STEPS):
        pipeline.step(tickets)
    pipeline.drain()
    taken = (time.perf_counter() - start) / STEPS
    pipeline.close()
    return taken


def _overhead() -> tuple[float, str]:
    """Seconds per step of a pipeline that does nothing, and where they go."""
    pipeline = Pipeline([Module() for _ in range(MODULES)], phases=2, executor=InlineExecutor)
    tickets = [pipeline.add(k) for k in range(ROWS)]
    for _ in range(10):
        pipeline.step(tickets)
    start = time.perf_counter()
    for _ in range(STEPS):
        pipeline.step(tickets)
    taken = (time.perf_counter() - start) / STEPS
    profile = cProfile.Profile()
    profile.runcall(lambda: [pipeline.step(tickets) for _ in range(STEPS)])
    pipeline.close()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(8)
    return taken, text.getvalue()


if __name__ == "__main__":
    main()
