"""ReuseTracker: records the uses of cached blocks, and computes the values of blocks for the learned policy.

A touch is one use of a run of blocks by a request: the blocks of one path that have the same class afterwards. Each
touch ends with the next use of its blocks (an event), or is still open. Evicted blocks are remembered as ghosts, so
that their next use counts as well, and so that their earlier uses are known when they return.

    request  | matched: old touches end | ghosts: old touches end | fresh |
             | new touches: one for each run of blocks with equal uses    |

    commit   begin    remember when the request began
    release  returned find the ghosts of the request; then `touch`: end the old touches of the path and start new ones
    evict    removed  a removed run becomes a ghost

Touches are entered into the log for 8 requests at once, because Python code that runs once per request is several
times as slow as the same code in a loop. Every few hundred requests the values are computed again. One tracker serves
all tiers of a tree. It has no clock; the latest `now` of any call is the current time.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvtier.errors import StateError
from kvtier.index.labels import Cells, Outcome
from kvtier.index.lease import Lease
from kvtier.index.node import Node, Touch
from kvtier.index.reuse import F64, I64, LIMITS, NUM_BUCKETS, ReuseTable

# The log must reach back further than the cache: with 4,096 touches, the prototype lost 0.4 points against LRU at sizes
# of 30,000 to 50,000.
NUM_TOUCHES = 16_384
FIRST_FIT, LAST_FIT = 64, 512  # requests between two fits: an eighth of all requests so far, within these limits
NUM_WAITING = 8  # requests that are entered into the log at once; with 32, the guard of small caches reacts too late
ENDS = [*LIMITS, math.inf]
_FIELDS, _REQUEST_FIELDS = 4, 7
_RUNNING = 2**62  # touch number of blocks that a running request has published; LRU would hold them
MAX_USES = 4
# Ghosts of a request: (end of their blocks, earlier uses plus one, [number, blocks, ..] of their touches)
Returned = tuple[int, int, list[int]]
Session = tuple[bytes, str]  # tenant and session id


def session_of(salt: bytes, session_id: str) -> Session:
    """Return the name of a session. Sessions of different tenants are different, even if their ids are equal."""
    return salt.partition(b"\0")[0], session_id


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
        """Four numbers per touch that ended since the fit: class, age, weight, 1.0 for a use (0.0 if forgotten)."""

    def add(self, runs: list[int], now: float, capacity: int) -> None:
        """Add touches, and forget the oldest. `runs` has the class and the number of blocks of each new touch.

        `capacity` is the size of the LRU cache in blocks.
        """
        left, in_lru = self.left, self.num_in_lru
        for i in range(0, len(runs), 2):
            at, num_blocks = self.next % NUM_TOUCHES, runs[i + 1]
            if self.next - NUM_TOUCHES >= self.frontier:
                self.frontier += 1
                in_lru -= left[at]
            if left[at]:
                self._end(at, left[at], now, is_use=0.0)
            self.times[at], self.cells[at], self.blocks[at], left[at] = now, runs[i], num_blocks, num_blocks
            self.next += 1
            in_lru += num_blocks
        while in_lru > capacity:
            in_lru -= left[self.frontier % NUM_TOUCHES]
            self.frontier += 1
        self.num_in_lru = in_lru

    def use(self, runs: list[int], limit: int, now: float) -> int:
        """End touches for some of their blocks, because a request used these blocks again. Return LRU's hits.

        `runs` has the number of a touch and the number of its blocks, from the first block of the request on. Blocks
        from `limit` on do not count as hits.
        """
        hits = at = i = 0
        frontier, oldest, left = self.frontier, self.next - NUM_TOUCHES, self.left
        while i < len(runs):
            number, count = runs[i], runs[i + 1]
            i += 2
            while i < len(runs) and runs[i] == number:
                count += runs[i + 1]
                i += 2
            if at == hits < limit and number >= frontier:
                hits += count
            at += count
            if oldest <= number < self.next:
                place = number % NUM_TOUCHES
                count = min(count, left[place])
                if count:
                    self._end(place, count, now, is_use=1.0)
                    left[place] -= count
                    if number >= frontier:
                        self.num_in_lru -= count
        return hits

    def move(self, number: int, cell: int, now: float) -> None:
        """Change the class of a touch, and set its age to 0."""
        if number < self.next - NUM_TOUCHES:
            return
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

    The lost hits are LRU's hits minus the policy's hits, counted since the policy was last ahead. If they exceed the
    limit, LRU is used until `capacity` blocks were inserted; the next time until 2 * `capacity`, then 4 * `capacity`,
    and so on. The total loss therefore grows only with the logarithm of the time.
    """

    MAX_LOST = 0.1  # share of the capacity, as in the prototype; other limits have not been measured
    MAX_LOST_REQUESTS = 16  # in requests of mean size, so that one long request raises no alarm in a small cache

    def __init__(self) -> None:
        self.is_lru = False
        self.num_alarms = 0
        self.lost = 0.0
        self._mean_blocks = 0.0
        self._num_requests = 0
        self._until = 0.0

    def record(self, lru_hits: int, hits: int, num_blocks: int, num_requests: int, capacity: int) -> bool:
        """Record some requests. Return True if the policy changes between LRU and the learned order."""
        if not num_requests:
            return False
        self._num_requests += num_requests
        share = num_requests / min(1000, self._num_requests)
        self._mean_blocks += (num_blocks / num_requests - self._mean_blocks) * share
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
        self.is_lru = True
        """True if the order is LRU: before the first fit, and after an alarm of the guard."""
        self.lowest = 0.0
        """Value of the last victim."""
        self.cells = Cells()
        self.table = ReuseTable(self.cells)
        self.log = TouchLog()
        self.guard = LRUGuard()
        self.first_fit = FIRST_FIT
        self._next = 0
        self._waiting: list[Any] = []
        """Seven numbers for each request that is not yet in the log: time of the end and of the match; matched blocks,
        blocks of the prompt, blocks up to the last ghost; sizes of its parts of `_ended` and `_started`."""
        self._ended: list[int] = []
        """Number and blocks of each touch that ends, from the first block of a request on."""
        self._started: list[int] = []
        """Class and blocks of each touch that starts."""
        self._ghosts: dict[int, int] = {}
        """Hash of the first block of an evicted run -> number of its touch, blocks, earlier uses."""
        self._num_requests = 0
        self._until_fit = FIRST_FIT
        self._sessions: OrderedDict[Session, tuple[Node, int, int]] = OrderedDict()
        """Last node of a session's last request, and the range of this request's touches."""
        self._ends: dict[Node, Session] = {}
        """Last node -> session."""

    def see(self, now: float) -> None:
        if now > self.now:
            self.now = now

    # ---- calls of the tree -----------------------------------------------------------------------------------------

    def returned(self, lease: Lease) -> Returned | None:
        """At the end of a request, remove and return the ghosts of the blocks that follow the match of its lease."""
        block, stop = lease.num_matched, lease.began[1]
        if block >= stop:
            return None
        first, node = None, lease.node
        while node.start >= block and node.parent is not None:
            first, node = node, node.parent
        usage, chain, again = node.usage, lease.chain, 0
        ended: list[int] = []
        if usage.lost and usage.touch is not None and node.stop == block:
            num_blocks = min(usage.lost, stop - block)
            ended += usage.touch[0], num_blocks
            again = usage.touch[3] + 1
            block += num_blocks
        ghosts, domain, oldest = self._ghosts, node.domain, self._next - NUM_TOUCHES
        while ghosts and block < stop:
            key = first.key if first is not None and first.start == block else chain.key_at(block)
            ghost = ghosts.pop(hash((domain, key, block)), None)
            if ghost is None or ghost >> 32 < oldest:
                break
            num_blocks = min(ghost >> 4 & 2**28 - 1, stop - block)
            ended += ghost >> 32, num_blocks
            again = again or (ghost & 15) + 1
            block += num_blocks
        return (block, min(again, MAX_USES), ended) if ended else None

    def touch(self, lease: Lease, returned: Returned | None, outcome: Outcome, now: float) -> None:
        """At the end of a request, end the old touches of its path and start new ones."""
        if now > self.now:
            self.now = now
        now, node, path = self.now, lease.node, []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        if not path:
            return
        matched, (began, stop), cells, ended, started = (
            lease.num_matched,
            lease.began,
            self.cells,
            self._ended,
            self._started,
        )
        fresh_from, again, ghosts = returned or (matched, 0, None)
        labels = cells.labels(lease.chain.salt, path[-1].key, (stop - fresh_from) * self.block_tokens, outcome)
        num_ended, num_started = len(ended), len(started)
        run: Touch = (-1, -1, now, -1)
        cell, number = -1, self._next - 1
        for node in reversed(path):
            usage, num_blocks = node.usage, node.num_blocks
            touch = usage.touch
            if touch is not None:
                uses = touch[3] + 1 if touch[3] < MAX_USES else MAX_USES
                ended += touch[0], num_blocks
            elif node.start < matched:  # published by a request that is still running
                uses = 1
                ended += _RUNNING, num_blocks
            else:
                uses = again if node.start + node.stop < 2 * fresh_from else 0  # `again` if most of its blocks returned
            if uses != run[3]:
                this = cells.number(uses, labels)
                if this != cell:
                    cell, number = this, number + 1
                    started += cell, 0
                run = (number, cell, now, uses)
            started[-1] += num_blocks
            usage.touch, usage.lost = run, 0
        if ghosts:
            ended += ghosts
        if outcome.hints.session_id:
            self._remember(session_of(lease.chain.salt, outcome.hints.session_id), lease.node, number + 1)
        self._next = number + 1
        self._waiting += now, began, matched, stop, fresh_from, len(ended) - num_ended, len(started) - num_started
        self._until_fit -= 1
        if len(self._waiting) >= NUM_WAITING * _REQUEST_FIELDS or self._until_fit <= 0:
            self.play()

    def removed(self, node: Node, kept: int) -> None:
        """Remember the blocks of a node from index `kept` on, which leave the tree."""
        usage = node.usage
        touch = usage.touch
        if touch is None:
            return
        if kept:
            usage.lost += node.num_blocks - kept
            return
        if node in self._ends:
            self._shorten(node)
        ghosts = self._ghosts
        # One int per ghost, because tuples would be visited by each garbage collection.
        packed = touch[0] << 32 | min(node.num_blocks + usage.lost, 2**28 - 1) << 4 | touch[3]
        ghosts[hash((node.domain, node.key, node.start))] = packed
        if len(ghosts) > NUM_TOUCHES:
            del ghosts[next(iter(ghosts))]

    def detached(self, node: Node) -> None:
        """Forget the session that ends at a node, which was dropped."""
        session = self._ends.pop(node, None)
        if session is not None:
            del self._sessions[session]

    def close(self, session: Session, now: float) -> list[Node]:
        """Return the nodes whose last use was the last request of a session, and change their class to "over".

        The caller withdraws and offers these nodes again. A session can be closed once.
        """
        self.see(now)
        self.play()
        found = self._sessions.pop(session, None)
        if found is None:
            return []
        node, first, stop = found
        del self._ends[node]
        moved: dict[Touch, Touch] = {}
        nodes = []
        for each in node.upwards():
            touch = each.usage.touch
            if touch is None or not first <= touch[0] < stop:
                continue
            if touch not in moved:
                cell = self.cells.when_over(touch[1])
                moved[touch] = (touch[0], cell, self.now, touch[3])
            each.usage.touch = moved[touch]
            nodes.append(each)
        for touch in {touch[0]: touch for touch in moved.values()}.values():
            self.log.move(touch[0], touch[1], self.now)
        return nodes

    def play(self) -> None:
        """Enter the waiting requests into the log. Compute the values again if it is time."""
        waiting, ended, started = self._waiting, self._ended, self._started
        self._waiting, self._ended, self._started = [], [], []
        hits, num_blocks, lru_hits = sum(waiting[2::_REQUEST_FIELDS]), sum(waiting[3::_REQUEST_FIELDS]), 0
        log, end, start = self.log, 0, 0
        for i in range(0, len(waiting), _REQUEST_FIELDS):
            now, began, _, _, limit, num_ended, num_started = waiting[i : i + _REQUEST_FIELDS]
            lru_hits += log.use(ended[end : end + num_ended], limit, began)
            log.add(started[start : start + num_started], now, self.capacity)
            end += num_ended
            start += num_started
        num_requests = len(waiting) // _REQUEST_FIELDS
        self._num_requests += num_requests
        changed = self.table.is_fitted and self.guard.record(lru_hits, hits, num_blocks, num_requests, self.capacity)
        if self._until_fit <= 0:
            self.fit()
        elif changed:
            self._changed()

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
        """Return the value of a block of class `cell` that was last used at `since`, and the end of its validity."""
        if self.is_lru:
            return 0.0, math.inf
        bucket = bisect_right(LIMITS, self.now - since)
        return self.table.row(cell)[bucket], since + ENDS[bucket]

    def floor(self, cell: int) -> float:
        """Return the lowest value of a class that later rises, or infinity if values only fall."""
        return math.inf if self.is_lru or cell >= len(self.table.floors) else self.table.floors[cell]

    def describe(self, cell: int, value: float) -> str:
        """Return class and value of a victim, for `explain`."""
        return f"Learned (class: {self.cells.describe(cell)}; value: {value:.2e} hits per block-second)"

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise StateError if an invariant is violated. `nodes` are all nodes of the tree."""
        if self._waiting:
            self.play()
        log, first = self.log, max(0, self.log.next - NUM_TOUCHES)
        blocks, left = np.frombuffer(log.blocks, np.int32), np.frombuffer(log.left, np.int32)
        if log.next != self._next:
            raise StateError(f"{log.next} touches are in the log, but {self._next} have started")
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
        if {node: session for session, (node, _, _) in self._sessions.items()} != self._ends:
            raise StateError("sessions and their last nodes do not match")
        for node in nodes:
            touch = node.usage.touch
            if touch is None or touch[0] < first:
                continue
            at = touch[0] % NUM_TOUCHES
            if touch[0] >= log.next or log.cells[at] != touch[1] or log.times[at] != touch[2]:
                raise StateError(f"the touch {touch} of blocks [{node.start}, {node.stop}) is not in the log")

    def _remember(self, session: Session, node: Node, stop: int) -> None:
        """Remember the last request of a session, which ends at `node` and has the touches [self._next, stop)."""
        old = self._sessions.pop(session, None)
        if old is not None:
            del self._ends[old[0]]
        other = self._ends.get(node)
        if other is not None:  # another session has the same last request
            del self._sessions[other]
        self._sessions[session] = node, self._next, stop
        self._ends[node] = session
        if len(self._sessions) > NUM_TOUCHES:
            _, (oldest, _, _) = self._sessions.popitem(last=False)
            del self._ends[oldest]

    def _shorten(self, node: Node) -> None:
        """Move the end of a session to the parent of its last node, because this node is evicted."""
        session, above = self._ends.pop(node), node.parent
        if above is None or above.parent is None or above in self._ends:
            del self._sessions[session]
        else:
            _, first, stop = self._sessions[session]
            self._sessions[session], self._ends[above] = (above, first, stop), session

    def _changed(self) -> None:
        self.version += 1
        self.is_lru = self.guard.is_lru or not self.table.is_fitted
