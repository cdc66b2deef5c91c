"""ARC: how much room what was used once gets, and how much what was used again, is learnt from what is missed.

    offered --> recent ----used again----> frequent         each evicts its least recently used
                  |                            |
                  v evicted                    v evicted
             ghosts of recent            ghosts of frequent
                  | offered again              | offered again: both come back as frequent
                  +--> more room for recent    +--> more room for frequent

Room is counted in blocks. Ghosts are remembered for as many blocks as candidates there were at most.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtier.index.candidates import CandidateHeap, fingerprint
from kvtier.index.node import Node


class ARC:
    """Adapts between recency and frequency."""

    name = "ARC"

    def __init__(self) -> None:
        self._recent, self._frequent = _Side(), _Side()
        self._target = 0.0
        """Blocks that recent may have before it is the one to lose some."""
        self._most = 0
        """Candidate blocks there were at a time: what stands for the capacity, which a policy is not told."""
        # What came back from the ghosts and was not used since, by content and time of coming.
        self._returned: OrderedDict[tuple[int, int], None] = OrderedDict()

    def offer(self, node: Node) -> None:
        """To the side its uses say; what is known as a ghost moves the target."""
        if node in self:
            return
        mark = fingerprint(node)
        if mark in self._recent.ghosts:
            ratio = self._frequent.num_ghosts / max(1, self._recent.num_ghosts)
            self._target = min(float(self._most), self._target + max(1.0, ratio) * node.num_blocks)
            self._recent.forget(mark)
            self._return(node, mark)
        elif mark in self._frequent.ghosts:
            ratio = self._recent.num_ghosts / max(1, self._frequent.num_ghosts)
            self._target = max(0.0, self._target - max(1.0, ratio) * node.num_blocks)
            self._frequent.forget(mark)
            self._return(node, mark)
        is_frequent = node.usage.uses > 0 or (mark, node.usage.created) in self._returned
        (self._frequent if is_frequent else self._recent).add(node)
        self._most = max(self._most, self._recent.num_blocks + self._frequent.num_blocks)

    def withdraw(self, node: Node) -> None:
        """It is leased, or gone."""
        self._recent.remove(node)
        self._frequent.remove(node)

    def __contains__(self, node: Node) -> bool:
        return node in self._recent.heap or node in self._frequent.heap

    def victim(self) -> Node | None:
        """The least recently used of recent while that has more than its target, else of frequent."""
        recent = self._recent.heap.first()
        side = self._recent
        if recent is None or (self._recent.num_blocks <= self._target and len(self._frequent.heap)):
            side = self._frequent
        found = side.heap.first()
        if found is None:
            return None
        side.remember(found[1], self._most)
        return found[1]

    def _return(self, node: Node, mark: int) -> None:
        self._returned[mark, node.usage.created] = None
        while len(self._returned) > 1024 + 4 * (len(self._recent.heap) + len(self._frequent.heap)):
            self._returned.popitem(last=False)


class _Side:
    """Candidates, and the ghosts of those that were evicted, with their blocks."""

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
