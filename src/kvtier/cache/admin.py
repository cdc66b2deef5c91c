"""CacheAdmin: what an operator asks of a cache, on the deciding side. Nothing here moves bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.cache.manager import CacheManager
from kvtier.cache.writeback import WritebackJob
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, Tier
from kvtier.index.node import Node, descendants, upwards
from kvtier.index.tree_edit import common_blocks
from kvtier.messages import KEY_BYTES


class CacheAdmin:
    """Operations on whole prompts and whole tiers. For the manager's thread, between two steps."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager

    def tier(self, name: str) -> Tier:
        """A memory tier by name."""
        for tier in self._manager.tree.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self._manager.tree.tiers)
        raise ArgumentError(f"no tier {name!r} in memory; there are {known}")

    def save(self, chain: Chain) -> None:
        """Have what is cached of a prompt, and of what follows it, copied to the tiers below, whatever their policy."""
        manager = self._manager
        end = self._end(chain)
        leaves = (
            [node for node in descendants(end.node) if not node.children] if end is not None and end.is_whole else []
        )
        for each in (chain, *(Chain.of_node(manager.namespace, node) for node in leaves)):
            for queue in manager.queues:
                queue.put(WritebackJob(each, 0, each.num_blocks, always=True))

    def save_all(self) -> None:
        """The same for everything that is in memory, for before the process ends."""
        tree = self._manager.tree
        for node in [node for node in tree.nodes() if not node.children]:
            self.save(Chain.of_node(tree.namespace, node))

    def plan_saves(self, now: float) -> bool:
        """Plan what is to be saved, also where the policy would wait; whether there is more to plan."""
        for queue in self._manager.queues:
            queue.plan(now, all_of_them=True)
        return any(self._manager.queues)

    def demote(self, chain: Chain) -> int:
        """Free the device's slots of a prompt where the host has its blocks; returns how many."""
        manager = self._manager
        return manager.tree.demote(manager.tree.tiers[0], chain) if manager.host is not None else 0

    def drop(self, chain: Chain) -> int:
        """Forget a prompt's full blocks, but those that other prompts share, and all that follows; returns how many.

            system ─┬─ [ this prompt ]── answers ..      gone
                    └─ other prompts                     stays, and so does what they share

        In every tier. Of a store only what memory knows to follow, or to share, can be named; what else is there is
        right, and found only when the prompt has been computed again.
        """
        manager = self._manager
        end = self._end(chain)
        first = _first_unshared(end) if end is not None else 0
        below = _keys_after(end) if end is not None and end.is_whole else b""
        for store in manager.stores.values():
            store.drop(chain.keys()[first * KEY_BYTES :] + below)
        return manager.tree.drop(chain, first=first) if end is not None else 0

    def clear_stores(self) -> None:
        """Have every store forget all of this cache."""
        for store in self._manager.stores.values():
            store.clear()

    def set_quota(self, tier: str, salt: bytes, num_blocks: int | None) -> None:
        """At most so many slots of a tier for one tenant's salt; None: no limit."""
        self.tier(tier).set_quota(salt, num_blocks, self._manager.tree.nodes())

    def vacate(self, tier: str, first_slot: int = 0) -> None:
        """Nothing stays in these slots of a tier. Nobody may run, nothing may be under way."""
        self._must_be_still()
        held = {node: None for lease in self._manager.leases for node in upwards(lease.node) if not node.attached}
        self._manager.tree.vacate(self.tier(tier), first_slot, held)

    def resize(self, tier: str, num_blocks: int) -> None:
        """Another number of slots; what lies beyond is lost. Nobody may run, nothing may be under way."""
        if num_blocks < 1:
            raise RangeError(f"a tier needs at least one block, got {num_blocks} for {tier}")
        self.vacate(tier, num_blocks)
        self.tier(tier).pool.resize(num_blocks)

    def _must_be_still(self) -> None:
        manager = self._manager
        if manager.transfers.in_flight or manager.stats.num_allocations:
            raise StateError(
                f"{manager.stats.num_allocations} requests hold blocks or transfers are under way: pause and wait first"
            )

    def _end(self, chain: Chain) -> _End | None:
        """How far memory has a chain, be it readable or not."""
        tree = self._manager.tree
        node, block, stop = tree.roots.get((chain.salt, chain.adapter)), 0, chain.num_blocks
        if node is None or not stop or chain.namespace != tree.namespace:
            return None
        while block < stop and (child := node.children.get(chain.key_at(block))) is not None:
            node = child
            block += common_blocks(child, chain, block, stop)
            if block < child.stop:
                break
        is_alone = block == node.stop and node.parent is not None and not node.children
        return _End(node, block, is_whole=block == stop, is_alone=is_alone)


@dataclass(frozen=True, slots=True)
class _End:
    """Where a chain ends in memory, or leaves it."""

    node: Node
    """Its last block there is of this node."""
    num_blocks: int
    is_whole: bool
    """Whether all of the chain is there: what is below follows it."""
    is_alone: bool
    """Whether nothing else goes on from there."""


def _first_unshared(end: _End) -> int:
    """The first block of a chain that no other chain in memory goes through."""
    node = end.node
    if not (end.is_whole or end.is_alone):
        return end.num_blocks
    while node.parent is not None and node.parent.parent is not None and len(node.parent.children) == 1:
        node = node.parent
    return node.start


def _keys_after(end: _End) -> bytes:
    """Of all blocks that follow a chain."""
    rest = end.node.keys[(end.num_blocks - end.node.start) * KEY_BYTES :]
    return rest + b"".join(each.keys for each in descendants(end.node))
