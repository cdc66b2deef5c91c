"""Batches, their operations and the modules that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar

from kvtier.errors import ArgumentError, StateError
from kvtier.memory import BatchCopy, Event
from kvtier.memory.copy_paths import PathName
from kvtier.state import Permutation

Side = Literal["engine", "executor"]


class BatchOp(Enum):
    """The operations of a batch, in order of execution. Each op is one method of a Module.

    TurboMind is the engine of LMDeploy. Its names of the ops are in the second column.

    | op      | TurboMind| data flow                                          | where         | side     |
    |---------|----------|----------------------------------------------------|---------------|----------|
    | ADD     | kAdd     | session -> request cache                           | host          | engine   |
    | SETUP   | kSetup   | request cache -> (batch -> device)                 | host to device| engine   |
    | PREPARE | kPrepare | (device -> stepping state)                         | device        | executor |
    | FORWARD | kForward | stepping state -> stepping state                   | device        | executor |
    | UNPREP  | kUnprep  | (stepping state -> device)                         | device        | executor |
    | FETCH   | kFetch   | (device -> batch)                                  | device to host| engine   |
    | UPDATE  | kUpdate  | batch -> request cache                             | host          | engine   |
    | REMOVE  | kDel     | request cache -> session                           | host          | engine   |

    ADD and REMOVE run once per request. The six ops between them run once per step, for the whole batch.

    Data flow: the session is the request as submitted. The request cache is host data of one request in the modules.
    The batch is host data of one step, and `device` is device memory for the inputs and results of one step. The
    stepping state is device memory that is kept between steps. Copies in parentheses are enqueued and run later.
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
        """The side of the pipeline that runs the op. Without an executor thread, the engine's thread runs all ops."""
        return "executor" if self in (BatchOp.PREPARE, BatchOp.FORWARD, BatchOp.UNPREP) else "engine"

    @property
    def per_batch(self) -> bool:
        """True if the op runs once per step, for the whole batch. False if the op runs once per request."""
        return self not in (BatchOp.ADD, BatchOp.REMOVE)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key(Generic[T]):
    """Name and type of an entry in an Environment."""

    name: str
    type: type[T]

    def __str__(self) -> str:
        return f"{self.name} ({self.type.__name__})"


class Environment:
    """Values that modules exchange, by key. A value is produced once and can be read any number of times."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Key[Any], Any]] = {}

    def produce(self, key: Key[T], value: T) -> T:
        """Add an entry and return the value. Raise StateError for an existing entry, ArgumentError for a wrong type."""
        if key.name in self._entries:
            raise StateError(f"{key} already exists; an entry can be produced only once")
        if not isinstance(value, key.type):
            raise ArgumentError(f"{key} cannot hold a {type(value).__name__}")
        self._entries[key.name] = (key, value)
        return value

    def at(self, key: Key[T]) -> T:
        """Return the value of an entry. Raise an error if the entry does not exist or has another type."""
        entry = self._entries.get(key.name)
        if entry is None:
            known = ", ".join(str(known) for known, _ in self._entries.values()) or "nothing"
            raise StateError(f"there is no {key} in the batch's environment; known: {known}")
        if entry[0] != key:
            raise ArgumentError(f"the entry {entry[0]} cannot be read as {key}")
        value: T = entry[1]
        return value


_PER_BATCH = [op for op in BatchOp if op.per_batch]
_NEXT: dict[BatchOp, BatchOp | None] = dict(zip(_PER_BATCH, [*_PER_BATCH[1:], None], strict=True))


class BatchData:
    """A slot of the pipeline, with the number `phase`. A slot holds one batch from SETUP to UPDATE and is then reused.

    `perm` maps the `bs0` rows of the previous batch to the `bsz` rows of this batch. If the pipeline has streams, the
    engine's stream records the event `ready` after the copies of SETUP. The executor's stream records the event `done`
    after the work of PREPARE, FORWARD and UNPREP.
    """

    def __init__(self, phase: int, path: PathName | None = None) -> None:
        """`path` selects how copies are made, see BatchCopy."""
        self.phase = phase
        self._path = path
        self.next_op: BatchOp | None = None
        """The op that the batch needs next. None if the slot is free."""
        self.sequence = -1
        """Number of the step. All phases share one counter."""
        self.ready, self.done = Event(), Event()
        self.perm = Permutation.identity(0)
        self.requests: Sequence[Any] = ()
        self.local_token_num: Sequence[int] = ()
        self.work: Any = None
        """Data that the caller of the pipeline passes to the modules for this step."""
        self.error: BaseException | None = None
        """Error in an op of this batch, or a StateError if an earlier batch failed on the device."""
        self.failed_itself = False
        """True if the error occurred in this batch."""
        self._environment = Environment()

    @property
    def bs0(self) -> int:
        """Number of rows in the previous batch."""
        return self.perm.size0

    @property
    def bsz(self) -> int:
        return len(self.perm)

    @property
    def global_token_num(self) -> int:
        """Number of tokens in this step, summed over all ranks."""
        return sum(self.local_token_num)

    def begin(
        self,
        sequence: int,
        perm: Permutation,
        requests: Sequence[Any],
        local_token_num: Sequence[int],
        work: Any = None,
    ) -> None:
        """Fill a free slot for a step. Pass one request per row of the new order and one token count per rank."""
        if self.next_op is not None:
            raise StateError(f"phase {self.phase} is in use, because step {self.sequence} is not finished")
        if len(requests) != len(perm):
            raise ArgumentError(f"a batch of {len(perm)} rows needs {len(perm)} requests, got {len(requests)}")
        self.sequence, self.perm, self.error, self.failed_itself = sequence, perm, None, False
        self.requests, self.local_token_num, self.work = tuple(requests), tuple(local_token_num), work
        self.next_op = BatchOp.SETUP

    def environment(self, op: BatchOp) -> Environment:
        """Return an op's environment: a new one for SETUP, PREPARE and FETCH, otherwise that of the previous op."""
        if op in (BatchOp.SETUP, BatchOp.PREPARE, BatchOp.FETCH):
            self._environment = Environment()
            self._environment.produce(BATCH, self)
            self._environment.produce(COPY, BatchCopy(path=self._path))
        return self._environment

    def check(self, op: BatchOp) -> None:
        """Raise StateError if `op` is not the next op of this batch."""
        if self.next_op is not op:
            found = "is free" if self.next_op is None else f"needs {self.next_op.name} next"
            raise StateError(f"{op.name} cannot run, because phase {self.phase} {found}")

    def finish(self, op: BatchOp) -> None:
        """Record that the host has run `op`, and free the slot after the last op. Device work may still be queued."""
        self.check(op)
        self.next_op = _NEXT[op]
        if self.next_op is None:
            self.abandon()

    def abandon(self) -> None:
        """Free the slot, even before the last op, and drop references to tensors.

        Otherwise the reference cycle of batch and environment would keep the tensors until a garbage collection.
        """
        self.next_op, self.work, self._environment = None, None, Environment()


BATCH = Key("batch", BatchData)
"""Key of the step's BatchData. Every environment of the batch has this entry."""
COPY = Key("copy", BatchCopy)
"""Key of the BatchCopy to which modules add copies. The copies run after the op has run in all modules."""


class Module:
    """Base class with one method per BatchOp. By default, a method does nothing.

    `reads` contains the keys that a module reads from its environment, and `writes` the keys that it produces. A new
    pipeline calls `check_modules` to check both sets.
    """

    reads: ClassVar[frozenset[Key[Any]]] = frozenset()
    writes: ClassVar[frozenset[Key[Any]]] = frozenset()

    def add(self, requests: Sequence[Any]) -> None:
        """Add new requests on the host. An exception rejects the requests."""

    def setup(self, env: Environment) -> None:
        """Enqueue copies of the step's inputs from host to device."""

    def prepare(self, env: Environment) -> None:
        """Enqueue device-to-device copies that put the rows of the state into the order of this batch."""

    def forward(self, env: Environment) -> None:
        """Run the model or sampler on the device."""

    def unprep(self, env: Environment) -> None:
        """Copy the results to device memory that the next batch does not overwrite. FETCH reads them there."""

    def fetch(self, env: Environment) -> None:
        """Enqueue copies of the results from device to host."""

    def update(self, env: Environment) -> None:
        """Process the results on the host. The copies of FETCH have finished."""

    def remove(self, requests: Sequence[Any]) -> None:
        """Remove requests that are in no batch in flight, including requests that a module rejected in `add`."""


def check_modules(modules: Sequence[Module], given: Sequence[Key[Any]]) -> None:
    """Raise ArgumentError if a module reads an entry that nothing produces, or if an entry has two producers."""
    producers: dict[str, str] = {key.name: "the pipeline" for key in given}
    for module in modules:
        for key in sorted(module.writes, key=str):
            if key.name in producers:
                raise ArgumentError(f"{type(module).__name__} writes {key}, which {producers[key.name]} already writes")
            producers[key.name] = type(module).__name__
    for module in modules:
        for key in sorted(module.reads, key=str):
            if key.name not in producers:
                raise ArgumentError(
                    f"{type(module).__name__} reads {key}, which no module writes; written: {', '.join(producers)}"
                )
