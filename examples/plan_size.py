"""How much host memory and disk does a deployment need? Simulate generated traffic on several sizes; no GPU needed.

For your own traffic, record it with `kvtier serve --record FILE` and read it with kvtier.replay.read_trace. The command
`kvtier plan` does the same from the shell and writes a report (docs/planner.md).
"""

from __future__ import annotations

from kvtier.replay import (
    Deployment,
    DiskSpec,
    GpuSpec,
    ModelSpec,
    PriceSpec,
    SyntheticTrace,
    generate,
    plan,
    preset,
)

GIB = 1 << 30


def main() -> None:
    trace = list(generate(SyntheticTrace(sessions=60, session_rate=0.3, turns=4, think_seconds=40)))
    deployment = Deployment(
        preset(ModelSpec, "llama-3-8b"),
        preset(GpuSpec, "h200"),
        device_bytes=8 * GIB,
        disk=preset(DiskSpec, "nvme-gen4"),
    )
    result = plan(trace, deployment, target_ttft_p99=1.9, prices=preset(PriceSpec, "2026-q1"))
    print(f"{len(trace)} requests; all different blocks take {result.footprint_bytes / GIB:.1f} GiB")
    for point in result.points:
        sizes = f"host {point.host_bytes // GIB:3} GiB, disk {point.disk_bytes // GIB:3} GiB, ${point.price:6,.0f}"
        summary = point.summary
        print(f"{sizes}: {summary.hit_rate:5.1%} of prompt tokens cached, TTFT p99 {summary.ttft['p99']:.2f} s")
    chosen = result.chosen
    if chosen is None:
        print(f"no size reaches the target; the best p99 is {result.nearest.summary.ttft['p99']:.2f} s")
    else:
        print(f"cheapest: {chosen.host_bytes // GIB} GiB of host memory, {chosen.disk_bytes // GIB} GiB of disk")


if __name__ == "__main__":
    main()
