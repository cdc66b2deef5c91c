"""The life of a batch: the eight ops, the batch they carry through, and what takes part in it."""

from kvtier.batch.data import BATCH, COPY, BatchData
from kvtier.batch.environment import Environment, Key
from kvtier.batch.module import Module, check_modules
from kvtier.batch.op import BatchOp

__all__ = ["BATCH", "COPY", "BatchData", "BatchOp", "Environment", "Key", "Module", "check_modules"]
