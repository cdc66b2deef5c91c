"""Which requests run next: continuous batching over a CacheManager. No torch, no threads, no clock of its own."""

from kvtier.scheduler.request import ControlOp, Request, RequestState, Row, RowResult, SchedulerConfig, Step
from kvtier.scheduler.scheduler import Scheduler

__all__ = [
    "ControlOp",
    "Request",
    "RequestState",
    "Row",
    "RowResult",
    "Scheduler",
    "SchedulerConfig",
    "Step",
]
