"""`kvtier replay` and `kvtier plan`: run a trace through the real scheduler and cache on simulated hardware."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from kvtier.cli.parser import Commands, Parser, add_command, progress_bar
from kvtier.errors import ArgumentError

if TYPE_CHECKING:
    from kvtier.replay.deployment import Deployment
    from kvtier.replay.hardware import PriceSpec
    from kvtier.replay.trace import Trace

PRICES = "2026-q1"  # name of the preset with the default prices
_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SHOWN = 5  # maximum number of invalid trace lines to print


def add(commands: Commands) -> None:
    text = "Replay a trace on simulated hardware. Reports hit rates by tier, times to first token and traffic."
    examples = """
    kvtier replay trace.jsonl --model llama-3-8b --gpu h200 --device 40GiB --host 200GiB
    kvtier replay day-*.jsonl.zst --host 500GiB --disk 4TiB --policy lru,arc,s3fifo --replicas 6 --html report.html
    kvtier replay synthetic:sessions=500,turns=6,think_seconds=30 --host 100GiB --json
    """
    command = add_command(commands, "replay", text, examples, replay, "TRACE ...")
    option = command.add_argument
    option(
        "--policy",
        default="lru",
        metavar="NAMES",
        help="eviction policies to compare: lru, fifo, arc, s3fifo, cost, learned",
    )
    option("--host", type=size, default=0, metavar="SIZE", help="host memory per replica")
    option("--disk", type=size, default=0, metavar="SIZE", help="disk per replica")
    option("--capacities", type=int, default=20, metavar="N", help="points on the hit rate curve; 0: no curve")
    _add_options(command)
    text = "Recommend sizes of host memory and disk for a trace. Shows the benefit of each increase in size."
    examples = """
    kvtier plan trace.jsonl --model llama-3-8b --gpu h200 --replicas 6 --ttft-p99 6s --html plan.html
    kvtier plan trace.jsonl --model llama-3-70b --gpu h100 --gpus 4 --ttft-p99 10s --disk-type nvme-gen4
    kvtier plan trace.jsonl --ttft-p99 6s --replicas 100 --copies 10
    """
    command = add_command(commands, "plan", text, examples, plan, "--ttft-p99 TIME TRACE ...")
    option = command.add_argument
    option("--ttft-p99", type=seconds, required=True, metavar="TIME", help="target p99 time to first token, e.g. 2s")
    option("--policy", default="lru", metavar="NAME", help="eviction policy")
    option("--ram-price", type=float, metavar="USD", help="price of one GiB of host memory")
    option("--disk-price", type=float, metavar="USD", help="price of one GiB of disk")
    option("--all-replicas", action="store_true", help="simulate all replicas instead of one")
    option("--copies", type=int, metavar="K", help="simulate routing for K times as many users; recommend no sizes")
    _add_options(command)


def replay(options: argparse.Namespace) -> int:
    from kvtier.replay.curves import OPTIMUM, sweep
    from kvtier.replay.deployment import simulate
    from kvtier.replay.planner import capacities
    from kvtier.replay.report import describe_setup, describe_trace, replay_result

    trace, policies = _trace(options), [name.strip() for name in options.policy.split(",")]
    setups = {policy: _setup(options, policy, host=options.host, disk=options.disk) for policy in policies}
    about = describe_trace(trace, options.traces)
    curve = []
    if options.capacities:
        counts = capacities(about["num_distinct_blocks"], options.capacities)
        with _progress("hit rates") as update:
            curve = sweep(trace.requests, counts, [*policies, OPTIMUM], jobs=options.jobs, progress=update)
    with _progress("simulating") as update:
        results = simulate(trace.requests, list(setups.values()), jobs=options.jobs, progress=update)
    runs, setup = dict(zip(setups, results, strict=True)), setups[policies[0]]
    return _print_result(options, replay_result(about, describe_setup(setup, _names(options, setup)), curve, runs))


def plan(options: argparse.Namespace) -> int:
    from kvtier.replay.planner import plan
    from kvtier.replay.report import describe_setup, describe_trace, plan_result

    trace = _trace(options)
    setup = _setup(options, options.policy)
    if options.copies is not None:
        return _plan_fleet(options, trace, setup)
    with _progress("") as update:
        result = plan(
            trace.requests,
            setup,
            options.ttft_p99,
            _prices(options),
            num_simulated=None if options.all_replicas else 1,
            jobs=options.jobs,
            progress=lambda what, share: update(share, what),
        )
    about = describe_trace(trace, options.traces)
    return _print_result(options, plan_result(about, describe_setup(setup, _names(options, setup)), result))


def _plan_fleet(options: argparse.Namespace, trace: Trace, setup: Deployment) -> int:
    """Simulate all replicas with cache-aware routing and with round robin. Print the results and the router's cost."""
    from kvtier.replay.fleet import FleetConfig, FleetRouting, FleetTrace, replica_costs, simulate_fleets

    if options.html:
        raise ArgumentError("--copies has no HTML report; use --json")
    block_tokens = trace.requests[0].block_tokens
    num_blocks = setup.kv_bytes // (setup.model.token_bytes * block_tokens)
    costs = replica_costs(setup.model, setup.gpu, block_tokens)
    users = FleetTrace(trace.requests, options.copies, seed=options.seed)
    configs = [FleetConfig(setup.replicas, num_blocks, costs, routing, setup.policy) for routing in FleetRouting]
    with _progress(FleetRouting.CACHE.value) as update:
        results = simulate_fleets(configs, users, block_tokens, jobs=options.jobs, progress=update)
    summaries = {config.routing.value: summary for config, summary in zip(configs, results, strict=True)}
    cache = summaries[FleetRouting.CACHE.value]
    seconds = max(1e-3, (trace.requests[-1].timestamp_ms - trace.requests[0].timestamp_ms) / 1000)
    rate, capacity = len(users) / seconds, 1 / max(1e-9, cache.decision_seconds)
    result = {
        "replicas": setup.replicas,
        "blocks_per_replica": num_blocks,
        "requests_per_second": rate,
        "router_requests_per_second": capacity,
        "index_bytes": cache.index_bytes,
        "routing": {name: asdict(summary) for name, summary in summaries.items()},
    }
    if options.json:
        print(json.dumps(result))
        return 0
    names = ["routing", "hit rate", "busiest replica over mean", "TTFT p50, s", "TTFT p90, s", "TTFT p99, s"]
    rows = [
        [name, each.hit_rate, each.imbalance, *(each.ttft[share] for share in ("p50", "p90", "p99"))]
        for name, each in summaries.items()
    ]
    print(f"{setup.replicas} replicas of {num_blocks:,} blocks, {len(users):,} requests, {rate:.1f} per second\n")
    _print_table(names, rows, [1])
    met = "meets" if cache.ttft["p99"] <= options.ttft_p99 else "misses"
    print(f"\nTTFT p99 with cache-aware routing {met} the target of {options.ttft_p99:g} s")
    print(
        f"The router takes {cache.decision_seconds * 1e6:.0f} us per request, and its index occupies "
        f"{cache.index_bytes / 2**20:.0f} MiB. One core handles {capacity:,.0f} requests per second, and this load "
        f"uses {rate / capacity:.1%} of the core. At this load per replica, one index becomes the bottleneck at "
        f"{setup.replicas * capacity / rate:,.0f} replicas"
    )
    return 0


def size(text: str) -> int:
    """Parse a size such as 40GiB or 1.5TB into bytes."""
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]+)", text.strip())
    known = {unit.lower(): count for unit, count in _UNITS.items()}
    if match is None or match[2].lower() not in known or match[1].count(".") > 1:
        if text.strip() == "0":
            return 0
        raise argparse.ArgumentTypeError(f"expected a number and a unit ({', '.join(_UNITS)}), got {text!r}")
    return round(float(match[1]) * known[match[2].lower()])


def seconds(text: str) -> float:
    """Parse a time such as 2s or 500ms into seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip())
    if match is None or (match[2] or "s") not in _SECONDS or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a number above 0 and a unit ({', '.join(_SECONDS)}), got {text!r}")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _add_options(command: Parser) -> None:
    help = "trace file in Mooncake's or kvtier's JSONL format (also .gz or .zst), or synthetic:NAME=VALUE,..."
    command.add_argument("traces", nargs="+", metavar="TRACE", help=help)
    option = command.add_argument_group("workload").add_argument
    option("--speed", type=float, default=1.0, metavar="X", help="replay X times as fast")
    option("--limit", type=int, metavar="N", help="use only the first N requests")
    option("--strict", action="store_true", help="fail if a line of the trace is invalid")
    option = command.add_argument_group("deployment").add_argument
    option("--model", default="llama-3-8b", help="name of a preset, or .toml or .json file with the keys of a preset")
    option("--gpu", default="h200", help="preset or file")
    option("--gpus", type=int, default=1, metavar="N", help="GPUs per replica (tensor parallel)")
    option("--machine", metavar="FILE", help="output of `kvtier doctor --json`; sets memory size and link speeds")
    option("--device", type=size, default=0, metavar="SIZE", help="device memory for KV; 0: all except the weights")
    option("--inclusive", action="store_true", help="keep recent blocks in host memory even if the device has them")
    option("--disk-type", default="nvme-gen4", metavar="DISK", help="preset or file")
    option("--replicas", type=int, default=1, metavar="N", help="number of replicas; sizes are per replica")
    option("--routing", choices=("random", "prefix"), default="prefix", help="how to route requests to replicas")
    option("--max-rows", type=int, default=256, metavar="N", help="maximum number of requests per step")
    option("--max-step-tokens", type=int, default=8192, metavar="N", help="maximum number of tokens per step")
    help = "steps in flight; with 2, a step is scheduled while the previous step runs"
    option("--phases", type=int, default=2, choices=(1, 2), help=help)
    option = command.add_argument_group("simulation").add_argument
    option(
        "--quantum",
        type=float,
        default=0.05,
        metavar="SECONDS",
        help="simulate consecutive steps as one, up to this total time; 0: never",
    )
    option("--seed", type=int, default=0, metavar="N", help="seed of the simulation")
    option("--jobs", type=int, metavar="N", help="processes to use (default: one per core)")
    option("--html", metavar="FILE", help="also write a report with plots as a single HTML file")


def _trace(options: argparse.Namespace) -> Trace:
    from kvtier.replay.deployment import scale_time
    from kvtier.replay.trace import Trace, read_trace

    paths = [name for name in options.traces if not name.startswith("synthetic:")]
    made = [name.removeprefix("synthetic:") for name in options.traces if name.startswith("synthetic:")]
    if made and (paths or len(made) > 1):
        raise ArgumentError("a synthetic trace cannot be combined with other traces")
    trace = Trace(_synthetic(made[0], options.seed), ()) if made else read_trace(*paths)
    for problem in trace.problems[:_SHOWN]:
        print(f"kvtier: {problem}", file=sys.stderr)
    if trace.problems:
        more = len(trace.problems) - _SHOWN
        rest = f" ({more} of them not shown)" if more > 0 else ""
        print(f"kvtier: skipped invalid lines: {len(trace.problems)}{rest}", file=sys.stderr)
        if options.strict:
            raise ArgumentError(f"--strict: the trace has {len(trace.problems)} invalid lines")
    if options.jobs is None:
        options.jobs = len(os.sched_getaffinity(0))
    for name in ("jobs", "limit"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ArgumentError(f"--{name} must be at least 1, got {value}")
    requests = scale_time(trace.requests, options.speed)[: options.limit]
    if not requests:
        raise ArgumentError(f"no requests in {', '.join(options.traces)}")
    return Trace(requests, trace.problems)


def _synthetic(text: str, seed: int) -> tuple[Any, ...]:
    """Generate a trace from parameters such as `sessions=500,turns=6`."""
    from kvtier.replay.synth import SyntheticTrace, generate

    known = {field.name: field.type for field in fields(SyntheticTrace)}
    parameters: dict[str, Any] = {"seed": seed}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ArgumentError(f"unknown parameter {name!r} of a synthetic trace; known: {', '.join(known)}")
        is_int = known[name] == "int"
        try:
            parameters[name] = int(value) if is_int else float(value)
        except ValueError:
            kind = "an integer" if is_int else "a number"
            raise ArgumentError(f"synthetic: {name} must be {kind}, got {value!r}") from None
    return tuple(generate(SyntheticTrace(**parameters)))


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
        inclusive=options.inclusive,
        routing=Routing(options.routing),
        **{
            name: getattr(options, name)
            for name in ("replicas", "max_rows", "max_step_tokens", "phases", "quantum", "seed")
        },
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


@contextmanager
def _progress(label: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar. Yield `update(share, label)`, where `share` is at most 1 and the label is optional."""
    with progress_bar(100, "%") as update:
        yield lambda share, what=label: update(int(share * 100), what)


def _print_result(options: argparse.Namespace, result: dict[str, Any]) -> int:
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
        print(f"\nReport written to {options.html}")
    return 0


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], shares: Sequence[int]) -> None:
    """Print a transposed table: one line for each of `columns`, because the table has few rows and many columns."""
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
