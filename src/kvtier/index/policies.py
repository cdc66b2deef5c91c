"""Eviction policies: LRU, FIFO, S3-FIFO, ARC and cost-based.

A policy ranks candidates: nodes without a lease and without a child in the tier. Blocks are taken from the end of the
victim, and its parent becomes a candidate when no child is left, so every policy evicts leaves first. One instance
serves one tier and one priority. A call takes O(log n) at most; S3FIFO.victim: amortised.

ARC adapts the split between recency and frequency to ghost hits:

    offered --> recent ----used again----> frequent         both evict their least recently used
                  |                            |
                  v evicted                    v evicted
             ghosts of recent            ghosts of frequent
                  | offered again              | offered again: both return as frequent
                  +--> larger recent share     +--> larger frequent share

Shares are counted in blocks. Ghosts are kept for at most as many blocks as there have been candidates.
"""

from __future__ import annotations

import heapq
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvtier.errors import ArgumentError
from kvtier.index.node import Node


class CandidateHeap:
    """Candidates by rank, lowest first. `discard` only forgets the entry; `first` drops it from the heap."""

    __slots__ = ("_entries", "_heap", "_next")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._entries: dict[Node, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def push(self, node: Node, rank: float) -> None:
        """Add a node or change its rank. Of equal ranks, the first pushed comes first."""
        self._next += 1
        self._entries[node] = self._next
        heapq.heappush(self._heap, (rank, self._next, node))
        # Half may be forgotten entries. Without a limit, a few candidates touched often would fill the memory.
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._entries.pop(node, None)

    def first(self) -> tuple[float, Node] | None:
        """Return the lowest rank and its node."""
        while self._heap:
            rank, entry, node = self._heap[0]
            if self._entries.get(node) == entry:
                return rank, node
            heapq.heappop(self._heap)
        return None


def fingerprint(node: Node) -> int:
    """Return a CRC that identifies a node that returns: good enough for statistics, never used to share KV."""
    return zlib.crc32(node.key, node.start)


class ARC:
    """Adapts between recency and frequency."""

    name = "ARC"

    def __init__(self) -> None:
        self._recent, self._frequent = _Side(), _Side()
        self._target = 0.0
        """Blocks that recent may have before it is evicted from."""
        self._most = 0
        """Highest number of candidate blocks so far: an estimate of the capacity, which a policy does not know."""
        # Nodes that returned from the ghosts and were not used since, by content and creation time.
        self._returned: OrderedDict[tuple[int, int], None] = OrderedDict()

    def offer(self, node: Node) -> None:
        """Add the node to the side given by its uses. A ghost hit moves the target."""
        if node in self:
            return
        mark = fingerprint(node)
        for side, other, sign in ((self._recent, self._frequent, 1), (self._frequent, self._recent, -1)):
            if mark in side.ghosts:
                step = max(1.0, other.num_ghosts / max(1, side.num_ghosts)) * node.num_blocks
                self._target = min(max(0.0, self._target + sign * step), float(self._most))
                side.forget(mark)
                self._returned[mark, node.usage.created] = None
                while len(self._returned) > 1024 + 4 * (len(self._recent.heap) + len(self._frequent.heap)):
                    self._returned.popitem(last=False)
                break
        is_frequent = node.usage.uses > 0 or (mark, node.usage.created) in self._returned
        (self._frequent if is_frequent else self._recent).add(node)
        self._most = max(self._most, self._recent.num_blocks + self._frequent.num_blocks)

    def withdraw(self, node: Node) -> None:
        self._recent.remove(node)
        self._frequent.remove(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._recent.heap or node in self._frequent.heap

    def victim(self) -> Node | None:
        """Return the least recently used node of recent if it exceeds its target, else of frequent."""
        is_within = self._recent.num_blocks <= self._target and len(self._frequent.heap) > 0
        side = self._frequent if is_within or not len(self._recent.heap) else self._recent
        first = side.heap.first()
        if first is None:
            return None
        side.remember(first[1], self._most)
        return first[1]


class _Side:
    """Candidates, and the ghosts of evicted ones with their number of blocks."""

    __slots__ = ("_num_blocks", "ghosts", "heap", "num_blocks", "num_ghosts")

    def __init__(self) -> None:
        self.heap = CandidateHeap()
        self.ghosts: OrderedDict[int, int] = OrderedDict()
        self.num_blocks = self.num_ghosts = 0
        self._num_blocks: dict[Node, int] = {}

    def add(self, node: Node) -> None:
        self.heap.push(node, node.usage.used)
        self._num_blocks[node] = node.num_blocks
        self.num_blocks += node.num_blocks

    def remove(self, node: Node) -> None:
        self.heap.discard(node)
        self.num_blocks -= self._num_blocks.pop(node, 0)

    def remember(self, node: Node, most: int) -> None:
        mark = fingerprint(node)
        self.forget(mark)
        self.ghosts[mark] = node.num_blocks
        self.num_ghosts += node.num_blocks
        while self.num_ghosts > most:
            self.num_ghosts -= self.ghosts.popitem(last=False)[1]

    def forget(self, mark: int) -> None:
        self.num_ghosts -= self.ghosts.pop(mark, 0)


class Policy(Protocol):
    """Set of candidates that selects the next victim. It does not change nodes."""

    name: str

    def offer(self, node: Node) -> None:
        """Add a candidate. No effect if it is one. Its usage does not change while it is a candidate."""

    def withdraw(self, node: Node) -> None:
        """Remove a candidate. No effect if it is not one."""

    def __contains__(self, node: Node) -> bool:
        """Return True if the node is a candidate."""

    def victim(self) -> Node | None:
        """Return the candidate to evict from next. It stays a candidate until withdrawn."""


class Ranked:
    """Candidates in the order of a number that does not change while they are candidates.

    With `ages`, a node's rank is added to the rank of the last victim, so that unused nodes sink (Greedy-Dual).
    """

    def __init__(self, name: str, rank: Callable[[Node], float], *, ages: bool = False) -> None:
        self.name = name
        self._rank = rank
        self._ages = ages
        self._floor = 0.0
        self._heap = CandidateHeap()

    def offer(self, node: Node) -> None:
        if node not in self._heap:
            self._heap.push(node, self._floor + self._rank(node))

    def withdraw(self, node: Node) -> None:
        self._heap.discard(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._heap

    def victim(self) -> Node | None:
        first = self._heap.first()
        if first is None:
            return None
        if self._ages:
            self._floor = max(self._floor, first[0])
        return first[1]


def LRU() -> Ranked:
    """Least recently used first."""
    return Ranked("LRU", lambda node: node.usage.used)


def FIFO() -> Ranked:
    """Oldest first, used or not."""
    return Ranked("FIFO", lambda node: node.usage.created)


def CostAware(half_tokens: int = 16_384) -> Ranked:
    """Lowest value per byte first: the value is uses times the cost of computing the blocks again (Greedy-Dual).

    A deeper block costs more, because attention reads all tokens before it: a block at token p costs
    1 + p / half_tokens, where at `half_tokens` of context attention costs as much as the rest of the layer.
    """

    def value(node: Node) -> float:
        end_tokens = node.stop * node.label_bytes // 4
        return (1 + node.usage.uses) * (1 + end_tokens / half_tokens)

    return Ranked("CostAware", value, ages=True)


class S3FIFO:
    """Three queues: new nodes pass through a small one; those used there, or missed soon after, stay in the main one.

    offered --> small --unused--> evicted, remembered in the ghost queue
                  |  used                          | offered again
                  v                                v
                main <-----------------------------+      main: used -> back to the end, unused -> evicted
    """

    name = "S3FIFO"
    SMALL_SHARE = 0.1
    MAX_USES = 3

    def __init__(self) -> None:
        self._small, self._main = CandidateHeap(), CandidateHeap()
        self._num_blocks: dict[Node, int] = {}
        self._num_small = self._num_main = 0
        # Nodes in main, also while leased: their place and how many of their uses are spent. By content and creation
        # time, so that a node that was evicted from main and returns is new.
        self._in_main: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._time = 0

    def offer(self, node: Node) -> None:
        """Add the node at its former place, at the end of main if it was evicted recently, else at the end of small."""
        if node in self._num_blocks:
            return
        mark = fingerprint(node)
        if mark in self._ghost:
            del self._ghost[mark]
            self._to_main(node, node.usage.uses)
        elif (mark, node.usage.created) in self._in_main:
            self._enqueue(node, self._main, self._in_main[mark, node.usage.created][0])
        else:
            self._enqueue(node, self._small, node.usage.created)

    def withdraw(self, node: Node) -> None:
        """Remove the node and remember its place."""
        num_blocks = self._num_blocks.pop(node, 0)
        if node in self._small:
            self._small.discard(node)
            self._num_small -= num_blocks
        else:
            self._main.discard(node)
            self._num_main -= num_blocks

    def __contains__(self, node: Node) -> bool:
        return node in self._num_blocks

    def victim(self) -> Node | None:
        """Return the first node without a use to spend: of small if it exceeds its share, else of main."""
        while self._num_blocks:
            is_small = self._num_small > self.SMALL_SHARE * (self._num_small + self._num_main)
            queue = self._small if len(self._small) and (is_small or not len(self._main)) else self._main
            first = queue.first()
            assert first is not None
            node = first[1]
            mark = fingerprint(node)
            spent = self._in_main.get((mark, node.usage.created), (0, 0))[1] if queue is self._main else 0
            unspent = min(node.usage.uses - spent, self.MAX_USES)
            if unspent <= 0:
                if queue is self._small:
                    self._remember(mark)
                return node
            self.withdraw(node)
            self._to_main(node, node.usage.uses - unspent + (queue is self._main))
        return None

    def _to_main(self, node: Node, spent: int) -> None:
        self._time += 1
        which = fingerprint(node), node.usage.created
        self._in_main[which] = (self._time, spent)
        self._in_main.move_to_end(which)
        while len(self._in_main) > 1024 + 4 * len(self._num_blocks):
            self._in_main.popitem(last=False)
        self._enqueue(node, self._main, self._time)

    def _remember(self, mark: int) -> None:
        """Keep a ghost, at most as many as main has nodes."""
        self._ghost[mark] = None
        while len(self._ghost) > 64 + len(self._main):
            self._ghost.popitem(last=False)

    def _enqueue(self, node: Node, queue: CandidateHeap, rank: int) -> None:
        queue.push(node, rank)
        self._num_blocks[node] = node.num_blocks
        if queue is self._small:
            self._num_small += node.num_blocks
        else:
            self._num_main += node.num_blocks


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": LRU,
    "fifo": FIFO,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "cost": CostAware,
}


def make_policy(name: str) -> Policy:
    """Return a new policy by name."""
    if name not in POLICIES:
        raise ArgumentError(f"unknown eviction policy {name!r}; known policies: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
