"""Connections between the ranks of an engine: a pipe to rank 0 for messages, and a process group for all_reduce.

    rank 0 ──RankConfig, weights, path for `rendezvous`, then RankCalls──> rank r
    rank 0 <──RankMessages── rank r

Messages are pickled, which is safe because only processes of this engine use the pipe. A rank executes calls in order,
so rank 0 can submit a plan and the next step without waiting. Each engine has its own process group.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kvtier.engine.model import AllReduce
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.ops import Ops
from kvtier.errors import EngineError, UnavailableError
from kvtier.messages import Report
from kvtier.worker.sharding import Sharding

_HOST = "127.0.0.1"  # all ranks are on one machine
_MEET_SECONDS = 300.0  # timeout for joining the process group


@dataclass(frozen=True, slots=True)
class RankConfig:
    sharding: Sharding
    model: ModelConfig
    """Shape of the whole model, not of the rank's share."""
    ops: type[Ops]
    device: str
    num_blocks: int
    block_tokens: int
    num_host_blocks: int
    """0 if there is no host tier."""
    stores: Mapping[str, tuple[str, ...]]
    """URLs of each store, by name. Every rank opens its own part of each store."""
    namespace: bytes
    secret: bytes  # see CacheConfig
    timeout_seconds: float
    """Timeout for one all_reduce, and for one step."""
    num_threads: int = 0
    """Number of torch threads; 0 keeps the default of torch."""


class RankCall(NamedTuple):
    method: str
    args: tuple[object, ...] = ()
    replies: bool = True


class RankMessage(NamedTuple):
    """Reports from a rank. With `is_reply`, also the result of a call. A rank exits after it has sent an error."""

    value: Any = None
    error: str = ""
    reports: tuple[Report, ...] = ()
    is_reply: bool = True
    ends_step: bool = False
    """True if the rank sends the message after a step. `reports` then includes the reports of the step's loads."""


def send(connection: Connection[Any, Any], message: object) -> None:
    """Send a message. Raise OSError if the other end is closed."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection[Any, Any], timeout: float | None = None) -> Any:
    """Return the next message. Raise EngineError on timeout, and EOFError or OSError if the other end is closed."""
    if not connection.poll(timeout):
        raise EngineError(f"no message within {timeout} seconds")
    return pickle.loads(connection.recv_bytes())


def rendezvous(path: str, num_ranks: int) -> Any:
    """Open the file through which the ranks connect. Its folder must be private and must outlive the process group.

    NCCL reads the file again whenever it creates a communicator. torch's TCPStore is not used, because it would listen
    on all interfaces and accept every connection.
    """
    if not dist.is_available():
        raise UnavailableError("this build of torch has no torch.distributed, which tensor parallelism needs")
    store: Any = dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=_MEET_SECONDS))
    return store


def join_group(sharding: Sharding, device: torch.device, store: Any, timeout: float) -> AllReduce:
    """Join the process group. Every rank must call this function. Return the all_reduce of the group."""
    kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    if device.type == "cuda":  # not yet tested on several GPUs
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # all ranks are on this machine
        options = kind.Options()
    else:
        options = kind._Options()
        options._devices = [kind.create_device(hostname=_HOST)]  # gloo's default is the address of the host name
    options._timeout = timedelta(seconds=_MEET_SECONDS)  # for joining; `timeout` is for all_reduce
    group = kind(store, sharding.rank, sharding.num_ranks, options)
    limits: Any = dist.AllreduceOptions()
    limits.timeout = timedelta(seconds=timeout)

    def all_reduce(mine: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place if it is contiguous. On CUDA, only the stream waits, not the host."""
        if not mine.numel():
            return mine
        total = mine.contiguous()
        try:
            group.allreduce([total], limits).wait()
        except RuntimeError as error:  # a rank died, or the timeout passed
            raise EngineError(f"all_reduce failed on rank {sharding.rank} of {sharding.num_ranks}: {error}") from error
        return total

    return all_reduce
