"""Convert results of `kvtier replay` and `kvtier plan` to a JSON object and an HTML page.

The page contains the JSON object that --json prints, and loads nothing from the network.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import kvtier
from kvtier.errors import ArgumentError
from kvtier.replay.curves import Accesses, HitPoint
from kvtier.replay.deployment import GIB, Deployment, Summary
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec
from kvtier.replay.planner import PlanPoint, PlanResult
from kvtier.replay.trace import Trace

Json = dict[str, Any]
SHOWN_PROBLEMS = 20  # maximum number of invalid lines in a report
TIERS = ("device", "host", "disk")
OVERLOAD_SECONDS = 10.0  # if the median queue time is above this, the report says that the GPUs are overloaded
SHARES = ("hit rate", *TIERS, "GPU busy", "never reused")
"""Columns whose values are fractions."""


def describe_trace(trace: Trace, names: Sequence[str]) -> Json:
    requests = trace.requests
    accesses = Accesses(requests)
    times = [request.timestamp_ms for request in requests]
    return {
        "files": list(names),
        "num_requests": len(requests),
        "num_problems": len(trace.problems),
        "problems": list(trace.problems[:SHOWN_PROBLEMS]),
        "seconds": (times[-1] - times[0]) / 1000 if times else 0.0,
        "block_tokens": requests[0].block_tokens if requests else 0,
        "num_blocks": len(accesses.paths),
        "num_distinct_blocks": accesses.num_paths,
        "prompt_tokens": sum(request.input_tokens for request in requests),
        "answer_tokens": sum(request.output_tokens for request in requests),
    }


def describe_setup(setup: Deployment, names: Mapping[str, str]) -> Json:
    """Describe a deployment. `names` contains the names of the model, the GPU and the disk."""
    specs: dict[str, ModelSpec | GpuSpec | DiskSpec] = {"model": setup.model, "gpu": setup.gpu}
    if setup.disk is not None:
        specs["disk"] = setup.disk
    return {
        **names,
        "sources": {what: spec.source for what, spec in specs.items()},
        "assumed": {what: {name: getattr(spec, name) for name in spec.assumed} for what, spec in specs.items()},
        "token_bytes": setup.model.token_bytes,
        "device_bytes": setup.kv_bytes,
        "host_bytes": setup.host_bytes,
        "inclusive": setup.inclusive,
        "disk_bytes": setup.disk_bytes,
        "link_bandwidth": setup.gpu.link_bandwidth,
        "replicas": setup.replicas,
        "routing": setup.routing.value,
        "max_rows": setup.max_rows,
        "phases": setup.phases,
        "max_step_tokens": setup.max_step_tokens,
        "quantum": setup.quantum,
        "seed": setup.seed,
    }


def replay_result(trace: Json, setup: Json, curve: Sequence[HitPoint], runs: Mapping[str, Summary]) -> Json:
    """Return the result of `kvtier replay`: one run per policy."""
    results = [{"policy": policy, **asdict(summary)} for policy, summary in runs.items()]
    return _result("replay", trace, setup, curve, results)


def plan_result(trace: Json, setup: Json, found: PlanResult) -> Json:
    setup = {**setup, "footprint_bytes": found.footprint_bytes}
    return {
        **_result("plan", trace, setup, found.curve, [_plan_point(point) for point in found.points]),
        "prices": {**asdict(found.prices), "assumed": list(found.prices.assumed)},
        "advice": {
            "target_ttft_p99": found.target_ttft_p99,
            "reached": found.chosen is not None,
            "setup": _plan_point(found.chosen or found.nearest),
            "more_host": _plan_point(found.more_host),
            "more_disk": _plan_point(found.more_disk) if found.more_disk else None,
            "text": advice_text(found),
        },
    }


def _result(command: str, trace: Json, setup: Json, curve: Sequence[HitPoint], results: list[Json]) -> Json:
    block_bytes = trace["block_tokens"] * setup["token_bytes"]
    points = [
        {
            "policy": point.policy,
            "capacity_blocks": point.capacity,
            "capacity_bytes": point.capacity * block_bytes,
            "hit_rate": point.hit_rate,
        }
        for point in curve
    ]
    header = {"command": command, "kvtier": kvtier.__version__, "trace": trace, "setup": setup}
    return {**header, "curve": points, "results": results}


def _plan_point(point: PlanPoint) -> Json:
    fields = asdict(point)
    summary = fields.pop("summary")
    return {**fields, **summary}


def advice_text(found: PlanResult) -> list[str]:
    base = found.chosen or found.nearest
    p99, rate = base.summary.ttft["p99"], base.summary.hit_rate
    if found.chosen is not None:
        text = [
            f"Buy {sizes_text(base.host_bytes, base.disk_bytes)} per replica (about ${base.price:,.0f}). This is the "
            f"cheapest size with TTFT p99 of {found.target_ttft_p99:g} s or less: {p99:.2f} s, with {rate:.1%} hits."
        ]
    else:
        refused = base.summary.num_refused
        holds = "serves every request with" if refused else "has"
        text = [
            f"No simulated size {holds} TTFT p99 of {found.target_ttft_p99:g} s or less. The nearest is "
            f"{sizes_text(base.host_bytes, base.disk_bytes)} with {p99:.2f} s and a hit rate of {rate:.1%}. The GPUs "
            f"compute {base.summary.utilisation:.0%} of the time, and requests queue for "
            f"{base.summary.queue['p99']:.2f} s (p99)."
        ]
        if refused:
            text.append(
                f"This size refuses {refused:,} of {base.summary.num_requests:,} requests: device memory is too small."
            )
    for what, more in (("host memory", found.more_host), ("disk", found.more_disk)):
        if more is not None:
            text.append(
                f"100 GiB more {what} would change the hit rate by {(more.summary.hit_rate - rate) * 100:+.2f} points "
                f"and TTFT p99 by {(more.summary.ttft['p99'] - p99):+.3f} s "
                f"({(more.summary.ttft['p50'] - base.summary.ttft['p50']):+.3f} s p50)."
            )
    return text


def sizes_text(host_bytes: int, disk_bytes: int) -> str:
    if not host_bytes:
        return "no host memory"
    disk = f" and {size_text(disk_bytes)} of disk" if disk_bytes else ""
    return f"{size_text(host_bytes)} of host memory{disk}"


def size_text(num_bytes: float) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} bytes"


def write_report(result: Json, path: str | Path) -> None:
    try:
        Path(path).write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write the report {path}: {error.strerror}") from error


def page(result: Json) -> str:
    template = (resources.files("kvtier.replay") / "report.html").read_text(encoding="utf-8")
    drawn = {"intro": intro(result), "charts": charts(result), "tables": tables(result)}
    title = html.escape(
        f"kvtier {result['command']}: {', '.join(Path(name).name for name in result['trace']['files'])}"
    )
    # Inside a script element, only tags and comments, which begin with "<", could end the data.
    data = json.dumps({"result": result, **drawn}).replace("<", "\\u003c")
    return template.replace("@TITLE@", title).replace("@DATA@", data)


def intro(result: Json) -> list[str]:
    trace, setup = result["trace"], result["setup"]
    all_bytes = trace["num_distinct_blocks"] * trace["block_tokens"] * setup["token_bytes"]
    text = [
        f"{trace['num_requests']:,} requests in {trace['seconds'] / 60:,.0f} minutes, "
        f"{trace['prompt_tokens'] / max(1, trace['num_requests']):,.0f} prompt tokens and "
        f"{trace['answer_tokens'] / max(1, trace['num_requests']):,.0f} answer tokens on average; "
        f"{trace['num_blocks']:,} full blocks of {trace['block_tokens']} tokens, {trace['num_distinct_blocks']:,} "
        f"of them different ({size_text(all_bytes)}).",
        f"{setup['replicas']} x {setup['model']} on {setup['gpu']} with {size_text(setup['device_bytes'])} for KV"
        + (f", routing by {setup['routing']}" if setup["replicas"] > 1 else "")
        + ".",
    ]
    text += _origins(result)
    late = max((run["queue"]["p50"] for run in result["results"]), default=0.0)
    if late > OVERLOAD_SECONDS:
        text.append(
            f"The GPUs are overloaded: half of the requests queue for {late:,.0f} s or more. Times to first token then "
            f"depend on the length of the trace, not on the cache; use more replicas (--replicas) or GPUs (--gpus)."
        )
    refused = _refused(result)
    if any(refused):
        run = result["results"][refused.index(max(refused))]
        text.append(
            f"{run['num_refused']:,} of {run['num_requests']:,} requests are refused, because they need more KV than "
            f"fits on the GPUs (--device, --gpus). Hit rates do not include these requests, and times to first token "
            f"do not include requests that got no token."
        )
    if trace["num_problems"]:
        text.append(f"{trace['num_problems']:,} invalid lines were skipped. The first: {trace['problems'][0]}")
    return [*text, *result.get("advice", {}).get("text", ())]


def _origins(result: Json) -> list[str]:
    """Return the sources of the hardware figures and prices, and the hardware figures that have no source."""
    setup = result["setup"]
    sources = [f"{what}: {source}" for what, source in setup["sources"].items() if source]
    if "prices" in result:
        sources.append(f"prices: {result['prices']['source']}")
    assumed = [
        f"{what} {name} {value:g}" for what, values in setup["assumed"].items() for name, value in values.items()
    ]
    text = [f"Sources: {'; '.join(sources)}."] if sources else []
    if assumed:
        text.append(f"Assumed, without a source: {', '.join(assumed)}.")
    return text


def charts(result: Json) -> list[Json]:
    """Return line charts with a numeric x axis, and bar charts with one group of bars per name."""
    drawn = [_curve(result)] if result["curve"] else []
    return drawn + (_plan_charts(result) if result["command"] == "plan" else _replay_charts(result))


def tables(result: Json) -> list[Json]:
    is_plan = result["command"] == "plan"
    first = ["host", "disk", "price $"] if is_plan else ["policy"]
    if any(_refused(result)):
        first.append("refused")
    columns = [
        *first, "hit rate", *TIERS, "TTFT p50 s", "p90 s", "p99 s", "queue p99 s", "answer tokens/s", "GPU busy",
        *(f"{link['name']} GB/s" for link in _widest(result)), *(f"evicted from {tier}" for tier in TIERS),
        "never reused",
    ]  # fmt: skip
    rows = [_row(run, is_plan, result) for run in result["results"]]
    shares = [number for number, name in enumerate(columns) if name in SHARES and number >= len(first)]
    caption = "Every setup" if is_plan else "Every policy"
    return [{"caption": caption, "columns": columns, "rows": rows, "shares": shares}]


def _refused(result: Json) -> list[int]:
    return [run["num_refused"] for run in result["results"]]


def _widest(result: Json) -> list[Json]:
    # A run with a disk has more links than a run without a disk.
    links: list[Json] = max((run["links"] for run in result["results"]), key=len, default=[])
    return links


def _row(run: Json, is_plan: bool, result: Json) -> list[Any]:
    first = [size_text(run["host_bytes"]), size_text(run["disk_bytes"]), run["price"]] if is_plan else [run["policy"]]
    if any(_refused(result)):
        first.append(run["num_refused"])
    return [
        *first,
        run["hit_rate"],
        *(run["hit_rates"].get(tier, 0.0) for tier in TIERS),
        *(run["ttft"][share] for share in ("p50", "p90", "p99")),
        run["queue"]["p99"],
        run["answer_tokens_per_second"],
        run["utilisation"],
        *(_rate(run, link["name"]) for link in _widest(result)),
        *(run["evictions"].get(tier, 0) for tier in TIERS),
        run["dead_on_arrival"],
    ]


def _line(id: str, title: str, x: str, y: str, series: dict[str, list[list[float]]], **options: Any) -> Json:
    named = [{"name": name, "points": points} for name, points in series.items()]
    return {"id": id, "kind": "line", "title": title, "x": x, "y": y, "series": named, **options}


def _bars(id: str, title: str, y: str, names: list[str], series: dict[str, list[float]], **options: Any) -> Json:
    values = [{"name": name, "values": values} for name, values in series.items()]
    return {"id": id, "kind": "bars", "title": title, "y": y, "names": names, "series": values, **options}


def _curve(result: Json) -> Json:
    series: dict[str, list[list[float]]] = {}
    for point in result["curve"]:
        series.setdefault(point["policy"], []).append([point["capacity_bytes"] / GIB, point["hit_rate"]])
    title = "Hit rate of one cache that all replicas share, over the size of the cache"
    return _line("curve", title, "capacity, GiB", "hit rate of full blocks", series, log=True, percent=True)


def _replay_charts(result: Json) -> list[Json]:
    runs = result["results"]
    names = [run["policy"] for run in runs]
    tiers = [tier for tier in TIERS if any(tier in run["hit_rates"] for run in runs)]
    links = [link["name"] for link in _widest(result)]
    hits = {tier: [run["hit_rates"].get(tier, 0.0) for run in runs] for tier in tiers}
    ttft = {share: [run["ttft"][share] for run in runs] for share in ("p50", "p90", "p99")}
    rates = {name: [_rate(run, name) for run in runs] for name in links}
    return [
        _bars(
            "tiers", "Cached prompt tokens by tier", "share of prompt tokens", names, hits, percent=True, stacked=True
        ),
        _bars("ttft", "Time to first token", "seconds", names, ttft),
        _bars("links", "Traffic of the links", "GB/s, all replicas", names, rates),
    ]


def _rate(run: Json, name: str) -> float:
    rates: dict[str, float] = {link["name"]: link["bytes_per_second"] / 1e9 for link in run["links"]}
    return rates.get(name, 0.0)


def _plan_charts(result: Json) -> list[Json]:
    runs = result["results"]
    bare = [run for run in runs if not run["disk_bytes"]]
    ttft = {share: [[run["host_bytes"] / GIB, run["ttft"][share]] for run in bare] for share in ("p50", "p90", "p99")}
    hits: dict[str, list[list[float]]] = {"host only": [[run["host_bytes"] / GIB, run["hit_rate"]] for run in bare]}
    disk_hits: dict[str, list[list[float]]] = {}
    disk_ttft: dict[str, list[list[float]]] = {}
    for host in sorted({run["host_bytes"] for run in runs if run["disk_bytes"]}):
        name = f"{size_text(host)} host"
        mine = [run for run in runs if run["host_bytes"] == host]
        disk_hits[name] = [[run["disk_bytes"] / GIB, run["hit_rate"]] for run in mine]
        disk_ttft[name] = [[run["disk_bytes"] / GIB, run["ttft"]["p99"]] for run in mine]
    host_axis, disk_axis = "host memory per replica, GiB", "disk per replica, GiB"
    drawn = [
        _line("host-hits", "Hit rate over host memory", host_axis, "of prompt tokens", hits, percent=True),
        _line("host-ttft", "Time to first token over host memory", host_axis, "seconds", ttft),
    ]
    if disk_hits:
        drawn += [
            _line("disk-hits", "Hit rate over disk", disk_axis, "of prompt tokens", disk_hits, percent=True),
            _line("disk-ttft", "TTFT p99 over disk", disk_axis, "seconds", disk_ttft),
        ]
    return drawn
