"""Continuous batching over a CacheManager: selects the rows of each step. No torch, no threads, no clock."""

from kvtier.scheduler.request import Request, RequestState, Row, RowResult, SchedulerConfig, Step
from kvtier.scheduler.scheduler import Scheduler

__all__ = [
    "Request",
    "RequestState",
    "Row",
    "RowResult",
    "Scheduler",
    "SchedulerConfig",
    "Step",
]
