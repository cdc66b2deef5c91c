"""Lease: protects a path in the tree from eviction, and owns the request's device slots that the tree does not own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvtier.errors import RangeError, StateError
from kvtier.index.chain import Chain
from kvtier.index.misses import MissReason
from kvtier.index.node import Node
from kvtier.messages import I32


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention of blocks. A higher priority delays eviction. Blocks expire `ttl` seconds after their last use."""

    priority: int = 0
    ttl: float = math.inf


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """A lease on a path, created by RadixTree (usually by `match`). Only RadixTree and CacheManager change it.

    chain    |b0|b1|b2|b3|b4|b5|..          example: num_matched = 2, num_blocks = 4
    tree     |-- path --|                   the tree contains blocks [0, num_blocks); the path ends with `node`
    table    |s0|s1|s2|s3|s4|s5|            device slots; the lease owns slots [num_blocks, ..) and `duplicate_slots`
    """

    chain: Chain
    node: Node
    num_blocks: int
    table: I32
    retention: Retention
    stopped: MissReason | None
    """Reason why the match ended (MissReason.NONE if every requested block matched). None if the tree lacks the block
    after the matched ones, or if the lease does not come from RadixTree.match."""
    matched_at: int  # logical time
    num_matched: int = field(init=False)
    duplicate_slots: list[I32] = field(init=False, default_factory=list)
    """Slots with this request's own copies of blocks that another request published first."""
    grown: Node | None = field(init=False, default=None)
    """Last node that `publish` added for this lease. The next call of `publish` may append to it."""
    committed: bool = field(init=False, default=False)  # True after `RadixTree.commit`
    began: tuple[float, int] = field(init=False, default=(0.0, 0))
    """For the learned policy: time when the lease first counted as a use, and number of blocks of the chain then."""
    closed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.num_matched = self.num_blocks

    @property
    def num_matched_tokens(self) -> int:
        return self.num_matched * self.chain.namespace.block_tokens

    def must_be_open(self) -> None:
        """Raise StateError if the lease was released."""
        if self.closed:
            raise StateError("this lease was already released; match the chain again")

    def num_missing(self, num_tokens: int) -> int:
        """Count the slots that the table lacks for `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.chain.namespace.block_tokens) - len(self.table))

    def num_full_blocks(self, computed_tokens: int) -> int:
        """Count the full blocks in `computed_tokens` tokens. Raise an error if the chain or the table is too short."""
        stop = computed_tokens // self.chain.namespace.block_tokens
        if not 0 <= computed_tokens <= self.chain.num_tokens:
            raise RangeError(f"{computed_tokens} tokens computed, but the chain has {self.chain.num_tokens}")
        if stop > len(self.table):
            raise StateError(f"{computed_tokens} tokens fill {stop} blocks, but the lease has {len(self.table)} slots")
        return stop
