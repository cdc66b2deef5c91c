"""The tree's side of moving blocks between tiers: who is written, who is read, who is gone.

Every move holds a lease on the path it moves, from its plan to its report: so blocks in WRITING, READING or DROPPING
are never evicted, and a path may be split while a move is under way. Blocks are numbered along the lease's path.
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
    BlockState,
    Node,
    Residency,
)
from kvtier.index.pool import I32, Slots
from kvtier.index.tier import Tier
from kvtier.index.tree import RadixTree

_ONE_READY = bytes((READY,))
_IS_READ = bytes(int(value > READY) for value in range(256))


def begin_write(lease: Lease, tier: Tier, first: int, slots: Slots) -> None:
    """Blocks [first, first + len(slots)) of the path are being written to the tier, into slots reserved there."""
    if slots.tier != tier.name:
        raise ArgumentError(f"blocks of {tier.name} cannot be in slots of {slots.tier}")
    parts = _parts(lease, first, len(slots))
    for node, low, high, _ in parts:
        held = node.held[tier.number]
        if held is not None and held.states.count(ABSENT, low, high) != high - low:
            raise StateError(f"{tier.name} already holds some of blocks [{node.start + low}, {node.start + high})")
    for node, low, high, at in parts:
        tier.put(node, low, Slots(slots.tier, slots.ids[at : at + high - low].copy()), BlockState.WRITING)


def end_write(tree: RadixTree, lease: Lease, tier: Tier, first: int, count: int, *, ok: bool) -> None:
    """They are there and may be read; or the copy failed, and they are not."""
    parts = _parts(lease, first, count)
    for node, low, high, _ in parts:
        _must_be(node, tier, low, high, WRITING)
    for node, low, high, _ in parts:
        if ok:
            _held(node, tier).states[low:high] = _ONE_READY * (high - low)
            tree.stored(tier, node, low, high)
        else:
            tree.lost(tier, node, low, high)


def begin_read(lease: Lease, tier: Tier, first: int, count: int) -> None:
    """Blocks of the path are being read from the tier: their slots stay what they are until `end_read`."""
    parts = _parts(lease, first, count)
    for node, low, high, _ in parts:
        states = _held(node, tier).states[low:high]
        if states.translate(READABLE).find(0) >= 0 or states.find(MAX_STATE) >= 0:
            most = MAX_STATE - READY
            raise StateError(
                f"blocks [{node.start + low}, {node.start + high}) cannot be read from {tier.name} now: "
                f"some are not ready, or have {most} readers: {states.hex(' ')}"
            )
    for node, low, high, _ in parts:
        states = _held(node, tier).states
        states[low:high] = states[low:high].translate(READ_MORE)


def end_read(lease: Lease, tier: Tier, first: int, count: int) -> None:
    """One reader of these blocks is done."""
    parts = _parts(lease, first, count)
    for node, low, high, _ in parts:
        if _held(node, tier).states[low:high].translate(_IS_READ).find(0) >= 0:
            raise StateError(f"blocks [{node.start + low}, {node.start + high}) of {tier.name} have no reader")
    for node, low, high, _ in parts:
        states = _held(node, tier).states
        states[low:high] = states[low:high].translate(READ_FEWER)


def begin_drop(lease: Lease, tier: Tier, first: int, count: int) -> None:
    """Blocks of the path are to leave the tier: not readable there from now on."""
    parts = _parts(lease, first, count)
    for node, low, high, _ in parts:
        _must_be(node, tier, low, high, BlockState.READY)
    for node, low, high, _ in parts:
        _held(node, tier).states[low:high] = bytes((BlockState.DROPPING,)) * (high - low)


def end_drop(tree: RadixTree, lease: Lease, tier: Tier, first: int, count: int) -> None:
    """They are gone; their slots are free."""
    parts = _parts(lease, first, count)
    for node, low, high, _ in parts:
        _must_be(node, tier, low, high, BlockState.DROPPING)
    for node, low, high, _ in parts:
        tree.lost(tier, node, low, high)


def _parts(lease: Lease, first: int, count: int) -> list[tuple[Node, int, int, int]]:
    """The nodes of blocks [first, first + count), the last first, with the range inside each and where that begins in
    the count."""
    lease.must_be_open()
    stop = first + count
    if first < 0 or count < 0 or stop > lease.num_blocks:
        raise RangeError(f"blocks [{first}, {stop}) of a path of {lease.num_blocks}")
    node: Node | None = lease.node
    if node is not None and node.start <= first < stop:  # mostly it is what one request has brought
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
        raise StateError(f"{tier.name} holds nothing of blocks [{node.start}, {node.stop})")
    return held


def _must_be(node: Node, tier: Tier, low: int, high: int, state: int) -> None:
    states = _held(node, tier).states
    if states.count(state, low, high) != high - low:
        found = states[low:high].hex(" ")
        raise StateError(
            f"blocks [{node.start + low}, {node.start + high}) of {tier.name} are not {BlockState(state).name}: {found}"
        )


def block_states(lease: Lease, tier: Tier, first: int, stop: int) -> bytes:
    """The state of blocks [first, stop) of the path in a tier, one byte each."""
    found = []
    for node, low, high, _ in _parts(lease, first, stop - first):
        held = node.held[tier.number]
        found.append(held.states[low:high] if held is not None else bytes(high - low))
    return b"".join(found[::-1])


def block_slots(lease: Lease, tier: Tier, first: int, stop: int) -> I32:
    """The slot of blocks [first, stop) of the path in a tier, NO_SLOT where it holds none."""
    found = []
    for node, low, high, _ in _parts(lease, first, stop - first):
        held = node.held[tier.number]
        found.append(held.slots[low:high] if held is not None else np.full(high - low, NO_SLOT, np.int32))
    return found[0] if len(found) == 1 else np.concatenate(found[::-1]) if found else np.empty(0, np.int32)
