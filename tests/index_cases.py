"""Helpers for the tests of kvtier.index: trees, chains, leases and whole requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.index import (
    BlockPool,
    Chain,
    Lease,
    Namespace,
    Outcome,
    RadixTree,
    Retention,
    Slots,
    Tier,
    make_policy,
    transitions,
)
from kvtier.index.node import NO_SLOT, READY

BLOCK = 4
NAMESPACE = Namespace("model", block_tokens=BLOCK)
UNKNOWN = Outcome()


def tree_of(*sizes: int, policy: str = "lru", **options) -> RadixTree:
    """Return a tree with one tier per size, named device, host and disk. A size is a number of slots."""
    names = ("device", "host", "disk")
    tiers = [Tier(n, BlockPool(names[n], size), lambda: make_policy(policy)) for n, size in enumerate(sizes)]
    return RadixTree(NAMESPACE, tiers, **options)


def tokens_of(blocks: Sequence[int]) -> list[int]:
    """Return the tokens of all blocks. Every token id of a block equals the number of the block."""
    return [block for block in blocks for _ in range(BLOCK)]


def chain_of(*blocks: int, **options) -> Chain:
    return Chain(NAMESPACE, tokens_of(blocks), **options)


def begin(tree: RadixTree, *blocks: int, now: float = 0.0, retention: Retention | None = None, **options) -> Lease:
    """Match a chain and allocate its missing blocks without publishing them."""
    chain = chain_of(*blocks, **options)
    lease = tree.match(chain, now=now, retention=retention or Retention())
    slots = tree.allocate(lease, lease.num_missing(chain.num_tokens))
    assert isinstance(slots, Slots), str(slots)
    return lease


def run(
    tree: RadixTree,
    *blocks: int,
    now: float = 0.0,
    retention: Retention | None = None,
    outcome: Outcome = UNKNOWN,
    **options,
) -> list[int]:
    """Run a request from match to release. Return its block table."""
    lease = begin(tree, *blocks, now=now, retention=retention, **options)
    tree.publish(lease, lease.chain.num_tokens, now=now)
    tree.release(lease, now=now, outcome=outcome)
    return lease.table.tolist()


def matched(tree: RadixTree, *blocks: int, now: float = 0.0, **options) -> int:
    """Return the number of matched blocks. The match does not count as a use of the blocks."""
    lease = tree.match(chain_of(*blocks, **options), now=now)
    tree.release(lease, used=False)
    return lease.num_matched


def copy_down(tree: RadixTree, lease: Lease, number: int, first: int = 0, count: int | None = None) -> list[int]:
    """Copy blocks of a lease from the device to the slower tier `number`. Return the slots of the copies."""
    count = lease.num_blocks - first if count is None else count
    tier = tree.tiers[number]
    slots = tree.reserve(tier, count, lease.chain.salt)
    assert isinstance(slots, Slots), str(slots)
    transitions.begin_write(lease, tier, first, slots)
    transitions.end_write(tree, lease, tier, first, count, ok=True)
    return slots.ids.tolist()


@dataclass(frozen=True)
class Path:
    """For each block of a lease, the number of the fastest tier with a readable copy, and the slot in this tier.

    The number is -1, and the slot is NO_SLOT, if no tier has a readable copy.
    """

    tiers: np.ndarray
    slots: np.ndarray


def path_of(lease: Lease) -> Path:
    """Return the fastest readable copy of each block of a lease."""
    tiers, slots = [np.empty(0, np.int8)], [np.empty(0, np.int32)]
    for node in reversed(list(lease.node.upwards())):
        numbers = np.full(node.num_blocks, -1, np.int8)
        at = np.full(node.num_blocks, NO_SLOT, np.int32)
        for number, held in reversed(list(enumerate(node.held))):
            if held is not None:
                ready = np.frombuffer(held.states, np.uint8) >= READY
                numbers[ready] = number
                at[ready] = held.slots[ready]
        tiers.append(numbers)
        slots.append(at)
    return Path(np.concatenate(tiers), np.concatenate(slots))


def remove(tree: RadixTree, lease: Lease, tier: Tier, first: int, count: int) -> None:
    """Remove blocks of a lease from a tier."""
    for node, low, high, _ in transitions.path_parts(lease, first, count):
        tree.remove(tier, node, low, high)


def slots(tier: str, *ids: int) -> Slots:
    return Slots(tier, np.array(ids, np.int32))
