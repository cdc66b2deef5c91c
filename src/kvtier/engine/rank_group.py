"""The group of an engine's ranks, which adds up what each of them has. No global state: an engine has its own."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvtier.engine.model import AllReduce
from kvtier.errors import EngineError, UnavailableError
from kvtier.worker.sharding import Sharding

_HOST = "127.0.0.1"
_MEET_SECONDS = 300.0


class Rendezvous:
    """Where ranks find each other: a file in a folder that no other user can open.

    torch's TCPStore would listen on all interfaces and admit anybody who connects. Rank 0 owns the folder, and keeps it
    as long as the group: NCCL reads the file again whenever it makes a communicator.
    """

    def __init__(self, num_ranks: int, path: str = "") -> None:
        """Without a path, a new one."""
        if not dist.is_available():
            raise UnavailableError("this build of torch has no torch.distributed, which tensor parallelism needs")
        self._folder = None if path else tempfile.TemporaryDirectory(prefix="kvtier-ranks-")  # of mode 0700
        self.path = path if self._folder is None else os.path.join(self._folder.name, "store")
        self.store: Any = dist.FileStore(self.path, num_ranks)  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=_MEET_SECONDS))

    def close(self) -> None:
        """Delete the folder, if it is this one's. Twice is fine."""
        if self._folder is not None:
            self._folder.cleanup()


def join_group(sharding: Sharding, device: torch.device, rendezvous: Rendezvous, timeout: float) -> AllReduce:
    """Meet the other ranks, which must call it, too; returns how to add up. A sum that takes longer is an error."""
    kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    if device.type == "cuda":  # written for several GPUs, and run on none so far
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # all ranks are on this machine
        options = kind.Options()
    else:
        options = kind._Options()
        options._devices = [kind.create_device(hostname=_HOST)]  # and not what this machine's name resolves to
    options._timeout = timedelta(seconds=_MEET_SECONDS)  # until all are there; a sum has less
    group = kind(rendezvous.store, sharding.rank, sharding.num_ranks, options)
    limits: Any = dist.AllreduceOptions()
    limits.timeout = timedelta(seconds=timeout)

    def all_reduce(mine: torch.Tensor) -> torch.Tensor:
        """In place where it can be. On CUDA the stream waits, and not the host."""
        if not mine.numel():
            return mine
        total = mine.contiguous()
        try:
            group.allreduce([total], limits).wait()
        except RuntimeError as error:  # a rank died, or took longer than the limit
            raise EngineError(f"rank {sharding.rank} of {sharding.num_ranks} cannot add up: {error}") from error
        return total

    return all_reduce
