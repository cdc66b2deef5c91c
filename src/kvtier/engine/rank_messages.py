"""What rank 0 and the other ranks of an engine tell each other, and how it travels.

    rank 0 --Start, weights, Meet, Step, Plan, Sleep, Wake, ResizeHost, Ask, Close--> rank r
    rank 0 <--Hello, Ready, Report.., StepDone, Answer, Failed-- rank r

A message is a pickle. Both ends are ours and joined by a pipe that nobody else can open, so pickles are safe here. What
a rank is told it does in order, so that rank 0 need not wait before the next step to have its plan begun.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvtier.engine.forward import SequenceInput
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.ops import Ops
from kvtier.errors import EngineError
from kvtier.storage import StoreStats
from kvtier.worker.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank is made of; the tensors follow, layer by layer."""

    sharding: Sharding
    config: ModelConfig
    """Of its share of the model."""
    ops: type[Ops]
    device: str
    num_blocks: int
    block_tokens: int
    num_host_blocks: int
    """0: there is no host tier."""
    stores: Mapping[str, tuple[str, ...]]
    """The URLs of each store, which every rank opens for itself."""
    namespace: bytes
    secret: bytes
    """See CacheConfig."""
    num_threads: int
    """Of torch; 0 leaves them as they are."""


@dataclass(frozen=True, slots=True)
class Meet:
    """All ranks are there: join the group that adds up."""

    path: str
    """The file of the rendezvous, on this machine."""
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class RankStep:
    """Compute a batch."""

    inputs: tuple[SequenceInput, ...]
    copies: tuple[tuple[int, ...], tuple[int, ...]]
    """Blocks to copy before: sources and targets."""
    loads: tuple[int, ...]
    """Transfers that still bring blocks of it."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Let go of the device cache."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Have a device cache of so many blocks."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class ResizeHost:
    """Have so many blocks in host memory."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class GetStatus:
    """How are you?"""


@dataclass(frozen=True, slots=True)
class Close:
    """Finish what is under way, and end."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The process runs."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """It can compute; so many host slots can be used by now."""

    num_host_ready: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """The batch is computed; what its loads came to was reported before."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """To Sleep, Wake, ResizeHost and Ask."""

    is_busy: bool = False
    """Whether reports are still to come."""
    stats: Mapping[str, StoreStats] | None = None
    """By store."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank cannot go on."""

    reason: str


class RankLink:
    """One end of the pipe between two ranks. A message that does not come in time, or at all, is an EngineError."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection

    def send(self, message: object) -> None:
        """OSError if the other end is gone."""
        self.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def has_message(self, timeout: float | None = 0.0) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return self.connection.poll(timeout)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; EOFError or OSError if the other end is gone."""
        if not self.has_message(timeout):
            raise EngineError(f"it has not answered for {timeout} seconds")
        return pickle.loads(self.connection.recv_bytes())
