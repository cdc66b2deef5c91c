"""State transitions of blocks that are transferred between tiers.

A transfer holds a lease on its path until its result is applied, so WRITING and READING blocks are never evicted. The
tree may split nodes of the path during a transfer. Blocks are therefore numbered from the start of the path, and not
within nodes.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index.lease import Lease
from kvtier.index.node import (
    ABSENT,
    MAX_STATE,
    NO_SLOT,
    READ_FEWER,
    READ_MORE,
    READY,
    WRITING,
    WRITTEN,
    Node,
)
from kvtier.index.pool import Slots
from kvtier.index.tier import Tier
from kvtier.index.tree import RadixTree
from kvtier.messages import I32

_NOT_READABLE = f"cannot be read now: some are ABSENT or WRITING, or already have {MAX_STATE - READY} readers"
_STILL_WRITING = bytes(value if value == WRITING else 0 for value in range(256))
Parts: TypeAlias = list[tuple[Node, int, int, int]]
"""The nodes that contain a range of a path's blocks, last node first: (node, low, high, offset). The range contains
blocks [low, high) of the node. Block `low` of the node is block `offset` of the range."""


def begin_write(lease: Lease, tier: Tier, first: int, slots: Slots) -> None:
    """Mark blocks [first, first + len(slots)) of the path as WRITING in reserved slots of a tier."""
    if slots.tier != tier.name:
        raise ArgumentError(f"blocks of {tier.name} cannot be in slots of {slots.tier}")
    parts = path_parts(lease, first, len(slots))
    for node, low, high, _ in parts:
        held = node.held[tier.number]
        if held is not None and held.states.count(ABSENT, low, high) != high - low:
            raise StateError(f"{tier.name} already holds some of the blocks [{node.start + low}, {node.start + high})")
    for node, low, high, at in parts:
        tier.put(node, low, Slots(slots.tier, slots.ids[at : at + high - low].copy()), WRITING)


def end_write(tree: RadixTree, lease: Lease, tier: Tier, first: int, count: int, *, ok: bool) -> None:
    """Mark WRITING blocks as READY if `ok` is True. Otherwise remove the blocks from the tier."""
    parts = _change(lease, tier, first, count, WRITTEN if ok else _STILL_WRITING, "are not WRITING")
    for node, low, high, _ in parts:
        if ok:
            tree.notify_stored(tier, node, low, high)
        else:
            tree.remove(tier, node, low, high)


def begin_read(lease: Lease, tier: Tier, first: int, count: int) -> I32:
    """Add a reader to blocks in a tier, so that their slots are not reused before `end_read`. Return these slots."""
    return _slots(_change(lease, tier, first, count, READ_MORE, _NOT_READABLE), tier)


def end_read(lease: Lease, tier: Tier, first: int, count: int) -> None:
    _change(lease, tier, first, count, READ_FEWER, "have no reader")


def _change(lease: Lease, tier: Tier, first: int, count: int, table: bytes, problem: str) -> Parts:
    """Replace the states of blocks by their entries in `table`. If an entry is 0, raise and change nothing."""
    parts, changes = path_parts(lease, first, count), []
    for node, low, high, _ in parts:
        held = node.held[tier.number]
        if held is None:
            raise StateError(f"{tier.name} holds none of the blocks [{node.start}, {node.stop})")
        before = held.states[low:high]
        after = before.translate(table)
        if 0 in after:
            blocks = f"[{node.start + low}, {node.start + high})"
            raise StateError(f"blocks {blocks} of {tier.name} {problem}; states: {before.hex(' ')}")
        changes.append((held.states, low, high, after))
    for states, low, high, after in changes:
        states[low:high] = after
    return parts


def path_parts(lease: Lease, first: int, count: int) -> Parts:
    """Return the nodes that contain blocks [first, first + count) of the path."""
    if lease.closed:  # checked here to save a call: this function runs 16 times per request
        lease.must_be_open()
    stop = first + count
    if first < 0 or count < 0 or stop > lease.num_blocks:
        raise RangeError(f"blocks [{first}, {stop}) are not in a path of {lease.num_blocks} blocks")
    if lease.node.start <= first < stop:  # usually, one node contains all blocks
        return [(lease.node, first - lease.node.start, stop - lease.node.start, 0)]
    node: Node | None = lease.node
    parts: Parts = []
    while node is not None and first < stop:
        start = node.start
        if start < stop:
            low = first if first > start else start
            parts.append((node, low - start, stop - start, low - first))
            stop = low
        node = node.parent
    return parts


def block_states(lease: Lease, tier: Tier, first: int, stop: int) -> bytes:
    """Return the states of blocks [first, stop) of the path in a tier, one byte per block."""
    parts = []
    for node, low, high, _ in path_parts(lease, first, stop - first):
        held = node.held[tier.number]
        parts.append(held.states[low:high] if held is not None else bytes(high - low))
    return b"".join(parts[::-1])


def block_slots(lease: Lease, tier: Tier, first: int, stop: int) -> I32:
    """Return the slots of blocks [first, stop) of the path in a tier, with NO_SLOT for absent blocks."""
    return _slots(path_parts(lease, first, stop - first), tier)


def _slots(parts: Parts, tier: Tier) -> I32:
    slots = []
    for node, low, high, _ in parts:
        held = node.held[tier.number]
        slots.append(held.slots[low:high] if held is not None else np.full(high - low, NO_SLOT, np.int32))
    return slots[0] if len(slots) == 1 else np.concatenate(slots[::-1]) if slots else np.empty(0, np.int32)
