"""Prefetcher: fetches blocks from stores to the host for waiting requests.

    start ──> probing ──(stores replied)──> waiting ──(there is room)──> in flight ──(results)──> over
                └── nothing to fetch, no host slots (first attempt), or computing is faster ───────^

A prefetch holds a lease on its path until its request has matched the path or was cancelled. If nothing will be
fetched, the lease is released earlier, because waiting requests must not hold memory that running requests need. The
path's blocks can then be evicted before the request starts. `retry` fetches evicted blocks from a store, and repeats a
fetch for which there was no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.cache.config import WaitPolicy
from kvtier.cache.cost_model import CostModel, LoadDecision
from kvtier.cache.in_flight import PendingTransfer, TransferTracker
from kvtier.cache.writeback import StoreIndex, reserve_up_to
from kvtier.errors import StateError
from kvtier.index import Chain, Lease, RadixTree, Retention, Slots, Tier
from kvtier.index.node import WRITING
from kvtier.messages import Route


@dataclass(slots=True, eq=False, repr=False)
class Prefetch:
    """A fetch of one request's blocks from stores, created by CacheManager.prefetch. Only the manager changes it."""

    chain: Chain
    lease: Lease | None
    """Lease on the path in memory, including blocks in flight. None after `end`, or once nothing will be fetched."""
    wanted: int
    """Number of leading blocks of the prompt that the request can use if they are cached."""
    started: float  # time of the start, or of the retry
    waiting_for: set[int] = field(default_factory=set)
    """Ids of unanswered probes and of transfers in flight."""
    is_over: bool = False
    """True if nothing is left to fetch, or after a reset of the cache. Not set when the maximum wait has passed."""
    is_retry: bool = False
    """True after a retry. A prefetch is retried at most once."""
    num_blocks: int = 0
    """Number of blocks in the latest fetch, or 0 before a fetch has started."""
    num_fetched: dict[str, int] = field(default_factory=dict)
    """Store name -> number of blocks that arrived from the store."""
    decision: LoadDecision | None = None


class Prefetcher:
    """Fetches blocks to the host. Consecutive blocks come from the nearest store that contains the first of them.

    With a `cost_model`, a prefetch fetches no blocks if computing them is expected to be faster.
    """

    def __init__(
        self,
        tree: RadixTree,
        host: Tier,
        stores: Sequence[StoreIndex],
        transfers: TransferTracker,
        cost_model: CostModel | None,
    ) -> None:
        self._tree, self._host, self._transfers, self._cost_model = tree, host, transfers, cost_model
        self._stores = stores
        self._open: dict[Prefetch, None] = {}
        self._by_transfer: dict[int, Prefetch] = {}

    @property
    def leases(self) -> list[Lease]:
        return [prefetch.lease for prefetch in self._open if prefetch.lease is not None]

    def start(self, chain: Chain, max_blocks: int, retention: Retention, now: float) -> Prefetch:
        """Begin to fetch the blocks of a chain that are not in memory."""
        lease = self._tree.match(chain, now=now, max_blocks=max_blocks, retention=retention)
        chain.take_keys(lease.node)
        prefetch = Prefetch(chain, lease, max_blocks, now)
        self._open[prefetch] = None
        for store in self._stores:
            if store.inventory_probe:
                prefetch.waiting_for.add(store.inventory_probe)
            if store.config.is_shared and lease.num_blocks < max_blocks:
                keys = b"".join(chain.key_list(lease.num_blocks, max_blocks))
                prefetch.waiting_for.add(self._transfers.probe(store.config.name, keys))
        self._begin(prefetch, lease, now)
        return prefetch

    def retry(self, prefetch: Prefetch, num_found: int, now: float, retention: Retention) -> bool:
        """Fetch again if memory has only `num_found` blocks and a store has more. Return True if the request must wait.

        A prefetch that still has a lease is not retried, because its transfers have started or may still start. A
        second retry is refused too, because repeated evictions and retries could delay the request forever.
        """
        if prefetch.is_retry or prefetch.lease is not None or num_found >= prefetch.wanted:
            return False
        if not self._find(prefetch.chain.key_list(num_found, num_found + 1)):
            return False
        prefetch.is_retry, prefetch.is_over, prefetch.started = True, False, now
        self._begin(prefetch, self._match(prefetch, retention, now), now)
        return not self.is_over(prefetch, now)

    def is_over(self, prefetch: Prefetch, now: float) -> bool:
        """True if the request need not wait: the prefetch is over, or the maximum wait of every store has passed."""
        if prefetch.is_over:
            return True
        waited = now - prefetch.started
        return all(
            store.config.wait is WaitPolicy.BEST_EFFORT
            or (store.config.wait is WaitPolicy.DEADLINE and waited >= store.config.wait_seconds)
            for store in self._stores
        )

    def end(self, prefetch: Prefetch) -> None:
        """End a prefetch. Transfers in flight continue."""
        if prefetch not in self._open:
            raise StateError("this prefetch has already ended; end each prefetch once")
        del self._open[prefetch]
        self._release(prefetch)

    def advance(self, now: float) -> None:
        """Continue the prefetches that waited for a probe, a busy store, host slots or another request's transfer."""
        for prefetch in self._open:
            if not prefetch.is_over and not prefetch.waiting_for:
                before = prefetch.lease
                assert before is not None, "a prefetch that is not over has a lease"
                lease = self._match(prefetch, before.retention, now)  # memory may have more blocks now
                self._tree.release(before, used=False)
                self._begin(prefetch, lease, now)

    def on_probe_result(self, probe_id: int) -> None:
        """Handle a probe that every rank has answered."""
        for store in self._stores:
            if store.inventory_probe == probe_id:
                store.inventory_probe = 0
        for prefetch in self._open:
            prefetch.waiting_for.discard(probe_id)

    def reset(self) -> None:
        """Mark all prefetches as over, because blocks in flight do not become readable after a reset."""
        for prefetch in self._open:
            prefetch.is_over = True

    def on_transfer_done(self, done: PendingTransfer) -> None:
        prefetch = self._by_transfer.pop(done.transfer.id)
        prefetch.waiting_for.discard(done.transfer.id)
        store = done.transfer.source
        prefetch.num_fetched[store] = prefetch.num_fetched.get(store, 0) + done.arrived.count(1)
        prefetch.is_over = prefetch.is_over or not prefetch.waiting_for

    def _begin(self, prefetch: Prefetch, lease: Lease, now: float) -> None:
        """Once all probes are answered, start the transfers, keep waiting, or mark the prefetch as over."""
        if prefetch.waiting_for:
            return
        first = lease.num_blocks
        # The node of the next block, if the tree contains the block.
        node = (
            lease.node.children.get(prefetch.chain.key_at(first)) if lease.stopped and first < prefetch.wanted else None
        )
        if node is not None:
            # If another transfer is writing the next block, wait for that transfer. Otherwise the block is unusable: it
            # has expired, or no memory tier has it and only a lease keeps its node. The request then computes the
            # block, even if a store has it.
            prefetch.is_over = not any(held is not None and held.states[0] == WRITING for held in node.held)
        else:
            self._begin_transfers(prefetch, lease, now)
        if prefetch.is_over:
            self._release(prefetch)

    def _begin_transfers(self, prefetch: Prefetch, lease: Lease, now: float) -> None:
        first = lease.num_blocks
        keys = prefetch.chain.key_list(first, prefetch.wanted)
        parts = self._find(keys)
        if not parts:
            prefetch.decision, prefetch.is_over = None, True
            return
        if any(self._is_busy(store, count) for store, count in parts):
            return  # try again in a later step
        prefetch.decision = self._decide(first, parts, again=prefetch.is_retry)
        wanted = sum(count for _, count in parts) if prefetch.decision is None or prefetch.decision.load else 0
        slots = self._reserve(prefetch, wanted) if wanted else None
        if slots is not None and len(slots):
            self._tree.graft(lease, self._host, slots, now=now)
            prefetch.num_blocks = len(slots)
            self._start(prefetch, lease, slots, keys, parts)
        else:
            prefetch.is_over = slots is not None or not wanted or not prefetch.is_retry

    def _reserve(self, prefetch: Prefetch, num_blocks: int) -> Slots | None:
        """Reserve host slots for `num_blocks` blocks, or for as many blocks as fit.

        Return None if not all blocks fit while other prefetches hold host blocks. The other prefetches will release
        their blocks when their requests start. After None, a retry waits for slots, and a first attempt ends.
        """
        slots = self._tree.reserve(self._host, num_blocks, prefetch.chain.salt)
        if isinstance(slots, Slots):
            return slots
        if any(other.num_blocks for other in self._open if other is not prefetch):
            return None
        return reserve_up_to(self._tree, self._host, num_blocks, prefetch.chain.salt)

    def _release(self, prefetch: Prefetch) -> None:
        if prefetch.lease is not None:
            self._tree.release(prefetch.lease, used=False)
            prefetch.lease = None

    def _is_busy(self, store: StoreIndex, count: int) -> bool:
        """True if other fetches are in flight and `count` more blocks would exceed the limit of the store."""
        in_flight = self._transfers.num_blocks(Route.STORE_TO_HOST, store.config.name)
        return in_flight > 0 and in_flight + count > store.config.max_fetching_blocks

    def _match(self, prefetch: Prefetch, retention: Retention, now: float) -> Lease:
        prefetch.lease = self._tree.match(prefetch.chain, now=now, max_blocks=prefetch.wanted, retention=retention)
        return prefetch.lease

    def _find(self, keys: list[bytes]) -> list[tuple[StoreIndex, int]]:
        """Split the leading keys among the stores. Return pairs of a store and the number of keys to read from it."""
        parts: list[tuple[StoreIndex, int]] = []
        at = 0
        while at < len(keys):
            for store in self._stores:
                count = store.num_leading(keys, at)
                if count:
                    parts.append((store, count))
                    at += count
                    break
            else:
                return parts
        return parts

    def _decide(self, first: int, parts: list[tuple[StoreIndex, int]], *, again: bool) -> LoadDecision | None:
        """Decide whether to fetch and load the blocks, or to compute them. Without a cost model, return None."""
        if self._cost_model is None:
            return None
        total = sum(count for _, count in parts)
        queued = {(Route.HOST_TO_DEVICE, ""): total + self._transfers.num_blocks(Route.HOST_TO_DEVICE)}
        for store, count in parts:
            link = (Route.STORE_TO_HOST, store.config.name)
            queued[link] = queued.get(link, self._transfers.num_blocks(*link)) + count
        block_tokens = self._tree.namespace.block_tokens
        return self._cost_model.decide(queued, first * block_tokens, total * block_tokens, again=again)

    def _start(
        self, prefetch: Prefetch, lease: Lease, slots: Slots, keys: list[bytes], parts: list[tuple[StoreIndex, int]]
    ) -> None:
        at, first = 0, lease.num_blocks - len(slots)
        for store, count in parts:
            count = min(count, len(slots) - at)
            if not count:
                return
            target = Slots(slots.tier, slots.ids[at : at + count])
            shared, name = self._tree.share(lease), store.config.name
            own = b"".join(keys[at : at + count])
            number = self._transfers.start(Route.STORE_TO_HOST, shared, first + at, name, target, own)
            self._by_transfer[number] = prefetch
            prefetch.waiting_for.add(number)
            at += count


def origins(prefetch: Prefetch | None, num_blocks: int, block_tokens: int) -> dict[str, int]:
    """Return how many tokens of `num_blocks` blocks came from each store. All other tokens count as "host"."""
    origins: dict[str, int] = {}
    for store, count in prefetch.num_fetched.items() if prefetch is not None else ():
        origins[store] = min(count, num_blocks) * block_tokens
        num_blocks -= min(count, num_blocks)
    return {**origins, "host": num_blocks * block_tokens}
