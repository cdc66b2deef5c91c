"""Lab: a CacheManager with simulated workers, which execute plans on dictionaries instead of memory and stores.

The content of a block is a tuple of everything that determines its KV. A slot holds the content that was computed or
copied into it last. From the submission of a copy to its execution, its target slots hold RUBBISH. `Lab.start` checks
the content of every cached block that a request uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.cache.admin import CacheAdmin
from kvtier.cache.allocation import Allocation
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy
from kvtier.cache.manager import CacheManager
from kvtier.cache.prefetch import Prefetch
from kvtier.errors import LoadError
from kvtier.index import BlockState, Chain, Listener, Namespace, Shortage
from kvtier.index.transitions import block_states
from kvtier.messages import Drop, Plan, Probe, Report, Route, StoreLookup, TransferRequest, TransferResult, split_keys

BLOCK = 4
NAMESPACE = Namespace("model", block_tokens=BLOCK)
RUBBISH = "rubbish"
Lose = Callable[[TransferRequest, int], Sequence[bool]]
"""Called with a transfer and a rank. Returns one bool per block: True if the block is lost."""


def chain_of(
    *tokens: int, salt: bytes = b"", adapter: bytes = b"", media=(), namespace: Namespace = NAMESPACE
) -> Chain:
    return Chain(namespace, list(tokens), salt=salt, adapter=adapter, media=media)


def prompt(number: int, num_blocks: int, tail: int = 1, **more) -> Chain:
    """Return a prompt with `num_blocks` full blocks, in which every token is `number`, and `tail` more tokens."""
    return chain_of(*([number] * (num_blocks * BLOCK)), *([99] * tail), **more)


def content(chain: Chain, block: int):
    """Return everything that determines the KV of a block."""
    stop = (block + 1) * BLOCK
    media = tuple((item.start, item.digest) for item in chain.media if item.start < stop)
    return chain.namespace.fingerprint, chain.salt, chain.adapter, media, tuple(chain.tokens[:stop].tolist())


class Worker:
    """Simulates the memory and the stores of one rank. `submit` queues tasks; `work` executes one task."""

    def __init__(self, rank: int, stores: Sequence[str]) -> None:
        self.rank = rank
        self.device: dict[int, object] = {}
        self.host: dict[int, object] = {}
        self.stores: dict[str, dict[bytes, object]] = {name: {} for name in stores}
        self.todo: deque[tuple[int, TransferRequest | Probe | Drop]] = deque()
        self.done: list[TransferRequest] = []

    def submit(self, plan: Plan) -> None:
        for task in (*plan.drops, *plan.probes, *plan.transfers):
            self.todo.append((plan.epoch, task))
        for transfer in plan.transfers:
            memory = {"device": self.device, "host": self.host}.get(transfer.target)
            if memory is not None:
                memory.update(dict.fromkeys(transfer.targets.tolist(), RUBBISH))

    def work(self, lose: Lose | None = None, at: int = 0) -> Report:
        """Execute the task at position `at` in the queue and return its report."""
        epoch, task = self.todo[at]
        del self.todo[at]
        if isinstance(task, Drop):
            store = self.stores[task.store]
            for key in split_keys(task.keys) if task.keys else list(store):
                store.pop(key, None)
            return Report(epoch, self.rank)
        if isinstance(task, Probe):
            return Report(epoch, self.rank, lookups=self._answer(task))
        return self._move(epoch, task, lose)

    def _answer(self, probe: Probe) -> tuple[StoreLookup, ...]:
        store = self.stores[probe.store]
        if probe.keys:
            keys = split_keys(probe.keys)
            present = b"".join(key for key in keys if key in store)
            absent = b"".join(key for key in keys if key not in store)
            return (StoreLookup(probe.store, present, absent, probe.id),)
        keys = sorted(store)
        pages = [StoreLookup(probe.store, b"".join(keys[at : at + 2])) for at in range(0, len(keys), 2)]
        return (*pages, StoreLookup(probe.store, probe_id=probe.id))

    def _move(self, epoch: int, transfer: TransferRequest, lose: Lose | None) -> Report:
        lost = np.array(lose(transfer, self.rank) if lose else [False] * transfer.num_blocks, np.bool_)
        sources, targets = self._ends(transfer)
        absent = []
        for i, (source, target) in enumerate(zip(*self._places(transfer), strict=True)):
            if transfer.route is Route.STORE_TO_HOST and source not in sources:
                lost[i] = True
                absent.append(source)
            elif not lost[i]:
                assert sources[source] != RUBBISH, f"{transfer.route} read {source} before it was written"
                targets[target] = sources[source]
        self.done.append(transfer)
        arrived = (~lost).astype(np.uint8).tobytes() if lost.any() else b""
        moved = int((~lost).sum())
        result = TransferResult(transfer.id, not lost.any(), 100 * moved, 0.001 * transfer.num_blocks, "", arrived)
        lookups = (StoreLookup(transfer.source, absent=b"".join(absent)),) if absent else ()
        return Report(epoch, self.rank, (result,), lookups)

    def _ends(self, transfer: TransferRequest):
        places = {"device": self.device, "host": self.host, **self.stores}
        return places[transfer.source], places[transfer.target]

    def _places(self, transfer: TransferRequest):
        keys = split_keys(transfer.keys)
        sources = keys if transfer.route is Route.STORE_TO_HOST else transfer.sources.tolist()
        targets = keys if transfer.route is Route.HOST_TO_STORE else transfer.targets.tolist()
        return sources, targets


class Lab:
    """A manager, its workers and a clock."""

    def __init__(
        self,
        num_blocks: int = 8,
        *,
        host: HostConfig | None = None,
        stores: Sequence[StoreConfig] = (),
        num_ranks: int = 1,
        always_load: bool = True,
        workers: Sequence[Worker] = (),
        listener: Listener | None = None,
        **options,
    ) -> None:
        host = host or HostConfig(20)
        config = CacheConfig(num_blocks, host=host, stores=tuple(stores), always_load=always_load, **options)
        self.manager = CacheManager(NAMESPACE, config, num_ranks=num_ranks, listener=listener)
        names = [store.name for store in stores]
        self.workers = list(workers) or [Worker(rank, names) for rank in range(num_ranks)]
        self.control = CacheAdmin(self.manager)
        self.now = 0.0

    @property
    def worker(self) -> Worker:
        return self.workers[0]

    # ---- plans and reports -----------------------------------------------------------------------------------------

    def plan(self, seconds: float = 0.0) -> Plan:
        """Advance the clock and submit a plan to all workers."""
        self.now += seconds
        plan = self.manager.plan(now=self.now)
        for worker in self.workers:
            worker.submit(plan)
        return plan

    def run_workers(self, count: int = 1 << 30, lose: Lose | None = None) -> None:
        """Execute the `count` oldest tasks of each worker, apply the reports, and check the manager."""
        for worker in self.workers:
            for _ in range(min(count, len(worker.todo))):
                self.manager.apply(worker.work(lose))
        self.manager.check()

    def settle(self, lose: Lose | None = None) -> None:
        """Submit plans and run the workers until no tasks are left."""
        for _ in range(1000):
            if not self.plan() and not any(worker.todo for worker in self.workers):
                return
            self.run_workers(lose=lose)
        raise AssertionError("the manager still plans work after 1000 plans")

    # ---- a request -------------------------------------------------------------------------------------------------

    def fetched(self, chain: Chain, lose: Lose | None = None) -> Prefetch:
        """Start a prefetch, run the workers until it has ended, and return the prefetch."""
        fetch = self.manager.prefetch(chain, now=self.now)
        assert fetch is not None
        for _ in range(100):
            if fetch.is_over:
                return fetch
            self.plan()
            self.run_workers(lose=lose)
        raise AssertionError("the prefetch did not end")

    def start(self, chain: Chain, fetch: Prefetch | None = None, lose: Lose | None = None) -> Allocation:
        """Allocate the blocks of a request, load its cached blocks and verify them. Fail if too few blocks are free.

        If a load fails, start again without loads.
        """
        may_load = True
        while True:
            allocation = self.manager.match(chain, now=self.now, may_load=may_load, prefetch=fetch)
            shortage = self.manager.allocate(allocation, chain.num_tokens)
            assert shortage is None, shortage
            try:
                while not self.manager.is_ready(allocation):
                    self.plan()
                    self.run_workers(lose=lose)
                break
            except LoadError:
                self.manager.abort(allocation)
                may_load = False
        self.verify(allocation)
        return allocation

    def verify(self, allocation: Allocation) -> None:
        """Check the content of every cached block on every rank."""
        for worker in self.workers:
            for block in range(allocation.lease.num_matched):
                assert worker.device[int(allocation.table[block])] == content(allocation.chain, block), block

    def compute(self, allocation: Allocation) -> None:
        """Compute all blocks of a request that were not cached, in one step, and publish them."""
        self.manager.on_scheduled(allocation, now=self.now)
        for worker in self.workers:
            for block in range(allocation.lease.num_matched, len(allocation.table)):
                worker.device[int(allocation.table[block])] = content(allocation.chain, block)
        self.manager.publish(allocation, allocation.chain.num_tokens, now=self.now)

    def serve(self, chain: Chain, lose: Lose | None = None) -> Allocation:
        """Run a request to its end, then call `settle`. Return the finished allocation of the request."""
        fetch = self.fetched(chain, lose) if self.manager.stores else None
        allocation = self.start(chain, fetch, lose)
        if fetch is not None:
            self.manager.end_prefetch(fetch)
        self.compute(allocation)
        self.manager.finish(allocation, now=self.now)
        self.settle(lose)
        self.manager.check()
        return allocation

    # ---- contents of the tiers -------------------------------------------------------------------------------------

    def evict(self, tier: str = "device") -> None:
        """Evict all evictable blocks of a tier."""
        tree = self.manager.tree
        found = self.control.tier(tier)
        assert not isinstance(tree.evict(found, found.num_evictable), Shortage)

    def num_in(self, tier: str, chain: Chain) -> int:
        """Count the blocks of a prompt in a tier.

        For a memory tier, count only readable blocks. For a store, count the blocks in the store of rank 0.
        """
        if tier in self.worker.stores:
            return sum(key in self.worker.stores[tier] for key in split_keys(chain.keys()))
        lease = self.manager.tree.match(chain)
        states = block_states(lease, self.control.tier(tier), 0, lease.num_blocks)
        count = sum(state >= BlockState.READY for state in states)
        self.manager.tree.release(lease, used=False)
        return count


def disk(name: str = "disk", **options) -> StoreConfig:
    return StoreConfig(name, **{"wait": WaitPolicy.WAIT, **options})
