"""What `kvtier replay` and `kvtier plan` found, as one JSON object: the same for --json and for the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import kvtier
from kvtier.replay.curves import Accesses, HitPoint
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec
from kvtier.replay.planner import Advice, PlanPoint, PlanResult
from kvtier.replay.setup import Setup, Summary
from kvtier.replay.trace import Trace

Json = dict[str, Any]
SHOWN_PROBLEMS = 20


def describe_trace(trace: Trace, names: Sequence[str]) -> Json:
    """The trace in numbers."""
    requests = trace.requests
    accesses = Accesses(requests)
    times = [request.timestamp_ms for request in requests]
    return {
        "files": list(names),
        "num_requests": len(requests),
        "num_problems": len(trace.problems),
        "problems": [str(problem) for problem in trace.problems[:SHOWN_PROBLEMS]],
        "seconds": (times[-1] - times[0]) / 1000 if times else 0.0,
        "block_tokens": requests[0].block_tokens if requests else 0,
        "num_blocks": len(accesses.paths),
        "num_distinct_blocks": accesses.num_paths,
        "prompt_tokens": sum(request.input_tokens for request in requests),
        "answer_tokens": sum(request.output_tokens for request in requests),
    }


def describe_setup(setup: Setup, names: Mapping[str, str]) -> Json:
    """The setup in numbers; `names` are those of the model, the GPU and the disk."""
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
        "disk_bytes": setup.disk_bytes,
        "link_bandwidth": setup.gpu.link_bandwidth,
        "replicas": setup.replicas,
        "routing": setup.routing.value,
        "max_rows": setup.max_rows,
        "max_step_tokens": setup.max_step_tokens,
        "quantum": setup.quantum,
        "seed": setup.seed,
    }


def replay_result(trace: Json, setup: Json, curve: Sequence[HitPoint], runs: Mapping[str, Summary]) -> Json:
    """Of `kvtier replay`: one run for each policy."""
    return {
        "command": "replay",
        "kvtier": kvtier.__version__,
        "trace": trace,
        "setup": setup,
        "curve": [_hit_point(point, trace, setup) for point in curve],
        "results": [{"policy": policy, **_summary(summary)} for policy, summary in runs.items()],
    }


def plan_result(trace: Json, setup: Json, found: PlanResult) -> Json:
    """Of `kvtier plan`."""
    return {
        "command": "plan",
        "kvtier": kvtier.__version__,
        "trace": trace,
        "setup": {**setup, "footprint_bytes": found.footprint_bytes},
        "curve": [_hit_point(point, trace, setup) for point in found.curve],
        "results": [_plan_point(point) for point in found.points],
        "prices": {**asdict(found.prices), "assumed": list(found.prices.assumed)},
        "advice": _advice(found.advice),
    }


def _hit_point(point: HitPoint, trace: Json, setup: Json) -> Json:
    return {
        "policy": point.policy,
        "capacity_blocks": point.capacity,
        "capacity_bytes": point.capacity * trace["block_tokens"] * setup["token_bytes"],
        "hit_rate": point.hit_rate,
    }


def _plan_point(point: PlanPoint) -> Json:
    return {
        "host_bytes": point.host_bytes,
        "disk_bytes": point.disk_bytes,
        "price": point.price,
        **_summary(point.summary),
    }


def _summary(summary: Summary) -> Json:
    return {**asdict(summary), "links": [asdict(link) for link in summary.links]}


def _advice(advice: Advice) -> Json:
    base = advice.chosen or advice.nearest
    return {
        "target_ttft_p99": advice.target_ttft_p99,
        "reached": advice.chosen is not None,
        "setup": _plan_point(base),
        "more_host": _plan_point(advice.more_host) if advice.more_host else None,
        "more_disk": _plan_point(advice.more_disk) if advice.more_disk else None,
        "text": advice_text(advice),
    }


def advice_text(advice: Advice) -> list[str]:
    """The advice in sentences."""
    base = advice.chosen or advice.nearest
    p99, rate = base.summary.ttft["p99"], base.summary.hit_rate
    if advice.chosen is not None:
        text = [
            f"Buy {sizes_text(base.host_bytes, base.disk_bytes)} a replica (about ${base.price:,.0f}): the cheapest "
            f"that holds TTFT p99 at {advice.target_ttft_p99:g} s or less. It comes to {p99:.2f} s and hits {rate:.1%}."
        ]
    else:
        refused = base.summary.num_refused
        holds = "serves every request and holds" if refused else "holds"
        text = [
            f"No size that was looked at {holds} TTFT p99 at {advice.target_ttft_p99:g} s or less. The nearest is "
            f"{sizes_text(base.host_bytes, base.disk_bytes)} with {p99:.2f} s and {rate:.1%} hits: what is left is not "
            f"for a cache to mend. The GPUs compute {base.summary.utilisation:.0%} of the time, and requests queue for "
            f"{base.summary.queue['p99']:.2f} s (p99)."
        ]
        if refused:
            text.append(f"It refuses {refused:,} of {base.summary.num_requests:,} requests, for want of device memory.")
    for what, more in (("host memory", advice.more_host), ("disk", advice.more_disk)):
        if more is not None:
            text.append(
                f"100 GiB more {what} would bring {(more.summary.hit_rate - rate) * 100:+.2f} points of hits and "
                f"{(more.summary.ttft['p99'] - p99):+.3f} s of TTFT p99 "
                f"({(more.summary.ttft['p50'] - base.summary.ttft['p50']):+.3f} s p50)."
            )
    return text


def sizes_text(host_bytes: int, disk_bytes: int) -> str:
    """As an operator says it."""
    if not host_bytes:
        return "no host memory"
    disk = f" and {size_text(disk_bytes)} of disk" if disk_bytes else ""
    return f"{size_text(host_bytes)} of host memory{disk}"


def size_text(num_bytes: float) -> str:
    """Bytes in the unit that makes them short."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} bytes"
