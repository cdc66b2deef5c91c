"""Which requests run next: continuous batching over a CacheManager. No torch, no threads, no clock of its own."""

from kvtier.scheduler.request import Control, Request, RequestState
from kvtier.scheduler.scheduler import Scheduler
from kvtier.scheduler.step import Row, RowResult, SchedulerConfig, Step

__all__ = [
    "Control",
    "Request",
    "RequestState",
    "Row",
    "RowResult",
    "Scheduler",
    "SchedulerConfig",
    "Step",
]
