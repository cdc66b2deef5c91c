"""Pipeline: the gain of a second phase if host and device take equally long, and the overhead of the pipeline."""

from __future__ import annotations

import cProfile
import hashlib
import io
import math
import pstats
import statistics
import time
import timeit
from functools import partial

from benchmarks.report import Bar, Row, arguments, at_least, print_table, report
from kvtier.batch import Environment, Executor, Module, Pipeline
from kvtier.memory import CPU, current_stream

STEP_SECONDS = 0.008
STEPS, ROUNDS = 20, 12  # phases alternate, the best round counts: on a shared machine noise only adds time
ROWS, MODULES, CHURN = 256, 8, 0.1


class HalfAndHalf(Module):
    """A step that occupies the host, and then the device for the same time. The device is a stream that sleeps.

    The host computes a hash, which releases the GIL like numpy and torch. Pure Python code would hold the GIL for 5 ms
    at a time and delay the executor. Two phases then reach only 1.5x, and sys.setswitchinterval helps.
    """

    def __init__(self) -> None:
        self.block = bytes(1 << 18)
        # measured here, so that host and device take equally long
        typical = statistics.median(timeit.repeat(lambda: hashlib.sha256(self.block), number=10, repeat=30)) / 10
        self.num_blocks = max(1, round(STEP_SECONDS / typical))

    def setup(self, env: Environment) -> None:  # noqa: ARG002
        for _ in range(self.num_blocks):
            hashlib.sha256(self.block)

    def forward(self, env: Environment) -> None:  # noqa: ARG002
        """Work on the device; the host is free."""
        stream = current_stream(CPU)
        assert stream is not None
        stream.enqueue(lambda: time.sleep(STEP_SECONDS))


def main() -> None:
    options = arguments("The pipeline on this machine.").parse_args()
    module = HalfAndHalf()
    rounds = [{phases: _per_step(module, phases) for phases in (1, 2, 3)} for _ in range(ROUNDS)]
    seconds = {phases: min(each[phases] for each in rounds) for phases in rounds[0]}
    limit = STEP_SECONDS  # with perfect overlap a step takes the time of its longer half
    rows: list[Row] = [
        {"phases": phases, "ms per step": value * 1e3, "of limit": limit / value, "over one phase": seconds[1] / value}
        for phases, value in seconds.items()
    ]
    print_table(rows)
    overheads: list[Row] = []
    for case, churn in (("all rows stay", 0.0), ("10 % of the rows change", CHURN)):
        taken, profile = _overhead(churn)
        print(case, profile)
        overheads.append({"modules": MODULES, "rows": ROWS, "case": case, "host us per step": taken * 1e6})
    print_table(overheads)
    bars: list[Bar] = [at_least("throughput of two phases over one", seconds[1] / seconds[2], 1.8)]
    report("pipeline", [*rows, *overheads], bars, options.results)


def _per_step(module: Module, phases: int) -> float:
    pipeline = Pipeline([module], phases=phases)
    tickets = [pipeline.add("request")]
    pipeline.step(tickets)
    pipeline.drain()
    start = time.perf_counter()
    for _ in range(STEPS):
        pipeline.step(tickets)
    pipeline.drain()
    taken = (time.perf_counter() - start) / STEPS
    pipeline.close()
    return taken


def _overhead(churn: float) -> tuple[float, str]:
    """Return the best seconds per step of a pipeline with empty modules, and a profile.

    `churn` is the share of the rows that are preempted in each step. The rows that the step before preempted return.
    """
    pipeline = Pipeline([Module() for _ in range(MODULES)], phases=2, executor=partial(Executor, threaded=False))
    changing = int(ROWS * churn)
    tickets = [pipeline.add(k) for k in range(ROWS + changing)]
    batches = [tickets[:ROWS], tickets[changing:]] if changing else [tickets]
    best = math.inf
    for k in range(STEPS * ROUNDS):
        start = time.perf_counter()
        pipeline.step(batches[k % len(batches)])
        best = min(best, time.perf_counter() - start)
    profile = cProfile.Profile()
    profile.runcall(lambda: [pipeline.step(batches[k % len(batches)]) for k in range(STEPS)])
    pipeline.close()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(10)
    return best, text.getvalue()


if __name__ == "__main__":
    main()
