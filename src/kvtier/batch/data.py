"""A batch and its parts.

BatchOp       the eight operations of a batch
BatchData     one batch in progress
Environment   values that modules exchange, by typed name (the ancestors' TensorMap)
Module        a participant: input processors, the model, samplers, output processors
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar

from kvtier.errors import ArgumentError, StateError
from kvtier.memory import BatchCopy, Event, Stream
from kvtier.state import Permutation

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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key(Generic[T]):
    """The name and type of an entry. Two keys of one name and type are the same key."""

    name: str
    type: type[T]

    def __str__(self) -> str:
        return f"{self.name} ({self.type.__name__})"


class Environment:
    """Entries by key. An entry is produced once, read any number of times, and may be consumed once."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Key[Any], Any]] = {}

    def __contains__(self, key: Key[Any]) -> bool:
        return key.name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def produce(self, key: Key[T], value: T) -> T:
        """Add an entry, which must not be there yet. Returns the value."""
        if key.name in self._entries:
            raise StateError(f"{key} is there already: an entry is produced once")
        if not isinstance(value, key.type):
            raise ArgumentError(f"{key} was given a {type(value).__name__}")
        self._entries[key.name] = (key, value)
        return value

    def at(self, key: Key[T]) -> T:
        """The value of an entry; an error that lists what there is if it is not."""
        found = self.get(key)
        if found is None:
            known = ", ".join(str(known) for known, _ in self._entries.values()) or "nothing"
            raise StateError(f"there is no {key} in the batch's environment; known: {known}")
        return found

    def get(self, key: Key[T]) -> T | None:
        """The value of an entry, or None."""
        entry = self._entries.get(key.name)
        if entry is None:
            return None
        known, value = entry
        if known != key:
            raise ArgumentError(f"{known} was asked for as {key}")
        found: T = value
        return found

    def consume(self, key: Key[T]) -> T:
        """Take an entry out."""
        value = self.at(key)
        del self._entries[key.name]
        return value


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


class Module:
    """One method per BatchOp, each of which does nothing unless overridden.

    `reads` and `writes` name the entries of the environment a module needs and makes, so that a missing producer is
    found before the first step. The engine thread runs all but the three in the middle, which the executor runs.
    """

    reads: ClassVar[frozenset[Key[Any]]] = frozenset()
    writes: ClassVar[frozenset[Key[Any]]] = frozenset()

    def add(self, requests: Sequence[Any]) -> None:
        """Requests have arrived; raise to refuse them. Host."""

    def setup(self, env: Environment) -> None:
        """Enqueue what the step needs on the device. Host to device."""

    def prepare(self, env: Environment) -> None:
        """Bring per-sequence state into the order of this batch. Device; copies run after all modules."""

    def forward(self, env: Environment) -> None:
        """Compute. Device."""

    def unprep(self, env: Environment) -> None:
        """Put aside what FETCH will read, before the next batch overwrites it. Device."""

    def fetch(self, env: Environment) -> None:
        """Enqueue the way back to the host. Device to host."""

    def update(self, env: Environment) -> None:
        """Use the results, which are there now. Host."""

    def remove(self, requests: Sequence[Any]) -> None:
        """Requests are leaving, none of their batches is in flight. Host.

        Also those that another module refused in `add`, before or after this one saw them.
        """


def check_modules(modules: Sequence[Module], given: Sequence[Key[Any]]) -> None:
    """Raise unless every entry a module reads is given or written by a module, and none is written twice."""
    producers: dict[str, str] = {key.name: "the pipeline" for key in given}
    for module in modules:
        for key in sorted(module.writes, key=str):
            if key.name in producers:
                raise ArgumentError(f"{type(module).__name__} writes {key}, which {producers[key.name]} writes already")
            producers[key.name] = type(module).__name__
    for module in modules:
        for key in sorted(module.reads, key=str):
            if key.name not in producers:
                raise ArgumentError(
                    f"{type(module).__name__} reads {key}, which nobody writes; written: {', '.join(producers)}"
                )
