"""A pipeline that keeps several batches in flight. Modules implement the ops of a batch."""

from kvtier.batch.data import BATCH, COPY, BatchData, BatchOp, Environment, Key, Module, check_modules
from kvtier.batch.executor import Executor
from kvtier.batch.pipeline import Pipeline, Ticket, TicketStatus
from kvtier.batch.timeline import Timeline

__all__ = [
    "BATCH",
    "COPY",
    "BatchData",
    "BatchOp",
    "Environment",
    "Executor",
    "Key",
    "Module",
    "Pipeline",
    "Ticket",
    "TicketStatus",
    "Timeline",
    "check_modules",
]
