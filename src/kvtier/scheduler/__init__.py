"""Continuous batching on top of a CacheManager. The scheduler uses no torch, threads or clock."""

from kvtier.scheduler.request import Request, RequestState, Row, RowResult, SchedulerConfig, Step
from kvtier.scheduler.scheduler import Scheduler

__all__ = ["Request", "RequestState", "Row", "RowResult", "Scheduler", "SchedulerConfig", "Step"]
