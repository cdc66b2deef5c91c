"""ReuseTracker: records the uses of cached blocks, and computes the values of blocks for the learned policy.

A touch is one use of a run of blocks by a request. A run consists of consecutive blocks of one path that have the same
class (see labels.py) after this use. Each block of a touch is open until its next use. An evicted block is remembered
as a ghost: if a request contains the block again, this counts as its next use, and its earlier uses are still known.

    request  | matched: old touches end | ghosts: old touches end | fresh |
             | new touches: one for each run of blocks of the same class  |

    method of the tree  effect
    commit              the lease records when the request began
    release             `returned` finds the ghosts of the request, `touch` ends old touches and starts new ones
    evict               `removed` turns a removed node into a ghost; if the node keeps blocks, its `lost` grows

The number of open blocks of each touch is updated with each request. LRUGuard is updated every few requests. Everything
else is collected in lists, which are processed before the values are computed again, or when they are long.
One tracker serves all tiers of a tree. It has no clock: the current time is the latest `now` of any call.

The functions at the end of this module are called most often. Native code has an equivalent of each of them.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

import numpy as np

from kvtier.errors import StateError
from kvtier.index.labels import Cells, Outcome
from kvtier.index.lease import Lease
from kvtier.index.native import IndexNative, TrackerState
from kvtier.index.node import Node, Touch
from kvtier.index.reuse import ENDS, F64, I64, LIMITS, NATIVE_ENDS, NATIVE_USES, NUM_BUCKETS, ReuseTable
from kvtier.messages import I32

# The log must cover more time than blocks stay in the cache. With 4,096 touches, the hit rate of the prototype was 0.4
# points below LRU in caches of 30,000 to 50,000 blocks.
NUM_TOUCHES = 16_384
# Requests between two fits: a quarter of all requests so far, but at least FIRST_FIT and at most LAST_FIT. Fits take
# 2 us per request. FIT_SHARE 8 and LAST_FIT 512 take 3 us and change hit rates by up to 0.2 points (2026-11-19).
FIRST_FIT, LAST_FIT, FIT_SHARE = 64, 1024, 4
GUARD_REQUESTS = 8  # requests between two updates of the guard; with 32, the guard reacts too late in small caches
MAX_RUNS = 64  # maximum number of touches per request; the last of them includes the rest of the path
_MARGIN = 4096  # places in the ring beyond NUM_TOUCHES; `learn` calls `TouchLog.sync` every _MARGIN / 2 touches
_RING = NUM_TOUCHES + _MARGIN
_RUNNING = 2**62  # touch number of blocks that a running request has published; LRU would hold these blocks
MAX_USES = 4
_BLOCKS_BIT, _NUMBER_BIT = 3, 23  # a ghost is an int: touch number << 23 | number of blocks << 3 | earlier uses
_MAX_GHOST = 2 ** (_NUMBER_BIT - _BLOCKS_BIT) - 1
# Ghosts of a request: (number of the first block after them, earlier uses plus one, [touch, number of blocks, ..])
Returned = tuple[int, int, list[int]]
Observed = tuple[I64, F64, F64, bool]  # classes, ages, weights, and True if blocks were used at these ages
Session = tuple[bytes, str]  # tenant and session id
Ghosts = dict[int, int]
TakeGhosts = Callable[[Ghosts, Lease], Returned | None]
Enter = Callable[["ReuseTracker", int, Lease, Returned | None, Outcome], bool]


def session_of(salt: bytes, session_id: str) -> Session:
    """Return the name of a session. Sessions of different tenants are different, even if their ids are equal."""
    return salt.partition(b"\0")[0], session_id


class TouchLog:
    """The latest touches in a ring: time, class, number of blocks, and number of open blocks (`left`).

    Only `left` is updated with each request, because the hits of the simulated LRU cache depend on it. Everything else
    is appended to lists, which `sync` transfers to the arrays.
    """

    def __init__(self, state: TrackerState | None = None) -> None:
        self.state = state or TrackerState()
        self.left = array("i", bytes(4 * _RING))
        self.synced = 0
        """Value of `state.next` at the last `sync`."""
        self.native_take: Callable[[], tuple[bytes, bytes, bytes]] | None = None
        """Returns and clears the lists of native code, which replace the next three lists. None without native code."""
        self.started: list[int] = []
        """Class and number of blocks, alternating, of each touch since the last `sync`."""
        self.ended: list[int] = []
        """Number of a touch and number of its blocks that were used again, alternating, since the last `sync`."""
        self.requests: list[float] = []
        """Four numbers per request since the last `sync`: the times of its end and of its beginning, and the lengths of
        `started` and `ended` at its end."""
        self.times: F64 = np.zeros(_RING)
        self.cells: I32 = np.zeros(_RING, np.int32)
        self.blocks: I32 = np.ones(_RING, np.int32)
        self._observed: list[Observed] = []

    def use(self, runs: list[int], limit: int) -> int:
        """Record that a request used blocks of earlier touches again. Return the hits that LRU would have.

        `runs` alternates between a touch number and a count of used blocks of this touch, in the order of the request's
        blocks. The hits end at the first run that LRU lacks, or that begins at block `limit` or later.
        """
        hits = at = 0
        state, left, ended = self.state, self.left, self.ended
        following = state.next
        oldest = following - NUM_TOUCHES
        frontier = max(state.frontier, oldest)
        each = iter(runs)
        for number, count in zip(each, each, strict=True):
            if number >= frontier and at == hits < limit:
                hits += count
            at += count
            if oldest <= number < following:
                place = number % _RING
                open_blocks = left[place]
                if open_blocks:
                    if open_blocks < count:
                        count = open_blocks
                    left[place] = open_blocks - count
                    ended += number, count
                    if number >= frontier:
                        state.num_in_lru -= count
        return hits

    def add(self, first: int, began: float) -> None:
        """Add the touches of a request. They are in `started`, beginning at index `first`."""
        state, left, started = self.state, self.left, self.started
        in_lru, number = state.num_in_lru, state.next
        for i in range(first + 1, len(started), 2):
            left[number % _RING] = num_blocks = started[i]
            in_lru += num_blocks
            number += 1
        state.next = number
        self.requests += state.now, began, len(started), len(self.ended)
        if in_lru > state.capacity:
            frontier = state.frontier
            while in_lru > state.capacity:
                in_lru -= left[frontier % _RING]
                frontier += 1
            state.frontier = frontier
        state.num_in_lru = in_lru

    def take(self) -> tuple[I64, I64, F64]:
        """Return `started`, `ended` and `requests` as arrays, and clear these lists."""
        if self.native_take is not None:
            started, ended, requests = self.native_take()
            return np.frombuffer(started, np.int64), np.frombuffer(ended, np.int64), np.frombuffer(requests)
        parts = np.array(self.started, np.int64), np.array(self.ended, np.int64), np.array(self.requests)
        self.started, self.ended, self.requests = [], [], []
        return parts

    def move(self, number: int, cell: int, now: float) -> None:
        """Change the class of a touch, and set its age to 0. Ignore a forgotten touch."""
        self.sync()
        if number < self.state.oldest:
            return
        at = np.array([number % _RING])
        if self.left[int(at[0])]:
            self._observe(at, np.array([self.left[int(at[0])]]), np.array([now]), is_use=False)
        self.cells[at], self.times[at] = cell, now

    def sync(self) -> None:
        """Transfer the lists to the arrays, and forget the oldest touches."""
        state = self.state
        self.synced = state.next
        starts, used, requests = self.take()
        if not len(requests):
            return
        ends, begins, num_started, num_ended = requests.reshape(-1, 4).T
        at = np.arange(state.next - len(starts) // 2, state.next) % _RING
        self.cells[at], self.blocks[at] = starts[::2], starts[1::2]
        self.times[at] = np.repeat(ends, np.diff(num_started, prepend=0).astype(np.int64) // 2)
        times = np.repeat(begins, np.diff(num_ended, prepend=0).astype(np.int64) // 2)
        self._observe(used[::2] % _RING, used[1::2], times, is_use=True)
        oldest = max(state.oldest, state.next - NUM_TOUCHES)
        numbers = np.arange(state.oldest, oldest)
        left = np.frombuffer(self.left, np.int32)
        state.num_in_lru -= int(left[np.arange(state.frontier, oldest) % _RING].sum())
        state.frontier, state.oldest = max(state.frontier, oldest), oldest
        numbers = numbers[left[numbers % _RING] > 0]
        at, replaced = numbers % _RING, (numbers + NUM_TOUCHES) % _RING
        self._observe(at, left[at], self.times[replaced], is_use=False)
        left[at] = 0

    def take_observed(self) -> list[Observed]:
        """Return the ages that `_observe` recorded since the last call of this method."""
        observed, self._observed = self._observed, []
        return observed

    def still_open(self, now: float) -> tuple[I64, F64, F64]:
        """Return classes, ages and weights of the touches that have open blocks."""
        left = np.frombuffer(self.left, np.int32)
        at = np.flatnonzero(left)
        weights = left[at] / np.sqrt(self.blocks[at])
        return self.cells[at].astype(np.int64), np.maximum(now - self.times[at], 0.0), weights

    def _observe(self, at: I64, counts: I64 | I32, times: F64, *, is_use: bool) -> None:
        """Record the ages of touches at `times`. Set `is_use` if blocks of these touches were used at `times`."""
        # A touch of n blocks weighs sqrt(n): a long prompt counts more than a short one, but not n times as much.
        if len(at):
            ages, weights = np.maximum(times - self.times[at], 0.0), counts / np.sqrt(self.blocks[at])
            self._observed.append((self.cells[at].astype(np.int64), ages, weights, is_use))


class LRUGuard:
    """Compares the hits with those of a simulated LRU cache. After too many lost hits, the policy is LRU for a while.

    The lost hits are LRU's hits minus the policy's hits, counted since the policy was last ahead. If they exceed a
    limit, the guard raises an alarm: the policy is LRU until 2 * `capacity` blocks were inserted. After the second
    alarm, the policy is LRU for 8 * `capacity` blocks, after the third for 32 * `capacity`, and so on. The total loss
    thus grows only with the logarithm of the time. Even the first period is longer than `capacity` blocks, because the
    first `capacity` inserted blocks only replace the blocks that the learned order has kept.
    """

    # On five generated chat traces and a cache of 1,000 blocks, the hit rate is at most 0.32 points below that of LRU.
    # With FIRST = 1 and GROWTH = 2, it is up to 0.49 points below. With FIRST = 2 and GROWTH = 2, up to 0.53.
    FIRST, GROWTH = 2, 4
    MAX_LOST = 0.1  # limit as a share of the capacity, as in the prototype; other shares have not been measured
    MAX_LOST_REQUESTS = 16  # minimum of the limit, in requests of mean size; one long request must not raise an alarm

    def __init__(self) -> None:
        self.is_lru = False
        self.num_alarms = 0
        self.lost = 0.0
        self._mean_blocks = 0.0
        self._num_requests = 0
        self._until = 0.0  # blocks to insert before the policy is no longer LRU

    def record(self, lru_hits: int, hits: int, num_blocks: int, num_requests: int, capacity: int) -> bool:
        """Record the totals of some requests. Return True if the policy changes between LRU and the learned order."""
        if not num_requests:
            return False
        self._num_requests += num_requests
        share = num_requests / min(1000, self._num_requests)  # the mean follows about the last 1000 requests
        self._mean_blocks += (num_blocks / num_requests - self._mean_blocks) * share
        if self.is_lru:
            self._until -= num_blocks - hits
            self.is_lru = self._until > 0
            return not self.is_lru
        self.lost = max(0.0, self.lost + lru_hits - hits)
        if self.lost <= max(self.MAX_LOST * capacity, self.MAX_LOST_REQUESTS * self._mean_blocks):
            return False
        self._until = float(self.FIRST * capacity * self.GROWTH**self.num_alarms)
        self.num_alarms += 1
        self.lost, self.is_lru = 0.0, True
        return True


class ReuseTracker:
    """Tracks touches and ghosts of one tree (see the module docstring)."""

    def __init__(self, capacity: int = 1, block_tokens: int = 1, code: IndexNative | None = None) -> None:
        """`capacity` is the size in blocks of the simulated LRU cache. `code` is the native code, if any."""
        self.block_tokens = block_tokens
        self.code = code
        self.state = TrackerState(capacity=capacity, is_lru=1, until_fit=FIRST_FIT)
        self.cells = Cells()
        self.table = ReuseTable(self.cells, code)
        self.log = TouchLog(self.state)
        self.guard = LRUGuard()
        self.first_fit = FIRST_FIT
        self._enter: Enter = enter
        self._take_ghosts: TakeGhosts = partial(take_ghosts, self.state)
        self._add_ghost: Callable[[Ghosts, Node], int] = add_ghost
        self._ghosts: Ghosts = {}
        """Hash that identifies an evicted node -> ghost (see `_BLOCKS_BIT`)."""
        self._num_requests = 0
        self._sessions: OrderedDict[Session, tuple[Node, int, int]] = OrderedDict()
        """Session -> last node of its last request, and the touches [first, stop) of this request."""
        self._ends: dict[Node, Session] = {}
        """Last node of a session's last request -> session."""
        if code is not None:
            self._share(code)

    def _share(self, code: IndexNative) -> None:
        """Give native code the addresses of the arrays, and use its functions from now on."""
        state, table = self.state, self.table
        state.num_touches, state.ring, state.max_runs, state.running = NUM_TOUCHES, _RING, MAX_RUNS, _RUNNING
        state.guard_requests = GUARD_REQUESTS
        state.left = self.log.left.buffer_info()[0]
        state.ends, state.uses_bin = NATIVE_ENDS.ctypes.data, NATIVE_USES.ctypes.data
        state.values, state.floors = table.all_values.ctypes.data, table.all_floors.ctypes.data
        state.rises_until = table.all_rises.ctypes.data
        self._enter, self.log.native_take, self._take_ghosts, self._add_ghost = code.log(state)

    def see(self, now: float) -> None:
        if now > self.state.now:
            self.state.now = now

    # ---- calls of the tree -----------------------------------------------------------------------------------------

    def returned(self, lease: Lease) -> Returned | None:
        """At the end of a request, remove and return the ghosts of the blocks that follow its match."""
        return self._take_ghosts(self._ghosts, lease)

    def touch(self, lease: Lease, returned: Returned | None, outcome: Outcome, now: float) -> None:
        """At the end of a request, end the old touches of its path and start new ones."""
        state = self.state
        if now > state.now:
            state.now = now
        first = state.next
        due = self._enter(self, self.block_tokens, lease, returned, outcome)
        if outcome.hints.session_id and state.next > first:
            session = session_of(lease.chain.salt, outcome.hints.session_id)
            self._remember(session, lease.node, first, state.next)
        if due:
            self.learn()

    def cell(self, uses: int, labels: tuple[int, ...]) -> int:
        """Return the number of a class. Add the values of a new class to the table."""
        cell = self.cells.number(uses, labels)
        self.table.row(cell)
        return cell

    def learn(self) -> None:
        """Update the guard. If enough requests have ended since the last fit, compute the values again."""
        state = self.state
        counts = state.num_lru_hits, state.num_hits, state.num_blocks, state.num_requests
        self._num_requests += state.num_requests
        state.num_requests = state.num_blocks = state.num_hits = state.num_lru_hits = 0
        changed = self.table.is_fitted and self.guard.record(*counts, state.capacity)
        if state.until_fit <= 0:
            self.fit()
        elif changed:
            self._changed()
        if state.next - self.log.synced >= _MARGIN // 2:
            self.log.sync()

    def removed(self, node: Node, kept: int) -> None:
        """Record that a node is cut to `kept` blocks, or removed if `kept` is 0. Ignore a node without a touch."""
        usage = node.usage
        if usage.touch is None:
            return
        if kept:
            usage.lost += node.num_blocks - kept
            return
        if self._ends and node in self._ends:
            self._shorten(node)
        ghosts = self._ghosts
        if self._add_ghost(ghosts, node) >= NUM_TOUCHES + _MARGIN:
            # Delete many at once, because the search for a dict's first entry passes all deleted entries.
            for oldest in list(islice(ghosts, _MARGIN)):
                del ghosts[oldest]

    def detached(self, node: Node) -> None:
        """Handle a node that leaves the tree: forget the session whose last request ends at the node, if any."""
        session = self._ends.pop(node, None)
        if session is not None:
            del self._sessions[session]

    def close(self, session: Session, now: float) -> list[Node]:
        """Return the nodes whose last use was the last request of a session. Set the hint in their class to "over".

        The caller must withdraw these nodes and offer them again. The session is unknown until its next request.
        """
        self.see(now)
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
                self.table.row(cell)
                moved[touch] = (touch[0], cell, self.state.now, touch[3])
            each.usage.touch = moved[touch]
            nodes.append(each)
        for touch in {touch[0]: touch for touch in moved.values()}.values():
            self.log.move(touch[0], touch[1], self.state.now)
        return nodes

    def fit(self) -> None:
        """Compute the values of all classes again, from all observations so far."""
        self.state.until_fit = max(self.first_fit, min(LAST_FIT, self._num_requests // FIT_SHARE))
        self.log.sync()
        for observed in self.log.take_observed():
            self.table.add(*observed)
        self.table.fit(*self.log.still_open(self.state.now))
        self.table.decay(self.state.until_fit)
        self._changed()

    # ---- queries ---------------------------------------------------------------------------------------------------

    def value(self, cell: int, since: float) -> tuple[float, float]:
        """Return the value of a block of class `cell`, last used at `since`, and the time when the value changes."""
        if self.state.is_lru:
            return 0.0, math.inf
        bucket = bisect_right(LIMITS, self.state.now - since)
        return self.table.row(cell)[bucket], since + ENDS[bucket]

    def floor(self, cell: int) -> float:
        """Return `ReuseTable.floors` of a class, or infinity if the order is LRU or the class is new."""
        return math.inf if self.state.is_lru or cell >= len(self.table.floors) else self.table.floors[cell]

    def describe(self, cell: int, value: float) -> str:
        """Return the class and the value of a victim as text."""
        return f"Learned (class: {self.cells.describe(cell)}; value: {value:.2e} hits per block-second)"

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise StateError if an invariant is violated. `nodes` are all nodes of the tree."""
        log, state = self.log, self.state
        log.sync()
        left = np.frombuffer(log.left, np.int32)
        if (left < 0).any() or (left > log.blocks).any():
            raise StateError("a touch has a negative number of open blocks, or more than it had at first")
        if not max(0, state.next - NUM_TOUCHES) == state.oldest <= state.frontier <= state.next:
            raise StateError(f"the LRU frontier {state.frontier} is not in [{state.oldest}, {state.next}]")
        in_lru = int(left[np.arange(state.frontier, state.next) % _RING].sum())
        if in_lru != state.num_in_lru or in_lru > state.capacity:
            raise StateError(f"{state.num_in_lru} blocks counted for LRU, {in_lru} exist, capacity {state.capacity}")
        if len(self._ghosts) >= NUM_TOUCHES + _MARGIN or self.cells.count > len(self.cells.features):
            raise StateError(f"{len(self._ghosts)} ghosts and {self.cells.count} classes exceed their limits")
        rows = self.table.values
        if any(len(row) != NUM_BUCKETS or not min(row) >= 0 or max(row) == math.inf for row in rows):
            raise StateError("a value is negative or not finite")
        if {node: session for session, (node, _, _) in self._sessions.items()} != self._ends:
            raise StateError("sessions and their last nodes do not match")
        for node in nodes:
            touch = node.usage.touch
            if touch is None or touch[0] < state.oldest:
                continue
            at = touch[0] % _RING
            if touch[0] >= state.next or log.cells[at] != touch[1] or log.times[at] != touch[2]:
                raise StateError(f"the touch {touch} of blocks [{node.start}, {node.stop}) is not in the log")

    def _remember(self, session: Session, node: Node, first: int, stop: int) -> None:
        """Remember the last request of a session, which ends at `node` and has the touches [first, stop)."""
        old = self._sessions.pop(session, None)
        if old is not None:
            del self._ends[old[0]]
        other = self._ends.get(node)
        if other is not None:  # the last request of another session ended at the same node
            del self._sessions[other]
        self._sessions[session] = node, first, stop
        self._ends[node] = session
        if len(self._sessions) > NUM_TOUCHES:
            _, (oldest, _, _) = self._sessions.popitem(last=False)
            del self._ends[oldest]

    def _shorten(self, node: Node) -> None:
        """Move the end of a session from an evicted node to its parent. If this is impossible, forget the session."""
        session, above = self._ends.pop(node), node.parent
        if above is None or above.parent is None or above in self._ends:
            del self._sessions[session]
        else:
            _, first, stop = self._sessions[session]
            self._sessions[session], self._ends[above] = (above, first, stop), session

    def _changed(self) -> None:
        self.state.version += 1
        self.state.is_lru = self.guard.is_lru or not self.table.is_fitted


def enter(tracker: ReuseTracker, block_tokens: int, lease: Lease, returned: Returned | None, outcome: Outcome) -> bool:
    """Record the uses of a request in the log. Return True if `learn` is due."""
    node, path, matched, (began, stop) = lease.node, [], lease.num_matched, lease.began
    while node.parent is not None:
        path.append(node)
        node = node.parent
    if not path:
        return False
    cells, log, state = tracker.cells, tracker.log, tracker.state
    fresh_from, again, ghosts = returned or (matched, 0, ())
    labels = cells.labels(lease.chain.salt, path[-1].key, (stop - fresh_from) * block_tokens, outcome)
    ended: list[int] = []
    started, last, now = log.started, -1, state.now
    first = len(started)
    run: Touch = (-1, -1, now, -1)
    cell, number = -1, state.next - 1
    for node in reversed(path):
        usage, num_blocks = node.usage, node.num_blocks
        touch = usage.touch
        if touch is not None:
            old, uses = touch[0], touch[3] + 1 if touch[3] < MAX_USES else MAX_USES
        elif node.start < matched:  # published by a request that is still running
            old, uses = _RUNNING, 1
        else:
            # A node counts as returned if most of its blocks had ghosts.
            old, uses = -1, again if node.start + node.stop < 2 * fresh_from else 0
        if old == last >= 0:
            ended[-1] += num_blocks
        elif old >= 0:
            ended += old, num_blocks
            last = old
        if uses != run[3]:
            this = tracker.cell(uses, labels)
            if this != cell and len(started) < first + 2 * MAX_RUNS:
                cell, number = this, number + 1
                started += cell, 0
            run = (number, cell, now, uses)
        started[-1] += num_blocks
        usage.touch, usage.lost = run, 0
    for i in range(0, len(ghosts), 2):
        if ghosts[i] == last:
            ended[-1] += ghosts[i + 1]
        else:
            ended += ghosts[i : i + 2]
            last = ghosts[i]
    state.num_lru_hits += log.use(ended, fresh_from)
    log.add(first, began)
    state.num_requests += 1
    state.num_blocks += stop
    state.num_hits += matched
    state.until_fit -= 1
    return state.num_requests >= GUARD_REQUESTS or state.until_fit <= 0


def take_ghosts(state: TrackerState, ghosts: Ghosts, lease: Lease) -> Returned | None:
    """Remove and return the ghosts of the blocks that follow the match of a request."""
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
    domain, oldest = node.domain, state.next - NUM_TOUCHES
    while ghosts and block < stop:
        key = first.key if first is not None and first.start == block else chain.key_at(block)
        ghost = ghosts.pop(hash((domain, key, block)), None)
        if ghost is None or ghost >> _NUMBER_BIT < oldest:
            break
        num_blocks = min(ghost >> _BLOCKS_BIT & _MAX_GHOST, stop - block)
        ended += ghost >> _NUMBER_BIT, num_blocks
        again = again or (ghost & 7) + 1
        block += num_blocks
    return (block, min(again, MAX_USES), ended) if ended else None


def add_ghost(ghosts: Ghosts, node: Node) -> int:
    """Remember a removed node that has a touch. Return the number of ghosts."""
    usage = node.usage
    assert usage.touch is not None
    number, _, _, uses = usage.touch
    # A ghost is one int, because each garbage collection would visit tuples.
    packed = number << _NUMBER_BIT | min(node.num_blocks + usage.lost, _MAX_GHOST) << _BLOCKS_BIT | uses
    ghosts[hash((node.domain, node.key, node.start))] = packed
    return len(ghosts)
