"""Replay: production traces, and synthetic ones, through the code that runs in production."""

from kvtier.replay.generate import SyntheticTrace, generate
from kvtier.replay.hits import HitReport, replay_hits
from kvtier.replay.trace import TRACE_BLOCK_TOKENS, Trace, TraceProblem, TraceRequest, read_trace, write_trace

__all__ = [
    "TRACE_BLOCK_TOKENS",
    "HitReport",
    "SyntheticTrace",
    "Trace",
    "TraceProblem",
    "TraceRequest",
    "generate",
    "read_trace",
    "replay_hits",
    "write_trace",
]
