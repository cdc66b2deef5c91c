"""The tiers as dictionaries: a worker that answers a manager's plans, and checks every block that is handed out.

What a block should hold is a value of its own: everything that decides its KV. A slot holds what was computed or copied
into it, and rubbish from the plan of a copy to its end.
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
from kvtier.index import BlockState, Chain, Namespace, Shortage
from kvtier.index.transitions import block_states
from kvtier.messages import Drop, Plan, Probe, Report, Route, StoreLookup, TransferRequest, TransferResult, split_keys

BLOCK = 4
NAMESPACE = Namespace("model", block_tokens=BLOCK)
RUBBISH = "rubbish"
Lose = Callable[[TransferRequest, int], Sequence[bool]]
"""Of a transfer and a rank: for each block whether it is lost on the way."""


def chain_of(
    *tokens: int, salt: bytes = b"", adapter: bytes = b"", media=(), namespace: Namespace = NAMESPACE
) -> Chain:
    return Chain(namespace, list(tokens), salt=salt, adapter=adapter, media=media)


def prompt(number: int, num_blocks: int, tail: int = 1, **more) -> Chain:
    """A prompt of its own: so many full blocks, and a tail that must be computed in any case."""
    return chain_of(*([number] * (num_blocks * BLOCK)), *([99] * tail), **more)


def content(chain: Chain, block: int):
    """All that decides the KV of a block."""
    stop = (block + 1) * BLOCK
    media = tuple((item.start, item.digest) for item in chain.media if item.start < stop)
    return chain.namespace.fingerprint, chain.salt, chain.adapter, media, tuple(chain.tokens[:stop].tolist())


class Worker:
    """One rank's memory, and its stores. A transfer takes effect when `work` is told to: until then, rubbish."""

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
        """Carry out one task, the oldest unless told otherwise."""
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
            here = b"".join(key for key in keys if key in store)
            gone = b"".join(key for key in keys if key not in store)
            return (StoreLookup(probe.store, here, gone, probe.id),)
        keys = sorted(store)
        pages = [StoreLookup(probe.store, b"".join(keys[at : at + 2])) for at in range(0, len(keys), 2)]
        return (*pages, StoreLookup(probe.store, probe_id=probe.id))

    def _move(self, epoch: int, transfer: TransferRequest, lose: Lose | None) -> Report:
        lost = np.array(lose(transfer, self.rank) if lose else [False] * transfer.num_blocks, np.bool_)
        sources, targets = self._ends(transfer)
        gone = []
        for i, (source, target) in enumerate(zip(*self._places(transfer), strict=True)):
            if transfer.route is Route.STORE_TO_HOST and source not in sources:
                lost[i] = True
                gone.append(source)
            elif not lost[i]:
                assert sources[source] != RUBBISH, f"{transfer.route} read {source} before it was written"
                targets[target] = sources[source]
        self.done.append(transfer)
        arrived = (~lost).astype(np.uint8).tobytes() if lost.any() else b""
        moved = int((~lost).sum())
        outcome = TransferResult(transfer.id, not lost.any(), 100 * moved, 0.001 * transfer.num_blocks, "", arrived)
        presences = (StoreLookup(transfer.source, absent=b"".join(gone)),) if gone else ()
        return Report(epoch, self.rank, (outcome,), presences)

    def _ends(self, transfer: TransferRequest):
        places = {"device": self.device, "host": self.host, **self.stores}
        return places[transfer.source], places[transfer.target]

    def _places(self, transfer: TransferRequest):
        keys = split_keys(transfer.keys)
        sources = keys if transfer.route is Route.STORE_TO_HOST else transfer.sources.tolist()
        targets = keys if transfer.route is Route.HOST_TO_STORE else transfer.targets.tolist()
        return sources, targets


class Lab:
    """A manager and its workers."""

    def __init__(
        self,
        num_blocks: int = 8,
        *,
        host: HostConfig | None = None,
        stores: Sequence[StoreConfig] = (),
        num_ranks: int = 1,
        always_load: bool = True,
        workers: Sequence[Worker] = (),
        **options,
    ) -> None:
        host = host or HostConfig(20)
        config = CacheConfig(num_blocks, host=host, stores=tuple(stores), always_load=always_load, **options)
        self.manager = CacheManager(NAMESPACE, config, num_ranks=num_ranks)
        names = [store.name for store in stores]
        self.workers = list(workers) or [Worker(rank, names) for rank in range(num_ranks)]
        self.control = CacheAdmin(self.manager)
        self.now = 0.0

    @property
    def worker(self) -> Worker:
        return self.workers[0]

    # ---- plans and reports -----------------------------------------------------------------------------------------

    def plan(self, seconds: float = 0.0) -> Plan:
        """Let time pass, hand a plan to all workers."""
        self.now += seconds
        plan = self.manager.plan(now=self.now)
        for worker in self.workers:
            worker.submit(plan)
        return plan

    def hear(self, count: int = 1 << 30, lose: Lose | None = None) -> None:
        """The workers' oldest tasks are done, and reported."""
        for worker in self.workers:
            for _ in range(min(count, len(worker.todo))):
                self.manager.apply(worker.work(lose))
        self.manager.check()

    def settle(self, lose: Lose | None = None) -> None:
        """Until nothing is left to do."""
        for _ in range(1000):
            if not self.plan() and not any(worker.todo for worker in self.workers):
                return
            self.hear(lose=lose)
        raise AssertionError("no end")

    # ---- a request -------------------------------------------------------------------------------------------------

    def fetched(self, chain: Chain, lose: Lose | None = None) -> Prefetch:
        """A fetch that is over."""
        fetch = self.manager.prefetch(chain, now=self.now)
        assert fetch is not None
        for _ in range(100):
            if fetch.is_over:
                return fetch
            self.plan()
            self.hear(lose=lose)
        raise AssertionError("the fetch has no end")

    def start(self, chain: Chain, fetch: Prefetch | None = None, lose: Lose | None = None) -> Allocation:
        """A request that holds KV, ready to compute; what it was given is checked. None fits: an error."""
        may_load = True
        while True:
            hold = self.manager.match(chain, now=self.now, may_load=may_load, prefetch=fetch)
            shortage = self.manager.allocate(hold, chain.num_tokens)
            assert shortage is None, shortage
            try:
                while not self.manager.is_ready(hold):
                    self.plan()
                    self.hear(lose=lose)
                break
            except LoadError:
                self.manager.abort(hold)
                may_load = False
        self.verify(hold)
        return hold

    def verify(self, hold: Allocation) -> None:
        """Every cached block is what it should be, on every rank."""
        for worker in self.workers:
            for block in range(hold.lease.num_matched):
                assert worker.device[int(hold.table[block])] == content(hold.chain, block), block

    def compute(self, hold: Allocation) -> None:
        """All tokens of a request, as one step."""
        self.manager.on_scheduled(hold, now=self.now)
        for worker in self.workers:
            for block in range(hold.lease.num_matched, len(hold.table)):
                worker.device[int(hold.table[block])] = content(hold.chain, block)
        self.manager.publish(hold, hold.chain.num_tokens, now=self.now)

    def serve(self, chain: Chain, lose: Lose | None = None) -> Allocation:
        """One request from beginning to end, and all that follows from it; returns its hold, which is over."""
        fetch = self.fetched(chain, lose) if self.manager.stores else None
        hold = self.start(chain, fetch, lose)
        if fetch is not None:
            self.manager.end_prefetch(fetch)
        self.compute(hold)
        self.manager.finish(hold, now=self.now)
        self.settle(lose)
        self.manager.check()
        return hold

    # ---- what is where ---------------------------------------------------------------------------------------------

    def evict(self, tier: str = "device") -> None:
        """All that nobody holds leaves a tier."""
        tree = self.manager.tree
        found = self.control.tier(tier)
        assert not isinstance(tree.evict(found, found.num_evictable), Shortage)

    def num_in(self, tier: str, chain: Chain) -> int:
        """Blocks of a prompt that can be read from a tier, in the tree; of a store, what the first rank's has."""
        if tier in self.worker.stores:
            return sum(key in self.worker.stores[tier] for key in split_keys(chain.keys()))
        lease = self.manager.tree.match(chain)
        states = block_states(lease, self.control.tier(tier), 0, lease.num_blocks)
        count = sum(state >= BlockState.READY for state in states)
        self.manager.tree.release(lease, used=False)
        return count


def disk(name: str = "disk", **options) -> StoreConfig:
    return StoreConfig(name, **{"wait": WaitPolicy.WAIT, **options})
