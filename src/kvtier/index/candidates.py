"""What eviction policies are made of: candidates by rank, and a mark to know a node again by."""

from __future__ import annotations

import heapq
import zlib

from kvtier.index.node import Node


class CandidateHeap:
    """Candidates by rank, least first. Withdrawing only forgets the entry; the heap drops it when it comes up."""

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
        """Add, or change the rank of one that is there; of equals, the first comes first."""
        self._next += 1
        self._entries[node] = self._next
        heapq.heappush(self._heap, (rank, self._next, node))
        # Half of it may be forgotten entries; more would let a few candidates touched often fill the memory.
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Forget it, if it is there."""
        self._entries.pop(node, None)

    def first(self) -> tuple[float, Node] | None:
        """The least rank and its node."""
        while self._heap:
            rank, entry, node = self._heap[0]
            if self._entries.get(node) == entry:
                return rank, node
            heapq.heappop(self._heap)
        return None


def fingerprint(node: Node) -> int:
    """Tells a node that comes back from others, good enough for statistics and never used to share KV."""
    return zlib.crc32(node.key, node.start)
