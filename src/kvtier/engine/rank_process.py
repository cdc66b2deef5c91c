"""The process of a rank other than 0. It computes a share of every step and moves a share of every block.

The process executes calls from rank 0 and makes no decisions. It ends when rank 0 dies or closes the engine. It also
ends after any error, because a rank that has missed a step cannot continue.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvtier.cache.allocation import BlockCopy
from kvtier.engine.cache_runtime import new_controller
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model import Model
from kvtier.engine.modules import DeviceCacheGroup, unknown_tokens
from kvtier.engine.rank_link import RankCall, RankConfig, RankMessage, join_group, receive, rendezvous, send
from kvtier.engine.split import split_config, with_tensors
from kvtier.engine.weights import ModelWeights
from kvtier.messages import Plan
from kvtier.storage import ShardStores, StoreStats, open_shards

_POLL_SECONDS = 0.001
"""Interval between polls while transfers are in flight and there is nothing to compute."""
_IDLE_SECONDS = 0.5
"""Interval between polls when no transfer is in flight. Polls can find, for example, damaged host blocks."""


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # all ranks may get these signals; only rank 0 reacts
        signal.signal(number, signal.SIG_IGN)
    link: Connection[Any, Any] = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):  # rank 0 died
        try:
            send(link, RankMessage())
            with contextlib.ExitStack() as stack:
                worker = RankWorker(link, stack)
                gc.collect()
                gc.freeze()  # full collections of modules and weights would delay steps
                worker.run()
        except Exception as error:
            send(link, RankMessage(error=f"{type(error).__name__}: {error}"))


class RankWorker:
    """Executes calls from rank 0 in order. A RankCall contains the name of the method to call."""

    def __init__(self, link: Connection[Any, Any], stack: contextlib.ExitStack) -> None:
        """`stack` closes the controller and the stores."""
        self._link = link
        config: RankConfig = receive(link)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        sharding = config.sharding
        weights: ModelWeights = receive(link)  # the layers follow in separate messages
        weights = replace(weights, layers=tuple(receive(link) for _ in range(config.model.num_layers)))
        weights = with_tensors(weights, lambda tensor: tensor.to(config.device))
        store = rendezvous(receive(link), sharding.num_ranks)
        all_reduce = join_group(sharding, weights.device, store, config.timeout_seconds)
        model = Model(split_config(config.model, sharding.num_ranks), weights, config.ops(), all_reduce)
        self._group = DeviceCacheGroup(model, config.num_blocks, config.block_tokens)
        self._stores: dict[str, ShardStores] = {}
        for name, urls in config.stores.items():
            self._stores[name] = open_shards(urls, sharding.shards, sharding.num_shards)
            stack.callback(self._stores[name].close)
        self._controller = new_controller(
            config.num_host_blocks, [self._group], self._stores, config.namespace, sharding, config.secret
        )
        stack.callback(self._controller.close)
        send(link, RankMessage(self._controller.num_host_ready))

    def run(self) -> None:
        calls: queue.SimpleQueue[RankCall | Exception] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._link, calls), name="kvtier-rank-reader", daemon=True).start()
        while True:
            if reports := self._controller.poll():
                send(self._link, RankMessage(reports=tuple(reports), is_reply=False))
            try:
                call = calls.get(timeout=_POLL_SECONDS if self._controller.is_busy else _IDLE_SECONDS)
            except queue.Empty:
                continue
            if isinstance(call, Exception):
                raise call
            if call.method == "close":
                return
            value = getattr(self, call.method)(*call.args)
            if call.replies:
                send(self._link, RankMessage(value, reports=tuple(self._controller.poll())))

    def step(self, inputs: Sequence[SequenceInput], copies: Sequence[BlockCopy], loads: Sequence[int]) -> None:
        """Execute `copies`, then compute a batch while the transfers with the ids `loads` run."""
        group = self._group
        waits = self._controller.layer_waits(loads) if loads else None
        places = unknown_tokens(inputs)
        known = [each._replace(token_ids=[0]) if at in places else each for at, each in enumerate(inputs)]
        batch = ForwardBatch.build(known, group.block_tokens, group.model.weights.device)
        if copies:
            group.copy_blocks(copies)
        group.model.share_tokens(batch.input_ids, places)
        group.model.forward(batch, group.cache, waits.before_layer if waits is not None else None)
        if waits is not None:
            waits.arrived()
        send(self._link, RankMessage(reports=tuple(self._controller.poll()), is_reply=False, ends_step=True))

    def submit(self, plan: Plan) -> None:
        self._controller.submit(plan)

    def sleep(self) -> None:
        self._controller.release()
        self._group.free()

    def wake(self, num_blocks: int) -> None:
        self._group.renew(num_blocks)
        self._controller.register([self._group.cache])

    def resize_host(self, num_blocks: int) -> None:
        self._controller.resize_host(num_blocks, [self._group.cache])

    def is_busy(self) -> bool:
        return self._controller.is_busy

    def stats(self) -> Mapping[str, StoreStats]:
        return {name: store.stats for name, store in self._stores.items()}


def _read(link: Connection[Any, Any], calls: queue.SimpleQueue[RankCall | Exception]) -> None:
    """Read calls on a separate thread, because plans and reports can exceed the 200 KB that a pipe holds. Without this
    thread, the two processes could wait forever for each other to read."""
    try:
        while True:
            calls.put(receive(link))
    except (EOFError, OSError) as error:
        calls.put(error)
