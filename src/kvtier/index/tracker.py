"""ReuseTracker: records the uses of cached blocks, and computes the values of blocks for the learned policy.

A touch is one use of a run of blocks by a request: the blocks of one path that have the same class afterwards. Each
touch ends with the next use of its blocks (an event), or is still open. Evicted blocks are remembered as ghosts, so
that their next use counts as well, and so that their earlier uses are known when they return.

    match .. commit   close    the matched blocks, and ghosts that follow them, are used again: their touches end
             release  touch    the path starts new touches, in the class that follows from the end of the request
             evict    removed  a removed run becomes a ghost

Every few hundred requests the values are computed again. One tracker serves all tiers of a tree. It has no clock; the
latest `now` of any call is the current time.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from kvtier.errors import StateError
from kvtier.index.chain import Chain
from kvtier.index.labels import Cells, Outcome
from kvtier.index.lease import Lease
from kvtier.index.node import Node, Touch
from kvtier.index.reuse import EDGES, F64, I64, NUM_BUCKETS, ReuseTable

NUM_TOUCHES = 16_384  # longer than the cache: in the prototype, 4,096 lost 0.4 points against LRU at 30,000-50,000
FIRST_FIT, LAST_FIT = 64, 512  # requests between two fits: an eighth of all requests so far, within these limits
_IN_USE = -1  # number of a touch that has ended, while the request that used the blocks is running
_LIMITS = EDGES[1:-1].tolist()
_ENDS = [*EDGES[1:-1].tolist(), math.inf]
_FIELDS = 4


class TouchLog:
    """The latest touches in a ring: time, class, number of blocks, and number of blocks that were not used again."""

    def __init__(self) -> None:
        self.next = 0
        """Number of the next touch. Touches from next - NUM_TOUCHES on are remembered."""
        self.times = array("d", bytes(8 * NUM_TOUCHES))
        self.cells = array("i", bytes(4 * NUM_TOUCHES))
        self.blocks = array("i", bytes(4 * NUM_TOUCHES))
        self.left = array("i", bytes(4 * NUM_TOUCHES))
        self.frontier = 0
        """LRU would hold the touches from this number on. Older touches were evicted."""
        self.num_in_lru = 0
        """Blocks of the touches from `frontier` on. A block counts only for its last touch."""
        self.ended = array("d")
        """Class, age, weight, and 1.0 for a use or 0.0 for a forgotten touch, of touches that ended since the fit."""

    def add(self, cell: int, num_blocks: int, now: float, capacity: int) -> None:
        """Add a touch, and forget the oldest. `capacity` is the size of the LRU cache in blocks."""
        at, left = self.next % NUM_TOUCHES, self.left
        if self.next - NUM_TOUCHES >= self.frontier:
            self.frontier += 1
            self.num_in_lru -= left[at]
        if left[at]:
            self._end(at, left[at], now, is_use=0.0)
        self.times[at], self.cells[at], self.blocks[at], left[at] = now, cell, num_blocks, num_blocks
        self.next += 1
        self.num_in_lru += num_blocks
        while self.num_in_lru > capacity:
            self.num_in_lru -= left[self.frontier % NUM_TOUCHES]
            self.frontier += 1

    def use(self, number: int, num_blocks: int, now: float) -> None:
        """End a touch for some of its blocks, because these were used again."""
        if number < self.next - NUM_TOUCHES or number < 0:
            return
        at = number % NUM_TOUCHES
        count = min(num_blocks, self.left[at])
        if count:
            self._end(at, count, now, is_use=1.0)
            self.left[at] -= count
            if number >= self.frontier:
                self.num_in_lru -= count

    def move(self, number: int, cell: int, now: float) -> None:
        """Change the class of an open touch. Its time starts again."""
        at = number % NUM_TOUCHES
        if self.left[at]:
            self._end(at, self.left[at], now, is_use=0.0)
        self.cells[at], self.times[at] = cell, now

    def take_ended(self) -> F64:
        """Return the touches that ended since the last call, one per row."""
        ended, self.ended = np.frombuffer(self.ended).reshape(-1, _FIELDS), array("d")
        return ended

    def still_open(self, now: float) -> tuple[I64, F64, F64]:
        """Return classes, ages and weights of the touches with blocks that were not used again."""
        left = np.frombuffer(self.left, np.int32)
        at = np.flatnonzero(left)
        weights = left[at] / np.sqrt(np.frombuffer(self.blocks, np.int32)[at])
        ages = np.maximum(now - np.frombuffer(self.times)[at], 0.0)
        return np.frombuffer(self.cells, np.int32)[at].astype(np.int64), ages, weights

    def _end(self, at: int, count: int, now: float, is_use: float) -> None:
        # A touch of n blocks weighs sqrt(n): a long prompt counts more than a short one, but it is one observation.
        age = now - self.times[at]
        self.ended.extend((self.cells[at], age if age > 0 else 0.0, count / math.sqrt(self.blocks[at]), is_use))


class LRUGuard:
    """Compares the hits with those of LRU. After too many lost hits, the policy is LRU for a while.

    The lost hits are LRU's hits minus the own hits since the last time the policy was ahead. Above the limit, LRU is
    used until as many blocks were inserted as the cache holds, twice as many the next time, and so on. The total loss
    therefore grows only with the logarithm of the time.
    """

    MAX_LOST = 0.1  # of the capacity, as in the prototype; not compared with other limits here
    MAX_LOST_REQUESTS = 16  # mean requests; one long request must not raise an alarm in a small cache

    def __init__(self) -> None:
        self.is_lru = False
        self.num_alarms = 0
        self.lost = 0.0
        self._mean_blocks = 0.0
        self._num_requests = 0
        self._until = 0.0

    def record(self, lru_hits: int, hits: int, num_blocks: int, capacity: int) -> bool:
        """Record a request. Return True if the policy changes between LRU and the learned order."""
        self._num_requests += 1
        self._mean_blocks += (num_blocks - self._mean_blocks) / min(1000, self._num_requests)
        if self.is_lru:
            self._until -= num_blocks - hits
            self.is_lru = self._until > 0
            return not self.is_lru
        self.lost = max(0.0, self.lost + lru_hits - hits)
        if self.lost <= max(self.MAX_LOST * capacity, self.MAX_LOST_REQUESTS * self._mean_blocks):
            return False
        self._until = float(capacity << self.num_alarms)
        self.num_alarms += 1
        self.lost, self.is_lru = 0.0, True
        return True


class ReuseTracker:
    """Tracks touches and ghosts of one tree (see the module docstring)."""

    def __init__(self, capacity: int = 1, block_tokens: int = 1) -> None:
        self.capacity = capacity
        """Size of the LRU cache to compare with, in blocks."""
        self.block_tokens = block_tokens
        self.now = 0.0
        self.version = 0
        """Changes whenever the values change."""
        self.cells = Cells()
        self.table = ReuseTable(self.cells)
        self.log = TouchLog()
        self.guard = LRUGuard()
        self.first_fit = FIRST_FIT
        self._ghosts: dict[int, int] = {}
        self._num_requests = 0
        self._until_fit = FIRST_FIT
        self._verdicts: dict[tuple[int, int], str] = {}

    @property
    def is_lru(self) -> bool:
        """True if the order is LRU: before the first fit, and after an alarm of the guard."""
        return self.guard.is_lru or not self.table.is_fitted

    def see(self, now: float) -> None:
        if now > self.now:
            self.now = now

    # ---- calls of the tree -----------------------------------------------------------------------------------------

    def close(self, lease: Lease, now: float) -> None:
        """End the touches of a lease's path and of the ghosts that follow it. Call it before the nodes are joined."""
        self.see(now)
        now, log, matched = self.now, self.log, lease.num_matched
        lru_hits, old, new, count, tail, node = matched, None, None, 0, 0, lease.node
        while node.parent is not None:
            usage = node.usage
            touch = usage.touch
            if touch is not None and touch[0] >= 0:
                if touch[0] < log.frontier and node.start < matched:
                    lru_hits = node.start
                if touch is not old:
                    if old is not None:
                        log.use(old[0], count, now)
                    old, count, new = touch, 0, (_IN_USE, touch[1], now, touch[3] + 1)
                count += node.num_blocks
                if usage.lost and node.start < matched and lease.num_matched <= node.start + node.num_blocks:
                    tail = min(usage.lost, lease.chain.num_blocks - matched)
                    log.use(touch[0], tail, now)
                    lru_hits += tail if lru_hits == matched and touch[0] >= log.frontier else 0
                usage.touch, usage.lost = new, 0
            node = node.parent
        if old is not None:
            log.use(old[0], count, now)
        num_blocks = lease.chain.num_blocks
        fresh, again = num_blocks - matched - tail, 1 if tail else 0
        if fresh > 0 and self._ghosts:
            fresh, again, lru_hits = self._follow_ghosts(lease.chain, matched + tail, again, lru_hits)
        # A new node has one class for all its blocks, so it counts as used before only if most of its blocks were.
        lease.reuse = (max(0, fresh), again if 2 * fresh <= num_blocks - matched else 0)
        if self.table.is_fitted and self.guard.record(lru_hits, matched, num_blocks, self.capacity):
            self._changed()

    def touch(self, lease: Lease, outcome: Outcome, now: float) -> None:
        """Start new touches for a lease's path, at the end of its request."""
        self.see(now)
        node, log, cells, now = lease.node, self.log, self.cells, self.now
        fresh, again = lease.reuse
        if node.parent is None:
            return
        head = lease.chain.key_at(0)
        labels = cells.labels(lease.chain, hash(head), fresh * self.block_tokens, outcome)
        run: Touch | None = None
        cell, count, number = -1, 0, log.next
        while node.parent is not None:
            usage = node.usage
            touch = usage.touch
            if touch is None:
                uses = again
            elif touch[0] < 0:
                uses = touch[3]
            else:  # another request has used the node since this request began
                log.use(touch[0], node.num_blocks, now)
                uses = touch[3] + 1
            if run is None or uses != run[3]:
                this = cells.number(uses, labels)
                if this != cell:
                    if count:
                        log.add(cell, count, now, self.capacity)
                    cell, count, number = this, 0, log.next
                run = (number, cell, now, uses)
            count += node.num_blocks
            usage.touch, usage.lost = run, 0
            node = node.parent
        log.add(cell, count, now, self.capacity)
        self._num_requests += 1
        self._until_fit -= 1
        if self._until_fit <= 0:
            self.fit()

    def removed(self, node: Node, kept: int) -> None:
        """Remember the blocks of a node from index `kept` on, which leave the tree."""
        usage = node.usage
        touch = usage.touch
        if touch is None or touch[0] < 0:
            return
        if kept:
            usage.lost += node.num_blocks - kept
            return
        ghosts = self._ghosts
        mark = hash((node.domain, node.key, node.start))
        ghosts.pop(mark, None)
        ghosts[mark] = _pack(touch[0], node.num_blocks + usage.lost, touch[3])
        if len(ghosts) > NUM_TOUCHES:
            del ghosts[next(iter(ghosts))]

    def fit(self) -> None:
        """Compute the values again."""
        self._until_fit = max(self.first_fit, min(LAST_FIT, self._num_requests // 8))
        ended = self.log.take_ended()
        if len(ended):
            self.table.add(ended[:, 0].astype(np.int64), ended[:, 1], ended[:, 2], ended[:, 3] > 0)
        self.table.fit(*self.log.still_open(self.now))
        self.table.decay(self._until_fit)
        self._changed()

    # ---- queries ---------------------------------------------------------------------------------------------------

    def value(self, cell: int, since: float) -> tuple[float, float]:
        """Return the value of a block of a class that was used at time `since`, and when this value changes."""
        if self.is_lru:
            return 0.0, math.inf
        bucket = bisect_right(_LIMITS, self.now - since)
        return self.table.row(cell)[bucket], since + _ENDS[bucket]

    def verdict(self, node: Node) -> str:
        """Return class and value of a victim, for `explain`."""
        if self.is_lru:
            return "Learned, as LRU"
        touch = node.usage.touch
        cell, since = (touch[1], touch[2]) if touch is not None else (0, self.now)
        key = cell, bisect_right(_LIMITS, self.now - since)
        text = self._verdicts.get(key)
        if text is None:
            value = self.table.row(cell)[key[1]]
            text = f"Learned (class: {self.cells.describe(cell)}; value: {value:.2e} hits per block-second)"
            self._verdicts[key] = text
        return text

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise StateError if an invariant is violated. `nodes` are all nodes of the tree."""
        log, first = self.log, max(0, self.log.next - NUM_TOUCHES)
        blocks, left = np.frombuffer(log.blocks, np.int32), np.frombuffer(log.left, np.int32)
        if (left < 0).any() or (left > blocks).any():
            raise StateError("a touch has a negative number of open blocks, or more than it had at first")
        if not first <= log.frontier <= log.next:
            raise StateError(f"the LRU frontier {log.frontier} is not in [{first}, {log.next}]")
        in_lru = sum(log.left[number % NUM_TOUCHES] for number in range(log.frontier, log.next))
        if in_lru != log.num_in_lru or in_lru > self.capacity:
            raise StateError(f"{log.num_in_lru} blocks counted for LRU of {self.capacity}, but {in_lru} exist")
        if len(self._ghosts) > NUM_TOUCHES or self.cells.count > len(self.cells.features):
            raise StateError(f"{len(self._ghosts)} ghosts and {self.cells.count} classes exceed their limits")
        rows = self.table.values
        if any(len(row) != NUM_BUCKETS or not min(row) >= 0 or max(row) == math.inf for row in rows):
            raise StateError("a value is negative or not finite")
        for node in nodes:
            touch = node.usage.touch
            if touch is None or touch[0] < first:
                continue
            at = touch[0] % NUM_TOUCHES
            if touch[0] >= log.next or log.cells[at] != touch[1] or log.times[at] != touch[2]:
                raise StateError(f"the touch {touch} of blocks [{node.start}, {node.stop}) is not in the log")

    def _changed(self) -> None:
        self.version += 1
        self._verdicts.clear()

    def _follow_ghosts(self, chain: Chain, block: int, again: int, lru_hits: int) -> tuple[int, int, int]:
        """End the touches of the ghosts from `block` on.

        Return the number of blocks without a ghost, the uses of the first ghost plus one, and LRU's hits.
        """
        ghosts, log, now, domain = self._ghosts, self.log, self.now, (chain.salt, chain.adapter)
        stop = chain.num_blocks
        fresh = stop - block
        while block < stop:
            ghost = ghosts.pop(hash((domain, chain.key_at(block), block)), None)
            if ghost is None:
                break
            number, num_blocks, uses = _unpack(ghost)
            num_blocks = min(num_blocks, stop - block)
            if number >= log.next - NUM_TOUCHES:
                if number >= log.frontier and lru_hits == block:
                    lru_hits += num_blocks
                log.use(number, num_blocks, now)
                again = again or uses + 1
                fresh -= num_blocks
            block += num_blocks
        return fresh, again, lru_hits


def _pack(number: int, num_blocks: int, uses: int) -> int:
    """Return the fields of a ghost as one int, which needs fewer objects than a tuple."""
    return number << 32 | min(num_blocks, 2**28 - 1) << 4 | min(uses, 15)


def _unpack(ghost: int) -> tuple[int, int, int]:
    return ghost >> 32, ghost >> 4 & 2**28 - 1, ghost & 15
