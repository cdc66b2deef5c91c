"""Lease: a request's hold on a path of the tree and on slots of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvtier.errors import StateError
from kvtier.index.chain import Chain
from kvtier.index.misses import MissReason
from kvtier.index.node import NO_SLOT, READY, Node, upwards
from kvtier.index.pool import I32


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what a request leaves behind should stay: higher priority goes later; after ttl seconds it is gone."""

    priority: int = 0
    ttl: float = math.inf


@dataclass(frozen=True, slots=True)
class Path:
    """The blocks of a lease in their order: for each the number of the fastest tier that can be read, and the slot."""

    tiers: np.ndarray[tuple[int], np.dtype[np.int8]]
    slots: I32


@dataclass(slots=True)
class Published:
    """What became of computed blocks: new in the tree, or there already (the lease keeps its own copy to the end)."""

    num_new: int
    num_duplicate: int


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A cached block that begins with a chain's next tokens: a lease that ends with it, and how many it shares."""

    lease: Lease
    num_tokens: int


class Lease:
    """Made by RadixTree.match, ended once by RadixTree.release. The tree changes it; callers read.

    chain    |b0|b1|b2|b3|b4|b5|..          num_matched = 2, num_blocks = 4
    tree     |-- node path ---|             blocks [0, num_blocks) are in the tree, under `node`
    table    |s0|s1|s2|s3|s4|s5|            device slots; [num_blocks, ..) are this lease's own, and so are `spare`
    """

    __slots__ = (
        "chain",
        "closed",
        "committed",
        "grown",
        "matched_at",
        "node",
        "num_blocks",
        "num_matched",
        "retention",
        "spare",
        "stopped",
        "table",
    )

    def __init__(
        self,
        chain: Chain,
        node: Node,
        num_blocks: int,
        table: I32,
        retention: Retention,
        stopped: MissReason | None,
        matched_at: int,
    ) -> None:
        self.chain = chain
        self.node = node
        self.num_blocks = num_blocks
        self.num_matched = num_blocks
        self.stopped = stopped
        self.matched_at = matched_at
        self.table = table
        self.spare: list[I32] = []
        self.grown: Node | None = None
        self.retention = retention
        self.committed = False
        self.closed = False

    @property
    def num_matched_tokens(self) -> int:
        """Tokens whose KV was found."""
        return self.num_matched * self.chain.namespace.block_tokens

    def must_be_open(self) -> None:
        """Raise if it was released."""
        if self.closed:
            raise StateError("this lease was released already; a lease is released exactly once")

    def num_missing(self, num_tokens: int) -> int:
        """Slots the table lacks for that many tokens."""
        return max(0, -(-num_tokens // self.chain.namespace.block_tokens) - len(self.table))


def path_to(node: Node) -> Path:
    """The blocks from the root to the end of a node, each with the fastest tier it can be read from."""
    tiers, slots = [np.empty(0, np.int8)], [np.empty(0, np.int32)]
    for each in reversed(list(upwards(node))):
        where = np.full(each.num_blocks, -1, np.int8)
        at = np.full(each.num_blocks, NO_SLOT, np.int32)
        for number, held in reversed(list(enumerate(each.held))):
            if held is not None:
                ready = np.frombuffer(held.states, np.uint8) >= READY
                where[ready] = number
                at[ready] = held.slots[ready]
        tiers.append(where)
        slots.append(at)
    return Path(np.concatenate(tiers), np.concatenate(slots))
