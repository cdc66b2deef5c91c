"""The process of a rank other than 0: computes its share of every step, and moves its slices of blocks.

It decides nothing. It ends when it is told to, when rank 0 is gone, or when something fails: a rank that has missed a
step can never catch up.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvtier.engine.cache_runtime import new_controller
from kvtier.engine.forward import ForwardBatch
from kvtier.engine.model import AllReduce, Model
from kvtier.engine.modules import DeviceCacheGroup
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
from kvtier.engine.split import with_tensors
from kvtier.engine.weights import LayerWeights, ModelWeights
from kvtier.errors import EngineError
from kvtier.messages import Plan
from kvtier.storage import ShardStores, open_shards

_POLL_SECONDS = 0.001
"""How often a rank looks after its transfers while it has nothing to compute."""
_IDLE_SECONDS = 0.5
"""How often it tells what its scrubber has found while there is nothing else."""


def main(descriptor: int) -> None:
    """Entry point of the process; `descriptor` is its end of the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever sends them to all processes means rank 0
        signal.signal(number, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    link = RankLink(connection)
    with contextlib.suppress(EOFError, OSError):  # rank 0 is gone: nobody to tell
        try:
            link.send(Hello())
            with contextlib.ExitStack() as stack:
                RankWorker(link, stack).run()
        except Exception as error:  # whatever it is, rank 0 is told, and this rank ends
            link.send(Failed(f"{type(error).__name__}: {error}"))


class RankWorker:
    """Does what rank 0 says, in order."""

    def __init__(self, link: RankLink, stack: contextlib.ExitStack) -> None:
        """What is opened is closed with `stack`."""
        self._link = link
        start: Start = link.receive()
        if start.num_threads:
            torch.set_num_threads(start.num_threads)
        weights = _receive_weights(link, start.config.num_layers, torch.device(start.device))
        meet: Meet = link.receive()
        rendezvous = Rendezvous(start.sharding.num_ranks, meet.path)
        all_reduce = join_group(start.sharding, weights.device, rendezvous, meet.timeout_seconds)
        self._group = _new_group(start, weights, all_reduce)
        self._stores = _open_stores(start, stack)
        self._controller = new_controller(
            *(start.num_host_blocks, [self._group], self._stores),
            *(start.namespace, start.sharding, start.secret),
        )
        stack.callback(self._controller.close)
        link.send(RankReady(self._controller.num_host_ready))

    def run(self) -> None:
        """Until told to end."""
        came: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._link, came), name="kvtier-rank-reader", daemon=True).start()
        while True:
            self._report()
            try:
                message = came.get(timeout=_POLL_SECONDS if self._controller.is_busy else _IDLE_SECONDS)
            except queue.Empty:
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, Close):
                return
            self._do(message)

    def _report(self) -> None:
        for report in self._controller.poll():
            self._link.send(report)

    def _do(self, message: object) -> None:
        match message:
            case RankStep():
                self._step(message)
            case Plan():
                self._controller.submit(message)
            case Sleep():
                self._controller.release()
                self._group.free()
                self._answer()
            case Wake():
                self._group.renew(message.num_blocks)
                self._controller.register([self._group.cache])
                self._answer()
            case ResizeHost():
                self._controller.resize_host(message.num_blocks, [self._group.cache])
                self._answer()
            case GetStatus():
                self._answer()
            case _:
                raise EngineError(f"rank 0 sent a {type(message).__name__}, which this rank does not know")

    def _step(self, step: RankStep) -> None:
        group, controller = self._group, self._controller
        device = group.model.weights.device
        waits = controller.layer_waits(step.loads) if step.loads else None
        batch = ForwardBatch.build(step.inputs, group.block_tokens, device)
        sources, targets = step.copies
        if sources:
            group.copy_blocks(sources, targets)
        group.model.forward(batch, group.cache, waits.before_layer if waits is not None else None)
        if waits is not None:
            waits.arrived()  # whether they did is in the reports, which go first
        self._report()
        self._link.send(StepDone())

    def _answer(self) -> None:
        self._report()
        self._link.send(
            RankStatus(self._controller.is_busy, {name: store.stats for name, store in self._stores.items()})
        )


def _read(link: RankLink, came: queue.SimpleQueue[object]) -> None:
    """Take in whatever comes, also while this rank sends. A pipe holds 200 KB: two ends that both send more than that,
    a plan's or a report's keys, and read only when it is sent, would wait for each other for good."""
    try:
        while True:
            came.put(link.receive())
    except (EOFError, OSError) as error:
        came.put(error)


def _receive_weights(link: RankLink, num_layers: int, device: torch.device) -> ModelWeights:
    """As Ranks sends them: all but the layers, then each of these."""
    rest: ModelWeights = link.receive()
    layers: list[LayerWeights] = [link.receive() for _ in range(num_layers)]
    return with_tensors(replace(rest, layers=tuple(layers)), lambda tensor: tensor.to(device))


def _new_group(start: Start, weights: ModelWeights, all_reduce: AllReduce) -> DeviceCacheGroup:
    return DeviceCacheGroup(Model(start.config, weights, start.ops(), all_reduce), start.num_blocks, start.block_tokens)


def _open_stores(start: Start, stack: contextlib.ExitStack) -> dict[str, ShardStores]:
    stores = {}
    for name, urls in start.stores.items():
        stores[name] = open_shards(urls, start.sharding.shards, start.sharding.num_shards)
        stack.callback(stores[name].close)
    return stores
