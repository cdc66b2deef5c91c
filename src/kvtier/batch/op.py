"""BatchOp: the eight operations in the life of a batch."""

from __future__ import annotations

from enum import Enum
from typing import Literal

Side = Literal["engine", "executor"]


class BatchOp(Enum):
    """What is done to a batch, in this order. Each op is one method of a Module.

    | op      | ancestor | what becomes what                                  | where         | side     |
    |---------|----------|----------------------------------------------------|---------------|----------|
    | ADD     | kAdd     | session -> request cache                           | host          | engine   |
    | SETUP   | kSetup   | request cache -> (batch -> device)                 | host to device| engine   |
    | PREPARE | kPrepare | (device -> stepping state)                         | device        | executor |
    | FORWARD | kForward | stepping state -> stepping state                   | device        | executor |
    | UNPREP  | kUnprep  | (stepping state -> device)                         | device        | executor |
    | FETCH   | kFetch   | (device -> batch)                                  | device to host| engine   |
    | UPDATE  | kUpdate  | batch -> request cache                             | host          | engine   |
    | REMOVE  | kDel     | request cache -> session                           | host          | engine   |

    ADD and REMOVE concern requests, once each; the six between them concern a batch, once per step.
    """

    ADD = "add"
    SETUP = "setup"
    PREPARE = "prepare"
    FORWARD = "forward"
    UNPREP = "unprep"
    FETCH = "fetch"
    UPDATE = "update"
    REMOVE = "remove"

    @property
    def side(self) -> Side:
        """Which thread runs it."""
        return "executor" if self in (BatchOp.PREPARE, BatchOp.FORWARD, BatchOp.UNPREP) else "engine"

    @property
    def per_batch(self) -> bool:
        """Whether it is done to a batch (each step) rather than to requests (once)."""
        return self not in (BatchOp.ADD, BatchOp.REMOVE)
