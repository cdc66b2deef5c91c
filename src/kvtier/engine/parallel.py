"""Ranks: the other processes of a tensor-parallel engine, as rank 0 sees them.

    rank 0    scheduler, CacheManager, sampling      ──Plan, Step──>   ranks 1 ..: their share of the model,
              its own share of model and blocks      <──Reports───     their slices of every block

Every rank computes with its share of the weights, and all of them add up twice a layer. What one of them cannot do none
can: if a rank dies, fails or does not answer in time, every call from then on is an EngineError, and `close` ends the
others.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait as wait_for
from typing import TypeVar

import torch

from kvtier.engine.cache_runtime import Controller
from kvtier.engine.model import Model
from kvtier.engine.rank_group import Rendezvous, join_group
from kvtier.engine.rank_messages import (
    Close,
    Failed,
    GetStatus,
    Hello,
    Meet,
    RankLink,
    RankReady,
    RankStatus,
    RankStep,
    ResizeHost,
    Sleep,
    Start,
    StepDone,
    Wake,
)
from kvtier.engine.split import split_config, split_layer, split_weights, with_tensors, without_layers
from kvtier.errors import EngineError
from kvtier.memory import Event
from kvtier.messages import Plan, Report
from kvtier.storage import ShardStores, StoreStats
from kvtier.storage.open import sum_stats
from kvtier.worker.layer_waits import LayerWaits
from kvtier.worker.sharding import Sharding

_MAIN = "from kvtier.engine.rank_process import main; main({})"
_SLOW_SECONDS = 600.0
"""For what takes as long as there is memory: starting, host tiers of another size."""
_CLOSE_SECONDS = 30.0
"""For writing what is under way to stores."""
_BLAME_SECONDS = 0.2
"""For a rank to end, or to say what happened to it, once something has."""

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What ranks are made of, beside the model."""

    num_ranks: int
    num_shards: int
    num_blocks: int
    block_tokens: int
    num_host_blocks: int
    stores: Mapping[str, tuple[str, ...]]
    namespace: bytes
    secret: bytes
    timeout_seconds: float


class Ranks:
    """Ranks 1 .. of an engine. For the engine's thread."""

    def __init__(self, model: Model, config: RankConfig) -> None:
        """Start a process for each, and send it its share of the model. `self.model` is rank 0's own."""
        local = split_config(model.config, config.num_ranks)
        self._timeout = config.timeout_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[RankLink] = []
        self._reports: list[Report] = []
        self._error: EngineError | None = None
        self._rendezvous: Rendezvous | None = None
        self._threads = torch.get_num_threads()
        device = model.weights.device
        num_threads = max(1, self._threads // config.num_ranks) if device.type == "cpu" else 0
        try:
            for _ in range(1, config.num_ranks):
                self._start()
            for rank in range(1, config.num_ranks):
                self._receive(rank, Hello, _SLOW_SECONDS)
                self._send_model(rank, model, config, num_threads)
            self._rendezvous = Rendezvous(config.num_ranks)
            self._broadcast(Meet(self._rendezvous.path, config.timeout_seconds))
            weights = split_weights(model.config, model.weights, 0, config.num_ranks)
            mine = Sharding(0, config.num_ranks, config.num_shards)
            all_reduce = join_group(mine, device, self._rendezvous, config.timeout_seconds)
            self.model = Model(local, weights, type(model.ops)(), all_reduce)
            ready = [self._receive(rank, RankReady, _SLOW_SECONDS) for rank in range(1, config.num_ranks)]
            self.num_host_ready = min(each.num_host_ready for each in ready)
        except BaseException:
            self.close()
            raise
        if num_threads:
            torch.set_num_threads(num_threads)  # all ranks have the same cores

    # ---- steps -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, step: RankStep) -> Iterator[None]:
        """Around rank 0's part of a step. What its loads came to is in `take_reports` afterwards, of every rank."""
        self._broadcast(step)
        try:
            yield
        except Exception as error:
            raise self._blamed(error) from error
        except BaseException as error:  # an exit, or an interrupt: the others wait for rank 0, which will not come
            self._lost(f"rank 0 was stopped in a step by {type(error).__name__}")
            raise
        for rank in self._ranks:
            self._receive(rank, StepDone, self._timeout)

    # ---- plans and memory ------------------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> None:
        """Begin what a plan says, behind the steps before."""
        self._broadcast(plan)

    def take_reports(self) -> list[Report]:
        """What the ranks have done since; never waits."""
        for rank, link in enumerate(self._links, 1):
            while self._tried(rank, link.has_message):
                message = self._next(rank, 0.0)
                assert isinstance(message, Report), message
        taken, self._reports = self._reports, []
        return taken

    def wait(self, timeout: float) -> None:
        """Until a rank has something to tell, at most so long."""
        wait_for([link.connection for link in self._links], timeout)

    def sleep(self) -> None:
        """Have all let go of their device caches."""
        self._all(Sleep())

    def wake(self, num_blocks: int) -> None:
        """Have all have device caches of so many blocks."""
        self._all(Wake(num_blocks))

    def resize_host(self, num_blocks: int) -> None:
        """Have all have so many blocks in host memory."""
        self._all(ResizeHost(num_blocks))

    @property
    def is_busy(self) -> bool:
        """Whether reports are still to come."""
        return any(answer.is_busy for answer in self._all(GetStatus())) or bool(self._reports)

    def stats(self, store: str) -> list[StoreStats]:
        """Of every rank's part of a store."""
        return [answer.stats[store] for answer in self._all(GetStatus()) if answer.stats is not None]

    def close(self) -> None:
        """End the processes, by force those that do not end by themselves. Twice is fine."""
        for link in self._links:
            if self._error is None:  # a rank that hangs reads nothing, and its pipe may be full
                with contextlib.suppress(OSError):
                    link.send(Close())
            with contextlib.suppress(OSError):
                link.connection.close()
        patience = _CLOSE_SECONDS if self._error is None else 0.0
        for process in self._processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._links:
            torch.set_num_threads(self._threads)
        self._links, self._processes = [], []

    # ---- inside ----------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> range:
        return range(1, len(self._links) + 1)

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", _MAIN.format(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, bufsize=0)
            )
        self._links.append(RankLink(ours))

    def _send_model(self, rank: int, model: Model, config: RankConfig, num_threads: int) -> None:
        device = model.weights.device
        start = Start(
            Sharding(rank, config.num_ranks, config.num_shards),
            split_config(model.config, config.num_ranks),
            type(model.ops),
            f"cuda:{rank}" if device.type == "cuda" else str(device),
            config.num_blocks,
            config.block_tokens,
            config.num_host_blocks,
            config.stores,
            config.namespace,
            config.secret,
            num_threads,
        )
        self._send(rank, start)
        self._send(rank, with_tensors(without_layers(model.weights, rank), _own))
        for layer in model.weights.layers:  # one at a time: no second model in memory
            mine = split_layer(model.config, layer, rank, config.num_ranks)
            self._send(rank, with_tensors(mine, _own))

    def _all(self, message: object) -> list[RankStatus]:
        self._broadcast(message)
        return [self._receive(rank, RankStatus, _SLOW_SECONDS) for rank in self._ranks]

    def _broadcast(self, message: object) -> None:
        for rank in self._ranks:
            self._send(rank, message)

    def _send(self, rank: int, message: object) -> None:
        self._tried(rank, lambda: self._links[rank - 1].send(message))

    def _receive(self, rank: int, kind: type[Message], timeout: float) -> Message:
        """The next message that is no report, which must be of this kind."""
        while isinstance(message := self._next(rank, timeout), Report):
            pass
        if not isinstance(message, kind):
            raise self._lost(f"rank {rank} said {message!r} where {kind.__name__} was due")
        return message

    def _next(self, rank: int, timeout: float) -> object:
        message = self._tried(rank, lambda: self._links[rank - 1].receive(timeout))
        if isinstance(message, Failed):
            raise self._lost(f"rank {rank} failed: {message.reason}")
        if isinstance(message, Report):
            self._reports.append(message)
        return message

    def _tried(self, rank: int, call: Callable[[], Message]) -> Message:
        """Something with a rank's pipe."""
        if self._error is not None:
            raise EngineError(f"this engine cannot go on: {self._error}") from self._error
        try:
            return call()
        except EngineError as error:
            raise self._lost(f"rank {rank}: {error}") from error
        except (EOFError, OSError) as error:
            raise self._lost(f"the process of rank {rank} is gone, with exit code {self._exit_code(rank)}") from error

    def _blamed(self, error: Exception) -> EngineError:
        """Rank 0 failed in a step: whose fault it is. A sum fails on every rank when one of them is lost."""
        if isinstance(error, EngineError):
            for rank in self._ranks:
                if self._exit_code(rank):
                    return self._lost(f"the process of rank {rank} is gone, with exit code {self._exit_code(rank)}")
            for rank in self._ranks:
                try:
                    self._receive(rank, StepDone, _BLAME_SECONDS)
                except EngineError as theirs:
                    return theirs
        return self._lost(f"rank 0 failed in a step: {type(error).__name__}: {error}")

    def _exit_code(self, rank: int) -> int | None:
        """Of a process that has ended, or is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._processes[rank - 1].wait(_BLAME_SECONDS)
        return None

    def _lost(self, why: str) -> EngineError:
        self._error = EngineError(f"{why}; the ranks of an engine go together: close it and start another")
        return self._error


class RankedController:
    """The controllers of all ranks as one `Controller`; `own` is that of rank 0."""

    overlaps_compute = False  # a plan goes to every rank before its step
    is_copying = False

    def __init__(self, own: Controller, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    @property
    def num_host_ready(self) -> int:
        """Host slots that every rank had when it was ready."""
        return min(self._own.num_host_ready, self._ranks.num_host_ready)

    @property
    def is_busy(self) -> bool:
        """True if reports are outstanding."""
        return self._own.is_busy or self._ranks.is_busy

    def present(self) -> Event | None:
        """See Controller."""
        return self._own.present()

    def submit(self, plan: Plan, after: Event | None = None) -> None:
        """Start a plan on every rank."""
        self._ranks.submit(plan)
        self._own.submit(plan, after)

    def poll(self, *, loads_only: bool = False) -> list[Report]:
        """Return new reports of all ranks without waiting."""
        return [*self._own.poll(loads_only=loads_only), *self._ranks.take_reports()]

    def wait(self, timeout: float) -> None:
        """Wait for progress, at most `timeout` seconds."""
        if self._own.is_busy:
            self._own.wait(timeout)
        else:
            self._ranks.wait(timeout)

    def layer_waits(self, transfer_ids: Sequence[int]) -> LayerWaits:
        """Return the waits of rank 0; the other ranks wait in their own processes."""
        return self._own.layer_waits(transfer_ids)

    def release(self) -> None:
        """Forget the device tensors on every rank."""
        self._own.release()
        self._ranks.sleep()

    def register(self, caches: Sequence[torch.Tensor]) -> None:
        """Use these tensors, and on the other ranks new ones with as many blocks."""
        self._ranks.wake(len(caches[0]))
        self._own.register(caches)

    def resize_host(self, num_blocks: int, caches: Sequence[torch.Tensor]) -> None:
        """Replace the host memory of every rank."""
        self._ranks.resize_host(num_blocks)
        self._own.resize_host(num_blocks, caches)

    def close(self) -> None:
        """End every rank. Closing twice is safe."""
        try:
            self._own.close()
        finally:
            self._ranks.close()


@dataclass(frozen=True, slots=True)
class RankedStore:
    """A store of which every rank has its part; `stats` are of all of them."""

    name: str
    own: ShardStores
    ranks: Ranks

    @property
    def stats(self) -> StoreStats:
        """Asks every rank."""
        return sum_stats([self.own.stats, *self.ranks.stats(self.name)])


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own, on the CPU: what is pickled of a view is all that it is a view of."""
    return tensor.detach().cpu().clone()
