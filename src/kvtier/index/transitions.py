"""State transitions of blocks that are transferred between tiers.

A transfer holds a lease on its path until its result is applied, so WRITING and READING blocks are never evicted. The
tree may split nodes of the path during a transfer. Blocks are therefore numbered from the start of the path, and not
within nodes.
"""

from __future__ import annotations

import numpy as np

from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index.lease import Lease
from kvtier.index.node import (
    ABSENT,
    MAX_STATE,
    NO_SLOT,
    READ_FEWER,
    READ_MORE,
    READABLE,
    READY,
    WRITING,
    Node,
    Residency,
)
from kvtier.index.pool import Slots
from kvtier.index.tier import Tier
from kvtier.index.tree import RadixTree
from kvtier.messages import I32

_ONE_READY = bytes((READY,))
_IS_READ = bytes(int(value > READY) for value in range(256))


def begin_write(lease: Lease, tier: Tier, first: int, slots: Slots) -> None:
    """Mark blocks [first, first + len(slots)) of the path as WRITING in reserved slots of a tier."""
    if slots.tier != tier.name:
        raise ArgumentError(f"blocks of {tier.name} cannot be in slots of {slots.tier}")
    parts = path_parts(lease, first, len(slots))
    for node, low, high, _ in parts:
        held = node.held[tier.number]
        if held is not None and held.states.count(ABSENT, low, high) != high - low:
            raise StateError(f"{tier.name} already holds some of blocks [{node.start + low}, {node.start + high})")
    for node, low, high, at in parts:
        tier.put(node, low, Slots(slots.tier, slots.ids[at : at + high - low].copy()), WRITING)


def end_write(tree: RadixTree, lease: Lease, tier: Tier, first: int, count: int, *, ok: bool) -> None:
    """Mark WRITING blocks as READY if `ok` is True. Otherwise remove the blocks from the tier."""
    parts = path_parts(lease, first, count)
    for node, low, high, _ in parts:
        states = _held(node, tier).states[low:high]
        if states.count(WRITING) != high - low:
            raise StateError(
                f"blocks [{node.start + low}, {node.start + high}) of {tier.name} are not WRITING: {states.hex(' ')}"
            )
    for node, low, high, _ in parts:
        if ok:
            _held(node, tier).states[low:high] = _ONE_READY * (high - low)
            tree.notify_stored(tier, node, low, high)
        else:
            tree.remove(tier, node, low, high)


def begin_read(lease: Lease, tier: Tier, first: int, count: int) -> None:
    """Add a reader to blocks in a tier, so that the slots of the blocks are not reused before `end_read`."""
    parts = path_parts(lease, first, count)
    for node, low, high, _ in parts:
        states = _held(node, tier).states[low:high]
        if states.translate(READABLE).find(0) >= 0 or states.find(MAX_STATE) >= 0:
            most = MAX_STATE - READY
            raise StateError(
                f"blocks [{node.start + low}, {node.start + high}) cannot be read from {tier.name} now: "
                f"some blocks are not READY or already have {most} readers: {states.hex(' ')}"
            )
    for node, low, high, _ in parts:
        states = _held(node, tier).states
        states[low:high] = states[low:high].translate(READ_MORE)


def end_read(lease: Lease, tier: Tier, first: int, count: int) -> None:
    parts = path_parts(lease, first, count)
    for node, low, high, _ in parts:
        if _held(node, tier).states[low:high].translate(_IS_READ).find(0) >= 0:
            raise StateError(f"blocks [{node.start + low}, {node.start + high}) of {tier.name} have no reader")
    for node, low, high, _ in parts:
        states = _held(node, tier).states
        states[low:high] = states[low:high].translate(READ_FEWER)


def path_parts(lease: Lease, first: int, count: int) -> list[tuple[Node, int, int, int]]:
    """Return the nodes that contain blocks [first, first + count) of the path, last node first.

    An entry is (node, low, high, offset). Block `low` of the node is block `first + offset` of the path.
    """
    lease.must_be_open()
    stop = first + count
    if first < 0 or count < 0 or stop > lease.num_blocks:
        raise RangeError(f"blocks [{first}, {stop}) are not in a path of {lease.num_blocks} blocks")
    node: Node | None = lease.node
    if node is not None and node.start <= first < stop:  # usually, one node contains all blocks
        return [(node, first - node.start, stop - node.start, 0)]
    parts = []
    while node is not None and node.start + node.num_blocks > first:
        start = node.start
        if start < stop:
            low = max(first, start)
            parts.append((node, low - start, min(stop - start, node.num_blocks), low - first))
        node = node.parent
    return parts


def _held(node: Node, tier: Tier) -> Residency:
    held = node.held[tier.number]
    if held is None:
        raise StateError(f"{tier.name} holds none of the blocks [{node.start}, {node.stop})")
    return held


def block_states(lease: Lease, tier: Tier, first: int, stop: int) -> bytes:
    """Return the states of blocks [first, stop) of the path in a tier, one byte per block."""
    parts = []
    for node, low, high, _ in path_parts(lease, first, stop - first):
        held = node.held[tier.number]
        parts.append(held.states[low:high] if held is not None else bytes(high - low))
    return b"".join(parts[::-1])


def block_slots(lease: Lease, tier: Tier, first: int, stop: int) -> I32:
    """Return the slots of blocks [first, stop) of the path in a tier, with NO_SLOT for absent blocks."""
    parts = []
    for node, low, high, _ in path_parts(lease, first, stop - first):
        held = node.held[tier.number]
        parts.append(held.slots[low:high] if held is not None else np.full(high - low, NO_SLOT, np.int32))
    return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)
