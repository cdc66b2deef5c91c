"""check_tree: verifies the invariants of a tree and its pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from kvtier.errors import StateError
from kvtier.index.lease import Lease
from kvtier.index.node import IS_HELD, NO_SLOT, BlockState, Node
from kvtier.index.tier import Tier, tenant_of
from kvtier.index.tree import RadixTree


def check_tree(tree: RadixTree, leases: Iterable[Lease] | None = None) -> None:
    """Raise StateError if an invariant is violated. Pass all open leases to check the lease counts too."""
    nodes = list(tree.nodes())
    for node in nodes:
        _check_shape(node, tree.namespace.block_tokens * 4, tree.with_keys)
        for tier in tree.tiers:
            _check_held(node, tier)
        num_held = node.num_leading(IS_HELD)
        if not node.leases and num_held < node.num_blocks:
            _fail(node, f"only {num_held} of {node.num_blocks} blocks are in a tier, although no lease holds the node")
    for domain, root in tree.roots.items():
        if not root.children and not root.leases:
            raise StateError(f"the root of {domain} has neither children nor leases")
        if any(root.below[tier.number] != _below(root, tier) for tier in tree.tiers):
            raise StateError(f"the root of {domain} has a wrong count of children with blocks: {root.below}")
    for tier in tree.tiers:
        tier.pool.check()
        _check_tier(tier, nodes)
    if tree.tracker is not None:
        tree.tracker.check(nodes)
    if leases is not None:
        _check_leases(tree, nodes, list(leases))


def _check_shape(node: Node, label_bytes: int, with_keys: bool) -> None:
    above = node.parent
    if above is None or above.children.get(node.key) is not node or not node.attached:
        _fail(node, "the node is not a child of its parent")
    if node.start != above.stop or node.num_blocks < 1:
        _fail(node, f"the node has {node.num_blocks} blocks from {node.start} on, but its parent ends at {above.stop}")
    if len(node.labels) != node.num_blocks * label_bytes or node.key != node.key_at(0):
        _fail(node, f"{len(node.labels)} bytes of labels for {node.num_blocks} blocks, or a wrong key")
    if len(node.keys) != (node.num_blocks * 32 if with_keys else 0):
        _fail(node, f"{len(node.keys)} bytes of keys for {node.num_blocks} blocks")
    if node.extras and not all(node.start <= block < node.stop for block in node.extras):
        _fail(node, f"extras for blocks {sorted(node.extras)}, which are not all in the node")
    if node.leases < sum(child.leases for child in node.children.values()):
        _fail(node, f"the node has {node.leases} leases, but its children have more")
    if node.domain != above.domain:
        _fail(node, "the node and its parent have different salts or adapters")


def _check_held(node: Node, tier: Tier) -> None:
    held, number = node.held[tier.number], tier.number
    if node.below[number] != _below(node, tier):
        _fail(node, f"{node.below[number]} children counted with blocks in {tier.name}, but {_below(node, tier)} exist")
    is_candidate = not node.leases and held is not None and not node.below[number]
    tenant = tier.tenants.get(tenant_of(node.domain[0]), tier.everyone)
    if any((node in candidates) != is_candidate for candidates in (tier.everyone, tenant)):
        _fail(node, f"candidate for eviction from {tier.name}: {not is_candidate}, but should be {is_candidate}")
    _check_duplicate(node, tier)
    if held is None:
        return
    states = np.frombuffer(bytes(held.states), np.uint8)
    if len(held.slots) != node.num_blocks or len(states) != node.num_blocks:
        _fail(node, f"{tier.name} has {len(held.slots)} slots and {len(states)} states for {node.num_blocks} blocks")
    if ((held.slots == NO_SLOT) != (states == BlockState.ABSENT)).any():
        _fail(node, f"{tier.name}: slots {held.slots.tolist()} do not match states {states.tolist()}")
    if held.num_held != np.count_nonzero(states) or not held.num_held:
        _fail(node, f"{tier.name}: {held.num_held} blocks counted, but {np.count_nonzero(states)} held")
    if not node.leases and (states[states != BlockState.ABSENT] != BlockState.READY).any():
        _fail(node, f"{tier.name}: states {states.tolist()}, but without a lease all held blocks must be READY")


def _check_duplicate(node: Node, tier: Tier) -> None:
    """Check whether a node is correctly listed in `duplicates`. Duplicates are blocks that the faster tier also holds.

    A node must not be listed if it is leased, if it is among the next victims of the faster tier, or if this tier or
    the faster tier has none of its blocks. Any other node must be listed if it has duplicates.
    """
    faster = tier.faster
    if faster is None:
        return
    may_be = not node.leases and node.held[tier.number] is not None and node.held[faster.number] is not None
    must_be = may_be and 1 in tier.duplicate_mask(node) and not faster.is_next(node)
    tenant = tier.tenants.get(tenant_of(node.domain[0]), tier.everyone)
    for candidates in (tier.everyone, tenant):
        is_listed = node in candidates.duplicates
        if (must_be and not is_listed) or (is_listed and (not may_be or faster.is_next(node))):
            _fail(node, f"listed with duplicates of {faster.name}: {is_listed}, but should be {not is_listed}")


def _check_tier(tier: Tier, nodes: list[Node]) -> None:
    number = tier.number
    held = [node.held[number] for node in nodes]
    slots = np.concatenate([part.slots[part.slots != NO_SLOT] for part in held if part] or [np.empty(0, np.int32)])
    if len(np.unique(slots)) != len(slots):
        raise StateError(f"{tier.name}: some of the {len(slots)} slots are held twice")
    if np.isin(slots, tier.pool.free_slots()).any():
        raise StateError(f"{tier.name}: a slot that the tree holds is free in the pool")
    for candidates in (tier.everyone, *tier.tenants.values()):
        candidates.check_next()
        if not candidates.duplicates.keys() <= set(nodes):
            raise StateError(f"{tier.name}: a node that left the tree is listed with duplicates")
    evictable = Counter[bytes]()
    for node, part in zip(nodes, held, strict=True):
        if part is not None and not node.leases:
            evictable[tenant_of(node.domain[0])] += part.num_held
    if tier.num_evictable != evictable.total():
        raise StateError(f"{tier.name}: {tier.num_evictable} evictable blocks counted, but {evictable.total()} exist")
    for salt, tenant in tier.tenants.items():
        if tenant.num_blocks != evictable[salt]:
            raise StateError(f"{tier.name}: {salt!r} has {evictable[salt]} evictable blocks, not {tenant.num_blocks}")
    if sum(tier.used_by.values()) != tier.pool.num_used or min(tier.used_by.values(), default=0) < 0:
        raise StateError(f"{tier.name}: tenants use {tier.used_by} slots, but the pool counts {tier.pool.num_used}")


def _check_leases(tree: RadixTree, nodes: list[Node], leases: list[Lease]) -> None:
    if len(leases) != tree.num_leases:
        raise StateError(f"{tree.num_leases} leases counted, but {len(leases)} are open")
    counted = Counter[int]()
    detached: dict[int, Node] = {}
    own = 0
    for lease in leases:
        own += max(0, len(lease.table) - lease.num_blocks) + sum(map(len, lease.duplicate_slots))
        for node in lease.node.upwards():
            counted[id(node)] += 1
            if not node.attached:
                detached[id(node)] = node
        if lease.node.stop != lease.num_blocks:
            raise StateError(f"a lease has {lease.num_blocks} blocks, but its node ends at block {lease.node.stop}")
    for node in nodes:
        if node.leases != counted[id(node)]:
            _fail(node, f"{node.leases} leases counted, but {counted[id(node)]} are open")
    device = tree.tiers[0]
    held = sum(part.num_held for node in [*nodes, *detached.values()] if (part := node.held[0]) is not None)
    if held + own != device.pool.num_used:
        raise StateError(f"{device.name}: {held} slots of nodes and {own} of leases, but {device.pool.num_used} used")


def _below(node: Node, tier: Tier) -> int:
    return sum(child.held[tier.number] is not None or child.below[tier.number] > 0 for child in node.children.values())


def _fail(node: Node, what: str) -> NoReturn:
    raise StateError(f"node of blocks [{node.start}, {node.stop}): {what}")
