"""`kvtier replay` and `kvtier plan`: a trace through the real scheduler and cache, with simulated hardware."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from kvtier.cli.parser import Commands, Parser, ProgressLine, add_command
from kvtier.errors import ArgumentError

if TYPE_CHECKING:
    from kvtier.replay.deployment import Deployment
    from kvtier.replay.hardware import PriceSpec
    from kvtier.replay.trace import Trace

PRICES = "2026-q1"
_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SHOWN = 5


def add(commands: Commands) -> None:
    """`replay` and `plan`."""
    text = "Replay a trace on simulated hardware: hit rates by tier, time to first token, bytes on each link."
    examples = """
    kvtier replay trace.jsonl --model llama-3-8b --gpu h200 --device 40GiB --host 200GiB
    kvtier replay day-*.jsonl.zst --host 500GiB --disk 4TiB --policy lru,arc,s3fifo --replicas 6 --html report.html
    kvtier replay synthetic:sessions=500,turns=6,think_seconds=30 --host 100GiB --json
    """
    command = add_command(commands, "replay", text, examples, replay)
    _add_options(command)
    command.add_argument("--policy", default="lru", help="eviction policies to compare: lru, fifo, arc, s3fifo, cost")
    command.add_argument("--host", type=size, default=0, metavar="SIZE", help="host memory of a replica")
    command.add_argument("--disk", type=size, default=0, metavar="SIZE", help="disk of a replica")
    command.add_argument("--capacities", type=int, default=20, help="points of the curve of hit rates; 0: none")
    text = "Say how much host memory and disk to give the cache, and what more of it would bring."
    examples = """
    kvtier plan trace.jsonl --model llama-3-8b --gpu h200 --replicas 6 --ttft-p99 6s --html plan.html
    kvtier plan trace.jsonl --model llama-3-70b --gpu h100 --gpus 4 --ttft-p99 10s --disk-type nvme-gen4
    """
    command = add_command(commands, "plan", text, examples, plan)
    _add_options(command)
    command.add_argument("--ttft-p99", type=seconds, required=True, metavar="TIME", help="what to hold, such as 2s")
    command.add_argument("--policy", default="lru", help="the eviction policy of the setups")
    command.add_argument("--ram-price", type=float, metavar="$", help="of a GiB of host memory")
    command.add_argument("--disk-price", type=float, metavar="$", help="of a GiB of disk")
    command.add_argument("--all-replicas", action="store_true", help="simulate every replica and not one for all")


def replay(options: argparse.Namespace) -> int:
    """One run for each policy."""
    from kvtier.replay.curves import OPTIMUM, sweep
    from kvtier.replay.deployment import simulate
    from kvtier.replay.planner import capacities
    from kvtier.replay.report import describe_setup, describe_trace, replay_result

    trace, policies = _trace(options), [name.strip() for name in options.policy.split(",")]
    setups = {policy: _setup(options, policy, host=options.host, disk=options.disk) for policy in policies}
    told = describe_trace(trace, options.traces)
    curve = []
    if options.capacities:
        counts = capacities(told["num_distinct_blocks"], options.capacities)
        with _bar("hit rates") as tell:
            curve = sweep(trace.requests, counts, [*policies, OPTIMUM], jobs=options.jobs, progress=tell)
    with _bar("simulating") as tell:
        found = simulate(trace.requests, list(setups.values()), jobs=options.jobs, progress=tell)
    runs, setup = dict(zip(setups, found, strict=True)), setups[policies[0]]
    return _tell(options, replay_result(told, describe_setup(setup, _names(options, setup)), curve, runs))


def plan(options: argparse.Namespace) -> int:
    """Sweep sizes and give advice."""
    from kvtier.replay.planner import plan
    from kvtier.replay.report import describe_setup, describe_trace, plan_result

    trace = _trace(options)
    setup = _setup(options, options.policy)
    with _bar("") as tell:
        found = plan(
            trace.requests,
            setup,
            options.ttft_p99,
            _prices(options),
            num_simulated=None if options.all_replicas else 1,
            jobs=options.jobs,
            progress=lambda what, share: tell(share, what),
        )
    told = describe_trace(trace, options.traces)
    return _tell(options, plan_result(told, describe_setup(setup, _names(options, setup)), found))


def size(text: str) -> int:
    """40GiB, 1.5TB, 100MiB as bytes."""
    found = re.fullmatch(r"([\d.]+)\s*([A-Za-z]+)", text.strip())
    known = {unit.lower(): count for unit, count in _UNITS.items()}
    if found is None or found[2].lower() not in known or found[1].count(".") > 1:
        if text.strip() == "0":
            return 0
        raise argparse.ArgumentTypeError(f"a size is a number and one of {', '.join(_UNITS)}, got {text!r}")
    return round(float(found[1]) * known[found[2].lower()])


def seconds(text: str) -> float:
    """2s, 500ms as seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip())
    if found is None or (found[2] or "s") not in _SECONDS or not float(found[1]):
        raise argparse.ArgumentTypeError(f"a time is a number above 0 and one of {', '.join(_SECONDS)}, got {text!r}")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def _add_options(command: Parser) -> None:
    add_option = command.add_argument
    add_option(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="Mooncake JSONL or kvtier's own log, .gz and .zst too; or synthetic:KNOB=VALUE,.. for a generated one",
    )
    add_option("--model", default="llama-3-8b", help="a preset, or a .toml or .json file with the same keys")
    add_option("--gpu", default="h200", help="a preset, or a file")
    add_option("--gpus", type=int, default=1, metavar="N", help="GPUs of a replica (tensor parallel)")
    add_option("--machine", metavar="FILE", help="take memory and link from `kvtier doctor --json` of that machine")
    add_option("--device", type=size, default=0, metavar="SIZE", help="device memory for KV; what the weights leave")
    add_option("--disk-type", default="nvme-gen4", metavar="DISK", help="a preset, or a file")
    add_option("--replicas", type=int, default=1, metavar="N", help="how many serve; sizes are of each")
    add_option("--routing", choices=("random", "prefix"), default="prefix", help="which replica gets a request")
    add_option("--speed", type=float, default=1.0, metavar="X", help="have the requests come X times as fast")
    add_option("--limit", type=int, metavar="N", help="only the first N requests")
    add_option("--max-rows", type=int, default=256, help="requests in a step")
    add_option("--max-step-tokens", type=int, default=8192, help="tokens in a step")
    add_option("--quantum", type=float, default=0.05, help="seconds simulated at once; 0: every step by itself")
    add_option("--seed", type=int, default=0, help="the same seed gives the same figures")
    add_option("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes to spread the work over")
    add_option("--strict", action="store_true", help="fail if some lines of a trace are no requests")
    add_option("--html", metavar="FILE", help="also write a report with plots: one page, no network needed")


def _trace(options: argparse.Namespace) -> Trace:
    from kvtier.replay.deployment import scale_time
    from kvtier.replay.trace import Trace, read_trace

    paths = [name for name in options.traces if not name.startswith("synthetic:")]
    made = [name.removeprefix("synthetic:") for name in options.traces if name.startswith("synthetic:")]
    if made and (paths or len(made) > 1):
        raise ArgumentError("a synthetic trace is replayed by itself, not beside others")
    trace = Trace(_synthetic(made[0], options.seed), ()) if made else read_trace(*paths)
    for problem in trace.problems[:_SHOWN]:
        print(f"kvtier: {problem}", file=sys.stderr)
    if trace.problems:
        more = len(trace.problems) - _SHOWN
        rest = f", {more} more than shown" if more > 0 else ""
        print(f"kvtier: lines that are no requests and were left out: {len(trace.problems)}{rest}", file=sys.stderr)
        if options.strict:
            raise ArgumentError(f"--strict was given, and lines of the trace are no requests: {len(trace.problems)}")
    if options.jobs < 1:
        raise ArgumentError(f"--jobs is a number of processes above 0, got {options.jobs}")
    if options.limit is not None and options.limit < 1:
        raise ArgumentError(f"--limit is a number of requests above 0, got {options.limit}")
    requests = scale_time(trace.requests, options.speed)[: options.limit]
    if not requests:
        raise ArgumentError(f"there is no request in {', '.join(options.traces)}")
    return Trace(requests, trace.problems)


def _synthetic(text: str, seed: int) -> tuple[Any, ...]:
    """`sessions=500,turns=6` as a trace."""
    from kvtier.replay.synth import SyntheticTrace, generate

    known = {field.name: field.type for field in fields(SyntheticTrace)}
    knobs: dict[str, Any] = {"seed": seed}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ArgumentError(f"a synthetic trace has no knob {name!r}; there are {', '.join(known)}")
        is_whole = known[name] == "int"
        try:
            knobs[name] = int(value) if is_whole else float(value)
        except ValueError:
            what = "a whole number" if is_whole else "a number"
            raise ArgumentError(f"synthetic: {name} is {what}, got {value!r}") from None
    return tuple(generate(SyntheticTrace(**knobs)))


def _setup(options: argparse.Namespace, policy: str, *, host: int = 0, disk: int = 0) -> Deployment:
    from kvtier.index import make_policy
    from kvtier.replay.deployment import Deployment, Routing
    from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec, from_doctor, preset

    make_policy(policy)
    gpu = preset(GpuSpec, options.gpu)
    if options.machine:
        gpu = from_doctor(options.machine, gpu)
    return Deployment(
        preset(ModelSpec, options.model),
        gpu.times(options.gpus),
        device_bytes=options.device,
        host_bytes=host,
        disk_bytes=disk,
        disk=preset(DiskSpec, options.disk_type),
        policy=policy,
        replicas=options.replicas,
        routing=Routing(options.routing),
        max_rows=options.max_rows,
        max_step_tokens=options.max_step_tokens,
        quantum=options.quantum,
        seed=options.seed,
    )


def _prices(options: argparse.Namespace) -> PriceSpec:
    from kvtier.replay.hardware import PriceSpec, preset

    prices = preset(PriceSpec, PRICES)
    for option, name in (("ram_price", "host_gib"), ("disk_price", "disk_gib")):
        price = getattr(options, option)
        if price is not None:
            prices = replace(prices, **{name: price, "source": f"{prices.source}; {name} from the command line"})
    return prices


def _names(options: argparse.Namespace, setup: Deployment) -> dict[str, str]:
    gpu = setup.gpu.name or options.gpu
    return {
        "model": options.model,
        "gpu": gpu if options.gpus == 1 else f"{options.gpus} x {gpu}",
        "disk": setup.disk.name if setup.disk is not None else "",
    }


class _bar:
    """A progress bar for shares of one thing after the other."""

    def __init__(self, what: str) -> None:
        self._what, self._progress = what, ProgressLine(100, "%")

    def __enter__(self) -> Callable[..., None]:
        return lambda share, what=self._what: self._progress.update(int(share * 100), what)

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__()


def _tell(options: argparse.Namespace, result: dict[str, Any]) -> int:
    from kvtier.replay.report import intro, tables, write_report

    if options.html:
        write_report(result, options.html)
    if options.json:
        print(json.dumps(result))
        return 0
    print("\n".join(intro(result)), "\n")
    for table in tables(result):
        _print_table(table["columns"], table["rows"], table["shares"])
    if options.html:
        print(f"\nThe report is in {options.html}")
    return 0


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], shares: Sequence[int]) -> None:
    """One line for each figure and one column for each run: runs are few and figures many."""
    lines = [[name, *(_text(row[at], at in shares) for row in rows)] for at, name in enumerate(columns)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(rows) + 1)]
    for line in lines:
        cells = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
        print(f"{line[0]:<{widths[0]}}  " + "  ".join(cells))


def _text(value: Any, is_share: bool) -> str:
    if isinstance(value, str):
        return value
    if is_share:
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
