"""Ranks: the class with which rank 0 of a tensor-parallel engine starts and controls the processes of other ranks.

    rank 0: scheduler, CacheManager, sampling     ──Plan, step──>     ranks 1, 2, ..
                                                  <───Reports────

Every rank holds a share of the model and of each block. The ranks call all_reduce twice per layer. If a rank dies,
fails or exceeds a timeout, all later calls that need another rank raise EngineError, and `close` kills the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any, TypeVar

import torch

from kvtier.cache.metrics import Counted
from kvtier.engine.cache_runtime import Controller, NullController
from kvtier.engine.forward import SequenceInput
from kvtier.engine.model import Model
from kvtier.engine.rank_link import RankCall, RankConfig, RankMessage, join_group, receive, rendezvous, send
from kvtier.engine.split import split_config, split_layer, split_weights, with_tensors, without_layers
from kvtier.errors import EngineError
from kvtier.memory import Event
from kvtier.messages import Plan, Report
from kvtier.scheduler import Step
from kvtier.storage import StoreStats
from kvtier.storage.open import sum_stats
from kvtier.worker.layer_waits import LayerWaits

_MAIN = "from kvtier.engine.rank_process import main; main({})"  # Python program of the other ranks
_SLOW_SECONDS = 600.0
"""Timeout for the start and for replies to calls. It is long, because the start and some calls allocate memory."""
_CLOSE_SECONDS = 30.0
"""Timeout for `close`. Closing finishes the writes to stores."""
_BLAME_SECONDS = 0.2
"""After an error, timeout for another rank to exit or to send its next message, which may state the cause."""

T = TypeVar("T")


class Ranks:
    """Controls the other ranks. As a `Controller`, it executes plans on all ranks. Use it only on the engine thread."""

    overlaps_compute = False  # each plan is submitted to all ranks as a whole, before the step
    is_copying = False

    def __init__(self, model: Model, config: RankConfig) -> None:
        """Start the processes of the other ranks and send each process a share of the model. `config` is for rank 0.

        `self.model` is the share of rank 0. The caller sets `own` to the controller of the caches of rank 0.
        """
        self.own: Controller = NullController()
        num_ranks = config.sharding.num_ranks
        local = split_config(model.config, num_ranks)
        self._timeout = config.timeout_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection[Any, Any]] = []
        self._reports: list[Report] = []
        self._num_ended = [0] * (num_ranks - 1)
        """For each other rank, the number of computed steps for which `end_step` has not been called."""
        self._error: EngineError | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-ranks-")  # created with mode 0700
        self._threads = torch.get_num_threads()
        device = model.weights.device
        if device.type == "cpu":  # all ranks share the cores
            config = replace(config, num_threads=max(1, self._threads // num_ranks))
        try:
            for _ in range(1, num_ranks):
                self._start()
            for rank in self._ranks:
                self._receive(rank, _SLOW_SECONDS)
                self._send_model(rank, model, config)
            path = os.path.join(self._folder.name, "store")
            store = rendezvous(path, num_ranks)
            self._broadcast(path)
            weights = split_weights(model.config, model.weights, 0, num_ranks)
            all_reduce = join_group(config.sharding, device, store, self._timeout)
            self.model = Model(local, weights, type(model.ops)(), all_reduce)
            self._num_host_ready: int = min(self._receive(rank, _SLOW_SECONDS) for rank in self._ranks)
        except BaseException:
            self.close()
            raise
        if config.num_threads:
            torch.set_num_threads(config.num_threads)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, step: Step, inputs: Sequence[SequenceInput]) -> None:
        """Send a step to the other ranks, which compute steps in order. Rank 0 must compute the step too."""
        self._broadcast(RankCall("step", (tuple(inputs), step.copies, step.loads), replies=False))

    def end_step(self) -> None:
        """Wait until the other ranks have computed the oldest step in flight. `poll` then returns their reports."""
        for rank in self._ranks:
            while not self._num_ended[rank - 1]:
                self._next(rank, self._timeout)
            self._num_ended[rank - 1] -= 1

    def error_of(self, error: BaseException) -> BaseException:
        """Return the most likely cause of `error`, which a step raised on rank 0. The engine cannot continue.

        The cause may be another rank, because all_reduce fails on every rank if one rank is lost.
        """
        if not isinstance(error, Exception):
            self._fail(f"rank 0 was stopped in a step by {type(error).__name__}")
            return error
        if isinstance(error, EngineError):
            for rank in self._ranks:
                if self._exit_code(rank):
                    return self._fail(f"the process of rank {rank} ended with exit code {self._exit_code(rank)}")
            for rank in self._ranks:
                try:
                    while not self._num_ended[rank - 1]:
                        self._next(rank, _BLAME_SECONDS)
                except EngineError as theirs:
                    return theirs
        return self._fail(f"rank 0 failed in a step: {type(error).__name__}: {error}")

    # ---- Controller ------------------------------------------------------------------------------------------------

    @property
    def num_host_ready(self) -> int:
        """Number of host slots that all ranks can use. The other ranks report their numbers only when they start."""
        return min(self.own.num_host_ready, self._num_host_ready)

    @property
    def is_busy(self) -> bool:
        return self.own.is_busy or any(self._call("is_busy")) or bool(self._reports)

    def record_event(self) -> Event | None:
        return self.own.record_event()

    def submit(self, plan: Plan, after: Event | None = None) -> None:
        self._broadcast(RankCall("submit", (plan,), replies=False))
        self.own.submit(plan, after)

    def poll(self, *, loads_only: bool = False) -> list[Report]:
        own = self.own.poll(loads_only=loads_only)
        for rank, link in enumerate(self._links, 1):
            while self._guard(rank, link.poll):
                self._next(rank, 0.0)
        reports, self._reports = [*own, *self._reports], []
        return reports

    def wait(self, timeout: float) -> None:
        if self.own.is_busy:
            self.own.wait(timeout)
        else:
            wait_for(self._links, timeout)

    def layer_waits(self, transfer_ids: Sequence[int]) -> LayerWaits:
        """Return the layer waits of rank 0. The other ranks wait for layers in their own processes."""
        return self.own.layer_waits(transfer_ids)

    def release(self) -> None:
        self.own.release()
        self._call("sleep")

    def register(self, caches: Sequence[torch.Tensor]) -> None:
        """Register the caches of rank 0, and allocate caches with the same number of blocks on the other ranks."""
        self._call("wake", len(caches[0]))
        self.own.register(caches)

    def resize_host(self, num_blocks: int, caches: Sequence[torch.Tensor]) -> None:
        self._call("resize_host", num_blocks)
        self.own.resize_host(num_blocks, caches)

    def stats(self, store: str) -> list[StoreStats]:
        """Return the statistics of a store on each of the other ranks."""
        return [stats[store] for stats in self._call("stats")]

    def close(self) -> None:
        """Close the controller of rank 0 and end the processes of the other ranks. Idempotent."""
        try:
            self.own.close()
        finally:
            self._end_processes()

    @property
    def _ranks(self) -> range:
        return range(1, len(self._links) + 1)

    def _end_processes(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError), link:  # closes the link, also if `send` raises
                if self._error is None:  # after an error, the rank may hang, and `send` blocks if the pipe is full
                    send(link, RankCall("close"))
        timeout = _CLOSE_SECONDS if self._error is None else 0.0
        for process in self._processes:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()
        if self._links:
            torch.set_num_threads(self._threads)
        self._links, self._processes = [], []

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", _MAIN.format(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL))
        self._links.append(ours)

    def _send_model(self, rank: int, model: Model, config: RankConfig) -> None:
        sharding = replace(config.sharding, rank=rank)
        device = f"cuda:{rank}" if model.weights.device.type == "cuda" else config.device
        self._send(rank, replace(config, sharding=sharding, device=device))
        self._send(rank, with_tensors(without_layers(model.weights, rank), _own))
        for layer in model.weights.layers:  # one layer at a time, to avoid a second copy of the model in memory
            mine = split_layer(model.config, layer, rank, sharding.num_ranks)
            self._send(rank, with_tensors(mine, _own))

    def _call(self, method: str, *args: object) -> list[Any]:
        self._broadcast(RankCall(method, args))
        return [self._receive(rank, _SLOW_SECONDS) for rank in self._ranks]

    def _broadcast(self, message: object) -> None:
        for rank in self._ranks:
            self._send(rank, message)

    def _send(self, rank: int, message: object) -> None:
        self._guard(rank, lambda: send(self._links[rank - 1], message))

    def _receive(self, rank: int, timeout: float) -> Any:
        """Return the value of the next reply. Reports that arrive before the reply are kept for `poll`."""
        while not (message := self._next(rank, timeout)).is_reply:
            pass
        return message.value

    def _next(self, rank: int, timeout: float) -> RankMessage:
        message: RankMessage = self._guard(rank, lambda: receive(self._links[rank - 1], timeout))
        self._reports += message.reports
        self._num_ended[rank - 1] += message.ends_step
        if message.error:
            raise self._fail(f"rank {rank} failed: {message.error}")
        return message

    def _guard(self, rank: int, use_link: Callable[[], T]) -> T:
        """Call `use_link`, which uses the pipe to a rank. After a failure, the engine cannot continue."""
        if self._error is not None:
            raise EngineError(f"this engine cannot continue: {self._error}") from self._error
        try:
            return use_link()
        except EngineError as error:
            raise self._fail(f"rank {rank}: {error}") from error
        except (EOFError, OSError) as error:
            raise self._fail(f"the process of rank {rank} ended with exit code {self._exit_code(rank)}") from error

    def _exit_code(self, rank: int) -> int | None:
        """Wait briefly for a rank's process to end. Return its exit code, or None if the process has not ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._processes[rank - 1].wait(_BLAME_SECONDS)
        return None

    def _fail(self, why: str) -> EngineError:
        self._error = EngineError(f"{why}; an engine needs all of its ranks. Close this engine and start a new one")
        return self._error


@dataclass(frozen=True, slots=True)
class RankedStore:
    name: str
    own: Counted
    ranks: Ranks

    @property
    def stats(self) -> StoreStats:
        return sum_stats([self.own.stats, *self.ranks.stats(self.name)])


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU. Without a copy, pickling a view would send the whole underlying tensor."""
    return tensor.detach().cpu().clone()
