"""Prefetcher: blocks on their way from stores to the host, for requests that wait.

    start ──> asking ──(what stores have is known)──> waiting ──(nobody else brings it)──> moving ──(reports)──> over
                └────────── nothing to fetch, no room, or computing it is faster ──────────────────────────────^

A fetch that brings something holds a lease on its path, until whoever asked for it has matched it or gone. One that
brings nothing holds nothing: those that wait must not keep memory from those that run. What it found in memory may then
be gone when its request's turn comes, and is fetched after all (`again`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cache.config import Patience
from kvtier.cache.cost_model import CostModel, LoadDecision
from kvtier.cache.in_flight import Mask, PendingTransfer, TransferTracker
from kvtier.cache.writeback import StoreWriteback, reserve_up_to
from kvtier.errors import StateError
from kvtier.index import Chain, Lease, RadixTree, Retention, Slots, Tier
from kvtier.index.node import WRITING
from kvtier.messages import Route, StoreLookup


class Prefetch:
    """One request's blocks from stores. Made by CacheManager.prefetch; callers read."""

    __slots__ = (
        "chain",
        "decision",
        "is_due",
        "is_over",
        "lease",
        "num_blocks",
        "num_fetched",
        "started",
        "waiting_for",
        "wanted",
    )

    def __init__(self, chain: Chain, lease: Lease, wanted: int, started: float) -> None:
        self.chain = chain
        self.lease: Lease | None = lease
        """On the path that is in memory, or on its way there; None where there was nothing to bring."""
        self.wanted = wanted
        """Blocks the request could use."""
        self.started = started
        self.waiting_for: set[int] = set()
        """Probes that were not answered, and moves that are not over."""
        self.is_over = False
        self.is_due = False
        """Whether its request's turn has come, and it began once more."""
        self.num_blocks = 0
        """That were to be fetched."""
        self.num_fetched: dict[str, int] = {}
        """That have arrived, by store."""
        self.decision: LoadDecision | None = None


class Prefetcher:
    """Brings blocks from stores to the host, the first store that has a block first."""

    def __init__(
        self,
        tree: RadixTree,
        host: Tier,
        stores: Sequence[StoreWriteback],
        moves: TransferTracker,
        speeds: CostModel | None,
    ) -> None:
        """With `speeds`, what is expected to be computed faster is not fetched."""
        self._tree, self._host, self._moves, self._speeds = tree, host, moves, speeds
        self._stores = stores
        self._open: dict[Prefetch, None] = {}
        self._by_move: dict[int, Prefetch] = {}

    @property
    def leases(self) -> list[Lease]:
        """What fetches hold, for checking."""
        return [prefetch.lease for prefetch in self._open if prefetch.lease is not None]

    def start(self, chain: Chain, max_blocks: int, retention: Retention, now: float) -> Prefetch:
        """Begin to fetch what of a chain is in no memory."""
        lease = self._tree.match(chain, now=now, max_blocks=max_blocks, retention=retention)
        chain.take_keys(lease.node)
        prefetch = Prefetch(chain, lease, max_blocks, now)
        self._open[prefetch] = None
        for store in self._stores:
            if store.inventory_probe:
                prefetch.waiting_for.add(store.inventory_probe)
            if store.config.is_shared and lease.num_blocks < max_blocks:
                keys = b"".join(chain.key_list(lease.num_blocks, max_blocks))
                prefetch.waiting_for.add(self._moves.probe(store.config.name, keys))
        self._begin(prefetch, lease, now)
        return prefetch

    def retry(self, prefetch: Prefetch, num_found: int, now: float, retention: Retention) -> bool:
        """Its request's turn has come, with so many blocks in memory: whether it should wait for more, from a store.

        Once, as somebody else's blocks may drive out these again.
        """
        if prefetch.is_due or prefetch.lease is not None or num_found >= prefetch.wanted:
            return False
        if not self._find(prefetch.chain.key_list(num_found, num_found + 1)):
            return False
        prefetch.is_due, prefetch.is_over, prefetch.started = True, False, now
        prefetch.lease = self._tree.match(prefetch.chain, now=now, max_blocks=prefetch.wanted, retention=retention)
        self._begin(prefetch, prefetch.lease, now)
        return not self.is_over(prefetch, now)

    def is_over(self, prefetch: Prefetch, now: float) -> bool:
        """Whether its request need not wait any more."""
        if prefetch.is_over:
            return True
        waited = now - prefetch.started
        return all(
            store.config.patience is Patience.BEST_EFFORT
            or (store.config.patience is Patience.DEADLINE and waited >= store.config.wait_seconds)
            for store in self._stores
        )

    def end(self, prefetch: Prefetch) -> None:
        """Whoever asked for it has what it wants, or wants it no longer. What is on its way still arrives."""
        if prefetch not in self._open:
            raise StateError("this fetch has ended already")
        del self._open[prefetch]
        self._let_go(prefetch)

    def advance(self, now: float) -> None:
        """Go on with those that waited for an answer, for room, or for somebody else's blocks."""
        for prefetch in self._open:
            if not prefetch.is_over and not prefetch.waiting_for:
                self._begin(prefetch, self._look_again(prefetch, now), now)

    def on_lookup(self, presence: StoreLookup) -> None:
        """A probe was answered, by every rank."""
        for store in self._stores:
            store.on_probe_result(presence.probe_id)
        for prefetch in self._open:
            prefetch.waiting_for.discard(presence.probe_id)

    def reset(self) -> None:
        """What was on its way counts for nothing."""
        for prefetch in self._open:
            prefetch.is_over = True

    def on_transfer_done(self, move: PendingTransfer, there: Mask) -> None:
        """A fetch's move is over."""
        prefetch = self._by_move.pop(move.transfer.id)
        prefetch.waiting_for.discard(move.transfer.id)
        store = move.transfer.source
        prefetch.num_fetched[store] = prefetch.num_fetched.get(store, 0) + there.count(1)
        prefetch.is_over = prefetch.is_over or not prefetch.waiting_for

    def _begin(self, prefetch: Prefetch, lease: Lease, now: float) -> None:
        """Start the moves, if it is known where the blocks are and there is room."""
        if prefetch.waiting_for:
            return
        first = lease.num_blocks
        # what the match before has found: None is no next block
        node = (
            lease.node.children.get(prefetch.chain.key_at(first)) if lease.stopped and first < prefetch.wanted else None
        )
        if node is not None:
            # Somebody else brings the next block, which is worth waiting for; or it is nowhere, and somebody's lease
            # keeps its place: computing it puts it there.
            prefetch.is_over = not any(held is not None and held.states[0] == WRITING for held in node.held)
        else:
            self._begin_moves(prefetch, lease, now)
        if prefetch.is_over:
            self._let_go(prefetch)

    def _begin_moves(self, prefetch: Prefetch, lease: Lease, now: float) -> None:
        first = lease.num_blocks
        keys = prefetch.chain.key_list(first, prefetch.wanted)
        parts = self._find(keys)
        if any(self._is_busy(store, count) for store, count in parts):
            return  # its turn comes
        prefetch.decision = self._decide(first, parts, again=prefetch.is_due)
        wanted = sum(count for _, count in parts) if prefetch.decision is None or prefetch.decision.load else 0
        slots = self._reserve(prefetch, wanted) if wanted else None
        if slots is not None and len(slots):
            grafted = self._tree.graft(lease, self._host, slots, now=now)
            assert grafted, "there was no next block a moment ago"
            prefetch.num_blocks = len(slots)
            self._move(prefetch, lease, slots, keys, parts)
        else:
            prefetch.is_over = slots is not None or not wanted or not prefetch.is_due

    def _reserve(self, prefetch: Prefetch, num_blocks: int) -> Slots | None:
        """Host slots for all of it; or for as much as fits, if nobody will give more; or None: others are to go first.

        Others have room because of what was brought for them, until their turn has come.
        """
        slots = self._tree.reserve(self._host, num_blocks, prefetch.chain.salt)
        if isinstance(slots, Slots):
            return slots
        if any(other.num_blocks for other in self._open if other is not prefetch):
            return None
        return reserve_up_to(self._tree, self._host, num_blocks, prefetch.chain.salt)

    def _let_go(self, prefetch: Prefetch) -> None:
        if prefetch.lease is not None:
            self._tree.release(prefetch.lease, used=False)
            prefetch.lease = None

    def _is_busy(self, store: StoreWriteback, count: int) -> bool:
        """Whether so many more from a store are too many at a time. Any number may go alone."""
        under_way = self._moves.num_blocks(Route.STORE_TO_HOST, store.config.name)
        return under_way > 0 and under_way + count > store.config.max_fetching_blocks

    def _look_again(self, prefetch: Prefetch, now: float) -> Lease:
        """What is in memory may be more than it was."""
        before = prefetch.lease
        assert before is not None, "it would be over"
        prefetch.lease = self._tree.match(
            prefetch.chain, now=now, max_blocks=prefetch.wanted, retention=before.retention
        )
        self._tree.release(before, used=False)
        return prefetch.lease

    def _find(self, keys: list[bytes]) -> list[tuple[StoreWriteback, int]]:
        """Which store has how many of these, one after the other from the first on."""
        parts: list[tuple[StoreWriteback, int]] = []
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

    def _decide(self, first: int, parts: list[tuple[StoreWriteback, int]], *, again: bool) -> LoadDecision | None:
        """Fetch and load, or compute?"""
        if self._speeds is None or not parts:
            return None
        total = sum(count for _, count in parts)
        ways = {(Route.HOST_TO_DEVICE, ""): total + self._moves.num_blocks(Route.HOST_TO_DEVICE)}
        for store, count in parts:
            way = (Route.STORE_TO_HOST, store.config.name)
            ways[way] = ways.get(way, self._moves.num_blocks(*way)) + count
        block_tokens = self._tree.namespace.block_tokens
        return self._speeds.decide(ways, first * block_tokens, total * block_tokens, again=again)

    def _move(
        self, prefetch: Prefetch, lease: Lease, slots: Slots, keys: list[bytes], parts: list[tuple[StoreWriteback, int]]
    ) -> None:
        at, first = 0, lease.num_blocks - len(slots)
        for store, count in parts:
            count = min(count, len(slots) - at)
            if not count:
                return
            target = Slots(slots.tier, slots.ids[at : at + count])
            shared, name = self._tree.share(lease), store.config.name
            mine = b"".join(keys[at : at + count])
            number = self._moves.start(Route.STORE_TO_HOST, shared, first + at, name, target, mine)
            self._by_move[number] = prefetch
            prefetch.waiting_for.add(number)
            at += count


def origins(prefetch: Prefetch | None, num_blocks: int, block_tokens: int) -> dict[str, int]:
    """Where blocks below the device come from, in tokens: those fetched for this request from their stores."""
    origins: dict[str, int] = {}
    for store, count in prefetch.num_fetched.items() if prefetch is not None else ():
        origins[store] = min(count, num_blocks) * block_tokens
        num_blocks -= min(count, num_blocks)
    return {**origins, "host": num_blocks * block_tokens}
