"""Node: a run of consecutive blocks in the tree, with the slots and states of the blocks in each tier."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from enum import IntEnum

import numpy as np

from kvtier.messages import I32


class BlockState(IntEnum):
    """State of a block in one tier.

        ABSENT --write--> WRITING --arrived--> READY --read--> READING (READY + number of readers) --done--> READY
           ^                 |                   |
           +----- failed ----+-----removed-------+

    The order matters, because READY and all higher states are readable.
    """

    ABSENT = 0
    WRITING = 1
    READY = 2
    READING = 3


# Plain numbers for hot paths: access to an enum member takes 0.1 us (measured with Python 3.11 on x86-64, 2026-11-15).
ABSENT, WRITING, READY = int(BlockState.ABSENT), int(BlockState.WRITING), int(BlockState.READY)
MAX_STATE = 255
# Tables for bytes.translate. WRITTEN ends a write, READ_MORE adds a reader and READ_FEWER removes a reader. These three
# tables contain 0 for states that do not allow the change. Each of the other tables contains 1 for the states that its
# name describes, and 0 for all other states.
WRITTEN = bytes(READY if value == WRITING else 0 for value in range(256))
READ_MORE = bytes(value + 1 if READY <= value < MAX_STATE else 0 for value in range(256))
READ_FEWER = bytes(value - 1 if value > READY else 0 for value in range(256))
READABLE = bytes(int(value >= READY) for value in range(256))
IS_ABSENT = bytes(int(value == ABSENT) for value in range(256))
IS_HELD = bytes(int(value != ABSENT) for value in range(256))
NO_SLOT = -1


def mask_and(one: bytes, other: bytes | bytearray) -> bytes:
    """Return the AND of two masks. A mask has one byte per block, which is 1 or 0."""
    if 0 not in other:
        return one
    return (int.from_bytes(one, "little") & int.from_bytes(other, "little")).to_bytes(len(one), "little")


class Residency:
    """Slots and states of a node's blocks in one tier. The slot of an absent block is NO_SLOT.

    States are a bytearray, because its find, count and translate methods are fast.
    """

    __slots__ = ("num_held", "slots", "states")

    def __init__(self, slots: I32, states: bytearray) -> None:
        self.slots = slots
        self.states = states
        self.num_held = len(states) - states.count(ABSENT)

    def cut(self, first: int, stop: int) -> Residency:
        return Residency(self.slots[first:stop], self.states[first:stop])

    def joined(self, other: Residency) -> Residency:
        return Residency(np.concatenate((self.slots, other.slots)), self.states + other.states)

    @classmethod
    def absent(cls, num_blocks: int) -> Residency:
        return cls(np.full(num_blocks, NO_SLOT, np.int32), bytearray(num_blocks))


# The last use of a run of blocks, for the learned policy (see kvtier.index.tracker): serial number of the touch, number
# of the blocks' class, time of the use on the caller's clock, number of earlier uses.
Touch = tuple[int, int, float, int]


@dataclass(slots=True)
class AccessStats:
    """Input for eviction policies. `created` and `used` are logical times. `expires` is a time on the caller's clock.

    Only ReuseTracker sets `touch` and `lost`. `lost` counts the blocks that were removed from the end of the node since
    its last touch.
    """

    created: int
    used: int
    uses: int = 0
    priority: int = 0
    expires: float = math.inf
    touch: Touch | None = None
    lost: int = 0

    def copy(self) -> AccessStats:
        """Return a copy for the upper part of a split node. The lower part keeps `lost`."""
        return AccessStats(self.created, self.used, self.uses, self.priority, self.expires, self.touch)


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """Blocks [start, start + num_blocks) of every chain through this node. `labels` contains their token bytes.

    All blocks of a node have the same leases and access statistics. A lease on only some of them splits the node.

    `key` contains the token bytes and the extras (digests of media) of the first block. The dict `parent.children` has
    the same bytes object as the key of this node, so Python computes its hash only once. `leases` counts the leases
    that end at this node or at a descendant. `below[t]` counts the children whose subtrees have blocks in tier t.
    """

    parent: Node | None
    domain: tuple[bytes, bytes]
    key: bytes
    start: int
    num_blocks: int
    labels: memoryview
    usage: AccessStats
    num_tiers: InitVar[int]
    extras: dict[int, bytes] | None = None  # by block number in the chain
    keys: bytes = b""
    children: dict[bytes, Node] = field(init=False)
    held: list[Residency | None] = field(init=False)  # by tier; None if the tier holds no block of the node
    below: list[int] = field(init=False)
    leases: int = field(init=False, default=0)
    attached: bool = field(init=False, default=True)  # False after the node has left the tree

    def __post_init__(self, num_tiers: int) -> None:
        self.children = {}
        self.held = [None] * num_tiers
        self.below = [0] * num_tiers

    @property
    def stop(self) -> int:
        return self.start + self.num_blocks

    @property
    def label_bytes(self) -> int:
        return len(self.labels) // self.num_blocks

    def label(self, block: int) -> memoryview:
        """Return the token bytes of a block, without its extras. The first block of the node has index 0."""
        width = self.label_bytes
        return self.labels[block * width : (block + 1) * width]

    def key_at(self, block: int) -> bytes:
        """Return the key of a node that would begin at `block`. The first block of this node has index 0."""
        label = bytes(self.label(block))
        return label + self.extras.get(self.start + block, b"") if self.extras else label

    def num_leading(self, table: bytes) -> int:
        """Count the leading blocks that are readable (`table` is READABLE) or held (IS_HELD) in at least one tier."""
        union = 0
        for held in self.held:
            if held is not None:
                here = held.states.translate(table)
                if 0 not in here:
                    return self.num_blocks
                union |= int.from_bytes(here, "little")
        first = union.to_bytes(self.num_blocks, "little").find(0)
        return self.num_blocks if first < 0 else first

    def upwards(self) -> Iterator[Node]:
        """Yield this node and its ancestors, except the root."""
        at = self
        while at.parent is not None:
            yield at
            at = at.parent

    def descendants(self) -> list[Node]:
        """Return all descendants, parents first."""
        nodes = list(self.children.values())
        for child in nodes:  # `nodes` grows during the loop
            nodes.extend(child.children.values())
        return nodes

    def device_slots(self) -> I32:
        """Return the device slot of each block, or NO_SLOT for blocks that are not readable on the device."""
        held = self.held[0]
        if held is None:
            return np.full(self.num_blocks, NO_SLOT, np.int32)
        if held.states.count(READY) == len(held.states):
            return held.slots
        return np.where(np.frombuffer(held.states, np.uint8) >= READY, held.slots, NO_SLOT).astype(np.int32)
