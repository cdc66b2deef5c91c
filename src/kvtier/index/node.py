"""Node: a run of blocks on one edge of the tree, and what each tier holds of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvtier.index.pool import I32


class BlockState(IntEnum):
    """A block in one tier.

        ABSENT --write--> WRITING --settle--> READY --read--> READING (READY + number of readers) --done--> READY
           ^                 |                  |
           +----- failed ----+                  +--drop--> DROPPING --dropped--> ABSENT

    Values order what may be read: READY and above.
    """

    ABSENT = 0
    WRITING = 1
    DROPPING = 2
    READY = 3
    READING = 4


# As plain numbers for hot paths: to name a member of an enum takes 0.1 us (Python 3.11, x86-64, 2026-11-15).
ABSENT, WRITING, READY = int(BlockState.ABSENT), int(BlockState.WRITING), int(BlockState.READY)
MAX_STATE = 255
# Tables for bytes.translate: one more reader, one fewer; is it readable, is it absent.
READ_MORE = bytes(min(value + 1, MAX_STATE) if value >= BlockState.READY else value for value in range(256))
READ_FEWER = bytes(value - 1 if value > BlockState.READY else value for value in range(256))
READABLE = bytes(int(value >= BlockState.READY) for value in range(256))
IS_ABSENT = bytes(int(value == BlockState.ABSENT) for value in range(256))
NO_SLOT = -1


class Residency:
    """What one tier holds of a node: a slot (or NO_SLOT) and a state for each block.

    States are bytes because find, count, slices and translate on bytes are the cheapest vector operations Python has.
    """

    __slots__ = ("num_held", "slots", "states")

    def __init__(self, slots: I32, states: bytearray) -> None:
        self.slots = slots
        self.states = states
        self.num_held = len(states) - states.count(ABSENT)

    def cut(self, first: int, stop: int) -> Residency:
        """Blocks [first, stop) of it."""
        return Residency(self.slots[first:stop], self.states[first:stop])

    def joined(self, other: Residency) -> Residency:
        """This one's blocks, then the other's."""
        return Residency(np.concatenate((self.slots, other.slots)), self.states + other.states)

    @classmethod
    def nothing(cls, num_blocks: int) -> Residency:
        """For a node of which this tier holds nothing yet."""
        return cls(np.full(num_blocks, NO_SLOT, np.int32), bytearray(num_blocks))


@dataclass(slots=True)
class AccessStats:
    """What eviction policies look at. Times are the tree's logical clock, but for `expires`, which is the caller's."""

    created: int
    used: int
    uses: int = 0
    priority: int = 0
    expires: float = math.inf

    def copy(self) -> AccessStats:
        """For the two halves of a node that is split."""
        return AccessStats(self.created, self.used, self.uses, self.priority, self.expires)


class Node:
    """Blocks [start, start + num_blocks) of every chain that runs through it; `labels` are their token bytes.

    A node is uniform: a lease covers it or does not, it was used at one time. Where that would not hold it is split.
    `key` is its first block's label with its extras, under which its parent has it: the same object, whose hash is
    known. `leases` counts those that end here or below; `below[t]` the children at or below which tier t holds blocks.
    """

    __slots__ = (
        "attached",
        "below",
        "children",
        "domain",
        "extras",
        "held",
        "key",
        "keys",
        "labels",
        "leases",
        "num_blocks",
        "parent",
        "start",
        "usage",
    )

    def __init__(
        self,
        parent: Node | None,
        domain: tuple[bytes, bytes],
        key: bytes,
        start: int,
        num_blocks: int,
        labels: memoryview,
        usage: AccessStats,
        num_tiers: int,
        extras: dict[int, bytes] | None = None,
        keys: bytes = b"",
    ) -> None:
        self.parent = parent
        self.domain = domain
        self.key = key
        self.start = start
        self.num_blocks = num_blocks
        self.labels = labels
        self.usage = usage
        self.extras = extras
        self.keys = keys
        self.children: dict[bytes, Node] = {}
        self.held: list[Residency | None] = [None] * num_tiers
        self.below = [0] * num_tiers
        self.leases = 0
        self.attached = True

    @property
    def stop(self) -> int:
        """One past its last block."""
        return self.start + self.num_blocks

    @property
    def label_bytes(self) -> int:
        """Of one block."""
        return len(self.labels) // self.num_blocks

    def label(self, block: int) -> memoryview:
        """The bytes of its block number `block`, counted from its start, without extras."""
        width = self.label_bytes
        return self.labels[block * width : (block + 1) * width]

    def key_at(self, block: int) -> bytes:
        """What its key would be if it began at its block number `block`."""
        label = bytes(self.label(block))
        return label + self.extras.get(self.start + block, b"") if self.extras else label

    def num_readable(self) -> int:
        """Leading blocks that some tier can be read for."""
        readable = None
        for held in self.held:
            if held is None:
                continue
            if held.states.count(READY) == self.num_blocks:
                return self.num_blocks
            here = int.from_bytes(held.states.translate(READABLE), "little")
            readable = here if readable is None else readable | here
        if readable is None:
            return 0
        first = readable.to_bytes(self.num_blocks, "little").find(0)
        return self.num_blocks if first < 0 else first

    def num_kept(self) -> int:
        """Leading blocks that some tier holds, in whatever state."""
        holding = []
        for held in self.held:
            if held is not None:
                if held.num_held == self.num_blocks:
                    return self.num_blocks
                holding.append(held)
        if not holding:
            return 0
        kept = holding[0].states
        if len(holding) > 1:
            union = 0
            for held in holding:
                union |= int.from_bytes(held.states.translate(_HELD), "little")
            kept = bytearray(union.to_bytes(self.num_blocks, "little"))
        first = kept.find(0)
        return self.num_blocks if first < 0 else first


def upwards(node: Node) -> Iterator[Node]:
    """The nodes with blocks from here to the root."""
    at: Node | None = node
    while at is not None and at.parent is not None:
        yield at
        at = at.parent


def device_slots(node: Node) -> I32:
    """The device's slot of each block, or NO_SLOT where it holds none that can be read."""
    held = node.held[0]
    if held is None:
        return np.full(node.num_blocks, NO_SLOT, np.int32)
    if held.states.count(READY) == len(held.states):
        return held.slots
    return np.where(np.frombuffer(held.states, np.uint8) >= READY, held.slots, NO_SLOT).astype(np.int32)


_HELD = bytes(int(value != BlockState.ABSENT) for value in range(256))
