"""Replay: production traces, and synthetic ones, through the code that runs in production. docs/planner.md."""

from kvtier.replay.curves import OPTIMUM, HitPoint, HitReport, replay_hits, sweep
from kvtier.replay.deployment import Deployment, Routing, Summary, route, scale_time, simulate
from kvtier.replay.following import Log, ReplayDiff, follow, read_log
from kvtier.replay.hardware import DiskSpec, GpuSpec, ModelSpec, PriceSpec, preset
from kvtier.replay.planner import Advice, PlanResult, plan
from kvtier.replay.recorder import Recorder
from kvtier.replay.synth import SyntheticTrace, generate
from kvtier.replay.trace import TRACE_BLOCK_TOKENS, Trace, TraceProblem, TraceRequest, read_trace, write_trace

__all__ = [
    "OPTIMUM",
    "TRACE_BLOCK_TOKENS",
    "Advice",
    "Deployment",
    "DiskSpec",
    "GpuSpec",
    "HitPoint",
    "HitReport",
    "Log",
    "ModelSpec",
    "PlanResult",
    "PriceSpec",
    "Recorder",
    "ReplayDiff",
    "Routing",
    "Summary",
    "SyntheticTrace",
    "Trace",
    "TraceProblem",
    "TraceRequest",
    "follow",
    "generate",
    "plan",
    "preset",
    "read_log",
    "read_trace",
    "replay_hits",
    "route",
    "scale_time",
    "simulate",
    "sweep",
    "write_trace",
]
