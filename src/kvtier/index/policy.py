"""Eviction policies: which of the nodes that may go goes first.

A policy sees only candidates: nodes no lease covers, with nothing of the tier below them. Blocks are taken from the end
of the victim, and its parent becomes a candidate when nothing is left below it, so every policy here evicts leaves
first. One instance serves one tier and one priority. A call costs O(log n) at most; S3FIFO's victim, amortised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvtier.errors import ArgumentError
from kvtier.index.arc import ARC
from kvtier.index.candidates import CandidateHeap, fingerprint
from kvtier.index.node import Node


class Policy(Protocol):
    """Who is a candidate, and which is next. Nothing here changes a node."""

    name: str

    def offer(self, node: Node) -> None:
        """The node is a candidate from now on; harmless if it is one. Its usage does not change while it is."""

    def withdraw(self, node: Node) -> None:
        """It is none any more; harmless if it was none."""

    def __contains__(self, node: Node) -> bool:
        """Whether it is a candidate."""

    def victim(self) -> Node | None:
        """The candidate whose last blocks go now; it stays a candidate until withdrawn."""


class Ranked:
    """Candidates in the order of a number that does not change while they are candidates."""

    def __init__(self, name: str, rank: Callable[[Node], float]) -> None:
        self.name = name
        self._rank = rank
        self._heap = CandidateHeap()

    def offer(self, node: Node) -> None:
        """By its rank."""
        if node not in self._heap:
            self._heap.push(node, self._rank(node))

    def withdraw(self, node: Node) -> None:
        """Forget it."""
        self._heap.discard(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._heap

    def victim(self) -> Node | None:
        """The least."""
        found = self._heap.first()
        return found[1] if found else None


def LRU() -> Ranked:
    """Least recently used first."""
    return Ranked("LRU", lambda node: node.usage.used)


def FIFO() -> Ranked:
    """Oldest first, used or not."""
    return Ranked("FIFO", lambda node: node.usage.created)


class CostAware:
    """Least worth per byte first: worth is uses times the cost of computing the blocks again (Greedy-Dual).

    Computing a block again costs more the deeper it lies, because attention reads all before it: block at token p costs
    1 + p / half_tokens, where at `half_tokens` of context attention costs as much as the rest of the layer. A node's
    rank is its worth above the rank of the last victim, so that what is not used sinks.
    """

    name = "CostAware"

    def __init__(self, half_tokens: int = 16_384) -> None:
        self._heap = CandidateHeap()
        self._floor = 0.0
        self._half_tokens = half_tokens

    def offer(self, node: Node) -> None:
        """By its worth now."""
        if node in self._heap:
            return
        end_tokens = node.stop * node.label_bytes // 4
        self._heap.push(node, self._floor + (1 + node.usage.uses) * (1 + end_tokens / self._half_tokens))

    def withdraw(self, node: Node) -> None:
        """Forget it."""
        self._heap.discard(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._heap

    def victim(self) -> Node | None:
        """The one worth least; everything else has aged by its rank."""
        found = self._heap.first()
        if found is None:
            return None
        self._floor = max(self._floor, found[0])
        return found[1]


class S3FIFO:
    """Three queues: new nodes pass a small one, those used meanwhile or missed soon after stay in the main one.

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
        # What is in main, also while it is leased: its place there, and how many of its uses are spent. By content and
        # time of coming, so that what was evicted from main and comes again is new.
        self._in_main: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._time = 0

    def offer(self, node: Node) -> None:
        """Back to its place, or to the end of small; to that of main if it was evicted a short while ago."""
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
        """It is leased, or gone; its place is remembered."""
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
        """The first without a use to spend: of small while that has more than its share, else of main."""
        while self._num_blocks:
            is_small = self._num_small > self.SMALL_SHARE * (self._num_small + self._num_main)
            queue = self._small if len(self._small) and (is_small or not len(self._main)) else self._main
            found = queue.first()
            assert found is not None
            node = found[1]
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
        """For as long as main could hold it."""
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
    """The policy of that name."""
    if name not in POLICIES:
        raise ArgumentError(f"no eviction policy is called {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
