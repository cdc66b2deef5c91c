"""The life of a batch: the eight ops, the batch they carry through, and what takes part in it."""

from kvtier.batch.data import BATCH, COPY, BatchData
from kvtier.batch.environment import Environment, Key
from kvtier.batch.executor import InlineExecutor, ThreadExecutor
from kvtier.batch.module import Module, check_modules
from kvtier.batch.op import BatchOp
from kvtier.batch.pipeline import Pipeline
from kvtier.batch.ticket import Status, Ticket
from kvtier.batch.timeline import Timeline

__all__ = [
    "BATCH",
    "COPY",
    "BatchData",
    "BatchOp",
    "Environment",
    "InlineExecutor",
    "Key",
    "Module",
    "Pipeline",
    "Status",
    "ThreadExecutor",
    "Ticket",
    "Timeline",
    "check_modules",
]
