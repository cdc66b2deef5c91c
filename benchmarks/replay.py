"""The planner: hit rates beside the reference, how long a sweep takes, and whether the simulation tells the truth.

python -m benchmarks.replay --trace ../shared/traces/conversation_trace.jsonl        everything
python -m benchmarks.replay --only honest --seconds 120                              the recorded run alone

Honest: SmolLM2-135M on this CPU with device, host and disk tiers serves conversations at real time and is recorded.
The replay then follows the log step by step (hits by tier must be equal), and simulates the same arrivals freely, with
step costs fitted to a run before on other conversations, and the speeds of memcpy and of the disk. With --clock cpu
the engine's clock is the CPU time of this process, one thread, and idle time is skipped: for machines that others use
meanwhile. What a disk takes without the CPU does not count then, neither in the run nor in the simulation; and blocks
are always loaded, since transfers are timed by the wall clock, which says nothing beside it.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Bar, Row, arguments, at_most, best, print_table, report
from kvtier.cache.config import CacheConfig
from kvtier.cache.host import HostConfig
from kvtier.cache.store import StoreConfig
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams, load_model
from kvtier.replay import OPTIMUM, SyntheticTrace, TraceRequest, generate, read_trace, sweep
from kvtier.replay.cost import Measured
from kvtier.replay.following import Followed, Log, follow, read_log
from kvtier.replay.hardware import DiskSpec
from kvtier.replay.planner import capacities
from kvtier.replay.record import Recorder
from kvtier.replay.simulator import Simulation, Simulator
from kvtier.replay.worker import SimulatedStore, SimulatedWorker
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore, Label, Read, Write, digest_tokens

REFERENCE = {  # ../shared/reference/index_baseline.md
    "lru": {1_000: 0.0470, 5_000: 0.1237, 10_000: 0.2243, 30_000: 0.3448, 50_000: 0.3715, 100_000: 0.3795},
    "fifo": {1_000: 0.0470, 5_000: 0.1209, 10_000: 0.2189, 30_000: 0.3426, 50_000: 0.3704, 100_000: 0.3794},
    OPTIMUM: {1_000: 0.1870, 5_000: 0.3541, 10_000: 0.3819, 30_000: 0.3819, 50_000: 0.3819, 100_000: 0.3819},
}
BLOCK = 16
CACHE = CacheConfig(96, host=HostConfig(160), stores=(StoreConfig("disk"),), partial_scan=0)
DISK_BLOCKS = 2000
LIMITS = SchedulerConfig(max_rows=16, max_step_tokens=256)


def main() -> None:
    """Measure, print, keep."""
    parser = arguments("The planner: truth and speed.")
    parser.add_argument("--trace", help="the conversation trace")
    parser.add_argument("--only", choices=("hits", "speed", "honest"))
    parser.add_argument("--seconds", type=float, default=120.0, help="of the recorded run")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what the recorded run's times are")
    options = parser.parse_args()
    parts = [options.only] if options.only else ["hits", "speed", "honest"]
    trace = read_trace(options.trace).requests if options.trace else ()
    rows: list[Row] = []
    bars: list[Bar] = []
    for part in parts:
        if part == "honest":
            found, held = honest(options.seconds, CpuClock() if options.clock == "cpu" else WallClock())
        elif part == "speed":
            found, held = speed(trace)
        else:
            found, held = hits(trace) if trace else ([], [])
        print_table(found)
        rows += found
        bars += held
    report("replay", rows, bars, options.results)


def hits(trace: Sequence[TraceRequest]) -> tuple[list[Row], list[Bar]]:
    """Hit rates beside those of the reference."""
    rows: list[Row] = []
    found = {
        (point.policy, point.capacity): point.hit_rate
        for point in sweep(trace, list(REFERENCE["lru"]), list(REFERENCE), jobs=2)
    }
    for policy, wanted in REFERENCE.items():
        for capacity, rate in wanted.items():
            rows.append({"policy": policy, "blocks": capacity, "hit rate": found[policy, capacity], "reference": rate})
    worst = max(abs(float(str(row["hit rate"])) - float(str(row["reference"]))) for row in rows) * 100
    return rows, [at_most("hit rates: farthest from the reference, points", worst, 0.3)]


def speed(trace: Sequence[TraceRequest]) -> tuple[list[Row], list[Bar]]:
    """A sweep of 20 capacities by 3 policies on two processes, and one over ten times the requests."""
    rows: list[Row] = []
    bars: list[Bar] = []
    if trace:
        seconds = _sweep_seconds(trace, ("lru", "arc", "s3fifo"))
        parent, child = (resource.getrusage(who).ru_maxrss / 1024 for who in _WHO)
        rows.append({"trace": "conversation", "requests": len(trace), "seconds": seconds, "MiB": parent + 2 * child})
        bars.append(at_most("sweep of 20 capacities by 3 policies, s", seconds, 60))
        bars.append(at_most("its memory, this process and two others, MiB", parent + 2 * child, 1024))
    taken = {}
    for times in (1, 10):
        made = tuple(generate(SyntheticTrace(sessions=1500 * times)))
        taken[times] = _sweep_seconds(made, ("lru", "arc", OPTIMUM))
        parent, child = (resource.getrusage(who).ru_maxrss / 1024 for who in _WHO)
        rows.append({"trace": "generated", "requests": len(made), "seconds": taken[times], "MiB": parent + 2 * child})
    return rows, [*bars, at_most("ten times the requests, times as long", taken[10] / taken[1], 12)]


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _sweep_seconds(trace: Sequence[TraceRequest], policies: Sequence[str]) -> float:
    distinct = len({id for request in trace for id in request.prompt_ids})
    begin = time.perf_counter()
    points = sweep(trace, capacities(distinct), policies, jobs=2)
    assert len(points) == 20 * len(policies)
    return time.perf_counter() - begin


# ---- honest --------------------------------------------------------------------------------------------------------


class WallClock:
    """Seconds that pass."""

    name = "wall"

    def __call__(self) -> float:
        """Now."""
        return time.monotonic()

    def idle(self, seconds: float) -> None:
        """Nothing to do for so long."""
        time.sleep(min(0.005, seconds))


class CpuClock:
    """Seconds of CPU that this process was given, and idle time that was skipped."""

    name = "cpu"

    def __init__(self) -> None:
        self._skipped = 0.0
        torch.set_num_threads(1)

    def __call__(self) -> float:
        """Now."""
        return time.process_time() + self._skipped

    def idle(self, seconds: float) -> None:
        """Nothing to do for so long."""
        self._skipped += seconds


def honest(seconds: float, clock: WallClock | CpuClock) -> tuple[list[Row], list[Bar]]:
    """Record, follow, simulate, compare."""
    model = load_model()
    with tempfile.TemporaryDirectory() as folder:
        first = record(model, Path(folder) / "calibration", Load(seed=1, seconds=seconds / 3, rate=1.2), clock)
        disk = disk_speed(Path(folder) / "speed", first.block_bytes)
        second = record(model, Path(folder) / "run", Load(seed=2, seconds=seconds, rate=0.8), clock)
    known = follow(first.log, first.cache, first.scheduler)
    followed = follow(second.log, second.cache, second.scheduler)
    exact = {name: each.tokens_from for name, each in second.log.requests.items()}
    num_wrong = sum(followed.tokens_from[name] != tokens for name, tokens in exact.items())
    cost = Measured([sample for sample in known.steps if sample[1] > 0])
    simulated = free(second, cost, disk)
    return compare(second, followed, simulated, num_wrong, cost, clock.name)


@dataclass(frozen=True)
class Load:
    """Conversations that come at random times: a shared beginning, then turns that carry all said before."""

    seed: int
    seconds: float
    rate: float
    """Turns a second."""
    conversations: int = 14
    system_tokens: int = 96
    history_tokens: int = 160
    message_tokens: tuple[int, int] = (16, 96)
    answer_tokens: tuple[int, int] = (4, 24)
    longest: int = 700

    def arrivals(self) -> Iterator[tuple[float, int]]:
        """When a turn comes, and whose."""
        chosen, now = random.Random(self.seed), 0.0
        while (now := now + chosen.expovariate(self.rate)) < self.seconds:
            yield now, min(int(chosen.expovariate(1 / 4)), self.conversations - 1)


@dataclass(frozen=True)
class Run:
    """A recorded run."""

    log: Log
    cache: CacheConfig
    scheduler: SchedulerConfig
    block_bytes: int


def record(model: Model, folder: Path, load: Load, clock: WallClock | CpuClock) -> Run:
    """Serve the load as it comes."""
    folder.mkdir()
    block_bytes = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim * 4 * BLOCK
    store = DiskStore(folder / "disk", DISK_BLOCKS * (block_bytes + 8192), min_free_bytes=0)
    cache = replace(CACHE, recompute=clock.name == "wall")
    engine = Engine(model, config=EngineConfig(BLOCK, cache, LIMITS), stores={"disk": store}, clock=clock)
    chosen, vocab = random.Random(load.seed + 100), model.config.vocab_size
    system = [chosen.randrange(vocab) for _ in range(load.system_tokens)]
    said = [system + [chosen.randrange(vocab) for _ in range(load.history_tokens)] for _ in range(load.conversations)]
    talking: dict[str, int] = {}
    due = list(load.arrivals())
    with Recorder(folder / "log.jsonl", steps=True) as recorder:
        begin = clock()
        recorder.attach(engine.scheduler, now=begin)
        while due or engine.has_work():
            now = clock() - begin
            # a turn waits for the answer before it
            ready = [turn for turn in due if turn[0] <= now and turn[1] not in talking.values()]
            for turn in ready[:1]:
                due.remove(turn)
                who = turn[1]
                if len(said[who]) > load.longest:
                    said[who] = list(system)
                said[who] += [chosen.randrange(vocab) for _ in range(chosen.randint(*load.message_tokens))]
                count = chosen.randint(*load.answer_tokens)
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
                talking[engine.add(said[who], params)] = who
            if engine.has_work():
                for output in engine.step():
                    said[talking[output.request_id]] += output.token_ids
                    if output.finish_reason is not None:
                        del talking[output.request_id]
            elif due:
                clock.idle(max(0.0, due[0][0] - now))
    scheduler = engine.scheduler.config
    engine.close()
    return Run(read_log(folder / "log.jsonl"), cache, scheduler, block_bytes)


def free(run: Run, cost: Measured, disk: DiskSpec) -> Simulation:
    """The same arrivals on simulated hardware as fast as this."""
    stores = {"disk": SimulatedStore(DISK_BLOCKS)}
    worker = SimulatedWorker(run.block_bytes, memcpy_bandwidth(), disk=disk, stores=stores)
    return Simulator(run.cache, run.scheduler, cost, worker, block_tokens=BLOCK, num_layers=30).run(run.log.trace)


def memcpy_bandwidth() -> float:
    """What the link between two memories of a CPU is."""
    source = np.ones(1 << 26, np.uint8)
    target = np.zeros_like(source)
    return len(source) / best({"copy": lambda: np.copyto(target, source)}, 5)["copy"]


def disk_speed(folder: Path, block_bytes: int) -> DiskSpec:
    """Of a DiskStore with blocks of this size."""
    store = DiskStore(folder, 256 * (block_bytes + 8192), min_free_bytes=0)
    label, count = Label(bytes(32), digest_tokens(b"")), 32
    data = [np.random.default_rng(i).bytes(block_bytes) for i in range(count)]
    keys = [i.to_bytes(32, "little") for i in range(count)]
    room = [bytearray(block_bytes) for _ in range(count)]
    taken = best(
        {
            "write": lambda: store.write([Write(key, label, each) for key, each in zip(keys, data, strict=True)]),
            "read": lambda: store.read_into([Read(key, label, each) for key, each in zip(keys, room, strict=True)]),
        },
        3,
    )
    store.close()
    return DiskSpec(count * block_bytes / taken["read"], count * block_bytes / taken["write"], 0.0005)


def compare(
    run: Run, followed: Followed, simulated: Simulation, num_wrong: int, cost: Measured, clock: str
) -> tuple[list[Row], list[Bar]]:
    """The run beside both replays."""
    logged = list(run.log.requests.values())
    logged.sort(key=lambda each: each.traced.timestamp_ms)
    prompts = sum(each.traced.input_tokens for each in logged)
    rows: list[Row] = []
    bars = [at_most("followed: requests whose hits by tier differ", num_wrong, 0)]
    for tier in ("device", "host", "disk"):
        real = sum(each.tokens_from.get(tier, 0) for each in logged) / prompts
        ours = sum(each.tokens_from.get(tier, 0) for each in simulated.requests) / prompts
        rows.append({"figure": f"hit rate, {tier}", "run": real, "simulated": ours, "off": abs(ours - real) * 100})
        bars.append(at_most(f"free: hit rate of {tier}, points off", abs(ours - real) * 100, 2))
    ttfts = (
        [each.ttft for each in logged if each.ttft is not None],
        [each.ttft for each in simulated.requests if each.ttft],
    )
    for share in (50, 90, 99):
        real, ours = (float(np.percentile(each, share)) for each in ttfts)
        rows.append({"figure": f"TTFT p{share}, s", "run": real, "simulated": ours, "off": abs(ours / real - 1) * 100})
        if share != 90:
            bars.append(at_most(f"free: TTFT p{share}, % off", abs(ours / real - 1) * 100, 20))
    steps = [(work, seconds) for work, seconds in followed.steps if seconds > 0]
    real, ours = sum(seconds for _, seconds in steps), sum(cost.seconds(work) for work, _ in steps)
    rows.append({"figure": "step seconds", "run": real, "simulated": ours, "off": abs(ours / real - 1) * 100})
    rows.append(
        {"figure": f"requests, {clock} clock", "run": len(logged), "simulated": len(simulated.requests), "off": 0}
    )
    return rows, bars


if __name__ == "__main__":
    main()
