"""Replay of production and synthetic traces on the engine's own cache and scheduler code. See docs/planner.md."""

from kvtier.replay.curves import OPTIMUM, HitPoint, sweep
from kvtier.replay.deployment import Deployment, Routing, Summary, route, scale_time, simulate
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec, PriceSpec, preset
from kvtier.replay.planner import PlanResult, plan
from kvtier.replay.recorder import Recorder
from kvtier.replay.synth import SyntheticTrace, generate
from kvtier.replay.trace import TRACE_BLOCK_TOKENS, Trace, TraceRequest, read_trace

__all__ = [
    "OPTIMUM",
    "TRACE_BLOCK_TOKENS",
    "Deployment",
    "DiskSpec",
    "GpuSpec",
    "HitPoint",
    "ModelSpec",
    "PlanResult",
    "PriceSpec",
    "Recorder",
    "Routing",
    "Summary",
    "SyntheticTrace",
    "Trace",
    "TraceRequest",
    "generate",
    "plan",
    "preset",
    "read_trace",
    "route",
    "scale_time",
    "simulate",
    "sweep",
]
