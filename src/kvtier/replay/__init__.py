"""Replay: production traces, and synthetic ones, through the code that runs in production."""

from kvtier.replay.curves import OPTIMUM, HitPoint, sweep
from kvtier.replay.generate import SyntheticTrace, generate
from kvtier.replay.hits import HitReport, replay_hits
from kvtier.replay.routing import Routing, route, scale_time
from kvtier.replay.trace import TRACE_BLOCK_TOKENS, Trace, TraceProblem, TraceRequest, read_trace, write_trace

__all__ = [
    "OPTIMUM",
    "TRACE_BLOCK_TOKENS",
    "HitPoint",
    "HitReport",
    "Routing",
    "SyntheticTrace",
    "Trace",
    "TraceProblem",
    "TraceRequest",
    "generate",
    "read_trace",
    "replay_hits",
    "route",
    "scale_time",
    "sweep",
    "write_trace",
]
