"""Eviction policies: LRU, FIFO, S3-FIFO, ARC, cost-based and learned (kvtier.index.learned).

A policy selects the next victim among the nodes that are candidates for eviction (see Tier). Blocks are evicted from
the end of the victim. A parent becomes a candidate when its last descendant has left the tier, so every policy evicts
leaves first. Each policy object serves one tier and one priority. A call takes amortised O(log n) time.

ARC divides the tier between recent and frequent nodes, and adapts the shares when evicted nodes return:

    offered --> recent ----used again----> frequent
                  |                            |
                  v evicted, LRU first         v evicted, LRU first
             ghosts of recent            ghosts of frequent
                  | offered again              | offered again
                  +--> larger recent share     +--> larger frequent share

A ghost is the fingerprint of an evicted node. A node that has a ghost when it is offered again becomes frequent. Shares
are counted in blocks. Each list of ghosts has at most as many blocks as the candidates have ever had at once.
"""

from __future__ import annotations

import heapq
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvtier.errors import ArgumentError
from kvtier.index.learned import Learned
from kvtier.index.node import Node


class CandidateHeap:
    """Candidates ordered by rank, lowest first. `num_blocks` counts the blocks that they had when pushed.

    `discard` leaves a stale entry in the heap. A later call of `first` or `push` removes it.
    """

    __slots__ = ("_entries", "_heap", "_next", "num_blocks")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._entries: dict[Node, tuple[int, int]] = {}
        self._next = self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def push(self, node: Node, rank: float) -> None:
        """Add a node that is not in the heap. Nodes with equal ranks keep the order in which they were pushed."""
        self._next += 1
        self._entries[node] = self._next, node.num_blocks
        self.num_blocks += node.num_blocks
        heapq.heappush(self._heap, (rank, self._next, node))
        # Limit the stale entries to about half of the heap. Otherwise a few busy candidates could fill the memory.
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2], (0, 0))[0] == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        entry = self._entries.pop(node, None)
        if entry is not None:
            self.num_blocks -= entry[1]

    def first(self) -> tuple[float, Node] | None:
        """Return the lowest rank and its node, or None if there are no candidates."""
        while self._heap:
            rank, number, node = self._heap[0]
            entry = self._entries.get(node)
            if entry is not None and entry[0] == number:
                return rank, node
            heapq.heappop(self._heap)
        return None


def fingerprint(node: Node) -> int:
    """Return a CRC that identifies a node after its eviction. Only eviction policies use it."""
    return zlib.crc32(node.key, node.start)


class ARC:
    """Adaptive Replacement Cache, which balances recent and frequent nodes (see the module docstring)."""

    name = "ARC"

    def __init__(self) -> None:
        self._recent, self._frequent = CandidateHeap(), CandidateHeap()
        self._recent_ghosts, self._frequent_ghosts = _Ghosts(), _Ghosts()
        self._target = 0.0
        """Target size of `_recent` in blocks. If `_recent` is larger, the next victim is one of its nodes."""
        self._most = 0
        """Highest number of candidate blocks so far, used as an estimate of the tier's capacity."""
        # (fingerprint, creation time) of nodes that were offered again after their eviction.
        self._returned: OrderedDict[tuple[int, int], None] = OrderedDict()

    def offer(self, node: Node) -> None:
        """Add a node to `_frequent` if it has been used or has a ghost, otherwise to `_recent`. Adjust `_target`."""
        if node in self:
            return
        mark, recent, frequent = fingerprint(node), self._recent_ghosts, self._frequent_ghosts
        for ghosts, others, sign in ((recent, frequent, 1), (frequent, recent, -1)):
            if mark in ghosts.blocks_of:
                step = max(1.0, others.num_blocks / max(1, ghosts.num_blocks)) * node.num_blocks
                self._target = min(max(0.0, self._target + sign * step), float(self._most))
                ghosts.remove(mark)
                self._returned[mark, node.usage.created] = None
                while len(self._returned) > 1024 + 4 * (len(self._recent) + len(self._frequent)):
                    self._returned.popitem(last=False)
                break
        is_frequent = node.usage.uses > 0 or (mark, node.usage.created) in self._returned
        (self._frequent if is_frequent else self._recent).push(node, node.usage.used)
        self._most = max(self._most, self._recent.num_blocks + self._frequent.num_blocks)

    def withdraw(self, node: Node) -> None:
        self._recent.discard(node)
        self._frequent.discard(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._recent or node in self._frequent

    def victim(self) -> Node | None:
        """Select from `_recent` if `_recent` exceeds its target or `_frequent` is empty, otherwise from `_frequent`."""
        is_within = self._recent.num_blocks <= self._target and len(self._frequent) > 0
        is_frequent = is_within or not len(self._recent)
        first = (self._frequent if is_frequent else self._recent).first()
        if first is None:
            return None
        (self._frequent_ghosts if is_frequent else self._recent_ghosts).add(first[1], self._most)
        return first[1]


class _Ghosts:
    """Fingerprints and block counts of evicted nodes, oldest first."""

    def __init__(self) -> None:
        self.blocks_of: OrderedDict[int, int] = OrderedDict()
        self.num_blocks = 0

    def add(self, node: Node, max_blocks: int) -> None:
        mark = fingerprint(node)
        self.remove(mark)
        self.blocks_of[mark] = node.num_blocks
        self.num_blocks += node.num_blocks
        while self.num_blocks > max_blocks:
            self.num_blocks -= self.blocks_of.popitem(last=False)[1]

    def remove(self, mark: int) -> None:
        self.num_blocks -= self.blocks_of.pop(mark, 0)


class Policy(Protocol):
    """A set of candidates that selects the next victim. A policy does not change nodes."""

    name: str

    def offer(self, node: Node) -> None:
        """Add a node if it is not yet a candidate. The usage of a candidate must not change."""

    def withdraw(self, node: Node) -> None:
        """Remove a node if it is a candidate."""

    def __contains__(self, node: Node) -> bool:
        """Return True if the node is a candidate."""

    def victim(self) -> Node | None:
        """Return the node that loses blocks next, if any. The node stays a candidate until it is withdrawn."""


class Ranked:
    """Evicts the candidate with the lowest rank. The rank is computed when a node is offered.

    With `ages`, the highest rank of all victims so far is added to the rank of each offered node. Nodes that are not
    used again are therefore evicted eventually, even if their own rank is high.
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


def CostAware(half_tokens: int = 16_384) -> Ranked:
    """Evict the lowest value first (Greedy-Dual). The value of a node is (1 + uses) times the cost of its last block.

    The cost of a block that ends at token p is 1 + p / half_tokens, because attention reads all earlier tokens. At a
    context of `half_tokens` tokens, attention costs as much as the rest of the layer.
    """

    def value(node: Node) -> float:
        end_tokens = node.stop * node.label_bytes // 4
        return (1 + node.usage.uses) * (1 + end_tokens / half_tokens)

    return Ranked("CostAware", value, ages=True)


class S3FIFO:
    """New nodes enter a small queue. Nodes that are used, or that return soon after eviction, move to a main queue.

    offered --> small --unused--> evicted, recorded in the ghost queue
                  |  used                          | offered again
                  v                                v
                main <-----------------------------+      used nodes return to the end of main; unused nodes are evicted
    """

    name = "S3FIFO"
    SMALL_SHARE = 0.1
    MAX_USES = 3

    def __init__(self) -> None:
        self._small, self._main = CandidateHeap(), CandidateHeap()
        # (fingerprint, creation time) -> (place, spent uses) of nodes in main. Nodes keep their entry while they are
        # leased. The key contains the creation time, so that a node that returns after its eviction counts as new.
        self._in_main: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._time = 0

    def offer(self, node: Node) -> None:
        """Add a node: to the end of main if in `_ghost`, to its old place if it was in main, otherwise to small."""
        if node in self:
            return
        mark = fingerprint(node)
        if mark in self._ghost:
            del self._ghost[mark]
            self._to_main(node, node.usage.uses)
        elif (mark, node.usage.created) in self._in_main:
            self._main.push(node, self._in_main[mark, node.usage.created][0])
        else:
            self._small.push(node, node.usage.created)

    def withdraw(self, node: Node) -> None:
        self._small.discard(node)
        self._main.discard(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._small or node in self._main

    def victim(self) -> Node | None:
        """Return the first node without unspent uses.

        Search the small queue while it exceeds its share or the main queue is empty, otherwise the main queue. A node
        with unspent uses moves to the end of the main queue. A move within the main queue spends one use.
        """
        small, main = self._small, self._main
        while True:
            is_small = small.num_blocks > self.SMALL_SHARE * (small.num_blocks + main.num_blocks)
            queue = small if len(small) and (is_small or not len(main)) else main
            first = queue.first()
            if first is None:
                return None
            node = first[1]
            mark = fingerprint(node)
            spent = self._in_main.get((mark, node.usage.created), (0, 0))[1] if queue is main else 0
            unspent = min(node.usage.uses - spent, self.MAX_USES)
            if unspent <= 0:
                if queue is small:
                    self._remember(mark)
                return node
            self.withdraw(node)
            self._to_main(node, node.usage.uses - unspent + (queue is main))

    def _to_main(self, node: Node, spent: int) -> None:
        self._time += 1
        which = fingerprint(node), node.usage.created
        self._in_main[which] = (self._time, spent)
        self._in_main.move_to_end(which)
        while len(self._in_main) > 1024 + 4 * (len(self._small) + len(self._main)):
            self._in_main.popitem(last=False)
        self._main.push(node, self._time)

    def _remember(self, mark: int) -> None:
        """Add an evicted node to `_ghost`. Keep at most 64 entries, plus one for each node in main."""
        self._ghost[mark] = None
        while len(self._ghost) > 64 + len(self._main):
            self._ghost.popitem(last=False)


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": lambda: Ranked("LRU", lambda node: node.usage.used),
    "fifo": lambda: Ranked("FIFO", lambda node: node.usage.created),
    "arc": ARC,
    "s3fifo": S3FIFO,
    "cost": CostAware,
    "learned": Learned,
}


def make_policy(name: str) -> Policy:
    """Return a new policy by name."""
    if name not in POLICIES:
        raise ArgumentError(f"unknown eviction policy {name!r}; known policies: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
