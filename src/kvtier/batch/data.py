"""BatchData: one batch on its way through the ops."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvtier.batch.environment import Environment, Key
from kvtier.batch.op import BatchOp
from kvtier.errors import ArgumentError, StateError
from kvtier.memory import BatchCopy, Event, Stream
from kvtier.state import Permutation

# The life of a slot; an op is legal in one state only, and abandon() leads back to free from anywhere:
#
#   free --begin()--> begun --SETUP--> ready                                    engine
#   ready --PREPARE--> prepared --FORWARD--> forwarded --UNPREP--> done         executor
#   done --FETCH--> fetched --UPDATE--> free                                    engine
_BEFORE = {
    BatchOp.SETUP: "begun",
    BatchOp.PREPARE: "ready",
    BatchOp.FORWARD: "prepared",
    BatchOp.UNPREP: "forwarded",
    BatchOp.FETCH: "done",
    BatchOp.UPDATE: "fetched",
}
_NO_ROWS = Permutation.identity(0)
_AFTER = dict(zip(_BEFORE, [*list(_BEFORE.values())[1:], "free"], strict=True))


class BatchData:
    """The slot of one phase: filled for a step, carried through the ops, and free again after UPDATE.

    `perm` says where its rows come from: `bs0` rows in the batch before, `bsz` in this one. `ready` is recorded by the
    engine when SETUP's copies are enqueued, `done` by the executor when everything is, `next` by `notify()`.
    """

    def __init__(self, phase: int) -> None:
        if phase < 0:
            raise ArgumentError(f"a phase counts from 0, got {phase}")
        self.phase = phase
        self.state = "free"
        self.sequence = -1
        """Which step it is for; rises by one with every batch begun anywhere. Filled by the engine."""
        self.ready, self.done, self.next = Event(), Event(), Event()
        self._clear()

    def _clear(self) -> None:
        self.perm = _NO_ROWS
        self.requests: Sequence[Any] = ()
        self.local_token_num: Sequence[int] = ()
        self._promise: Future[Event] = Future()
        self.error: BaseException | None = None
        """What went wrong on the device side. Filled by the executor."""
        self.failed_itself = False
        """Whether the error is this batch's own, not that of one before it."""
        self._environment = Environment()

    @property
    def bs0(self) -> int:
        """Rows of the batch before."""
        return self.perm.size0

    @property
    def bsz(self) -> int:
        """Rows of this batch."""
        return len(self.perm)

    @property
    def global_token_num(self) -> int:
        """Tokens of this step over all ranks."""
        return sum(self.local_token_num)

    def begin(self, sequence: int, perm: Permutation, requests: Sequence[Any], local_token_num: Sequence[int]) -> None:
        """Fill a free slot for a step: one request per row of the new order, tokens per rank."""
        if self.state != "free":
            raise StateError(f"phase {self.phase} is {self.state}: it still carries step {self.sequence}")
        if len(requests) != len(perm):
            raise ArgumentError(f"a batch of {len(perm)} rows needs as many requests, got {len(requests)}")
        if sequence <= self.sequence:
            raise StateError(f"step {sequence} cannot follow step {self.sequence} in phase {self.phase}")
        self._clear()
        self.sequence, self.perm = sequence, perm
        self.requests, self.local_token_num = tuple(requests), tuple(local_token_num)
        self.state = "begun"

    def environment(self, op: BatchOp) -> Environment:
        """The environment of an op: one for SETUP, one for the three of the executor, one for FETCH and UPDATE."""
        if op in (BatchOp.SETUP, BatchOp.PREPARE, BatchOp.FETCH):
            self._environment = Environment()
            self._environment.produce(BATCH, self)
            self._environment.produce(COPY, BatchCopy())
        return self._environment

    def check(self, op: BatchOp) -> None:
        """Raise unless `op` is what comes next."""
        if not op.per_batch:
            raise ArgumentError(f"{op.name} is done to requests, not to a batch")
        if self.state != _BEFORE[op]:
            raise StateError(f"{op.name} needs a batch that is {_BEFORE[op]}, phase {self.phase} is {self.state}")

    def finish(self, op: BatchOp) -> None:
        """Note that `op` is done (on the device: enqueued)."""
        self.check(op)
        self.state = _AFTER[op]
        if self.state == "free" and not self._promise.done():
            self._promise.cancel()

    def abandon(self) -> None:
        """Give the step up in whatever state, after an error. Whoever waits for `next` learns that it will not come."""
        self.state = "free"
        self._promise.cancel()

    def notify(self, stream: Stream) -> None:
        """Record `next` on `stream` and tell whoever waits for it; once per step, while the executor has the batch."""
        if self.state not in ("ready", "prepared", "forwarded"):
            raise StateError(f"notify() is for a batch the executor has, phase {self.phase} is {self.state}")
        if self._promise.done():
            raise StateError(f"phase {self.phase} was notified already in step {self.sequence}")
        self.next.record(stream)
        self._promise.set_result(self.next)

    def when_next(self) -> Future[Event]:
        """A future of `next`, resolved by `notify()`, cancelled when the step ends without it."""
        return self._promise


BATCH = Key("batch", BatchData)
"""The BatchData of the step, in every environment of a batch."""
COPY = Key("copy", BatchCopy)
"""The BatchCopy of the op, run once after all modules."""
