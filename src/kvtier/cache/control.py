"""CacheControl: what an operator asks of a cache, on the deciding side. Nothing here moves bytes."""

from __future__ import annotations

from kvtier.cache.manager import CacheManager
from kvtier.cache.plan import KEY_BYTES
from kvtier.cache.saving import SaveJob
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, Tier
from kvtier.index.node import Node


class CacheControl:
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
        leaves = [node for node in _below(self._node(chain)) if not node.children]
        for each in (chain, *(Chain.of_node(manager.namespace, node) for node in leaves)):
            for copies in (manager.host, *manager.stores.values()):
                if copies is not None:
                    copies.queue.put(SaveJob(each, 0, each.num_blocks))

    def save_all(self) -> None:
        """The same for everything that is in memory, for before the process ends."""
        tree = self._manager.tree
        for node in [node for node in tree.nodes() if not node.children]:
            self.save(Chain.of_node(tree.namespace, node))

    def plan_saves(self, now: float) -> bool:
        """Plan what is to be saved, also where the policy would wait; whether there is more to plan."""
        manager = self._manager
        left = False
        for copies in (manager.host, *manager.stores.values()):
            if copies is not None:
                copies.plan_saves(now, all_of_them=True)
                left = left or bool(copies.queue)
        return left

    def demote(self, chain: Chain) -> int:
        """Free the device's slots of a prompt where the host has its blocks; returns how many."""
        manager = self._manager
        return manager.tree.demote(manager.tree.tiers[0], chain) if manager.host is not None else 0

    def drop(self, chain: Chain) -> int:
        """Forget a prompt's full blocks, but those that other prompts share, and all that follows; returns how many.

            system ─┬─ [ this prompt ]── answers ..      gone
                    └─ other prompts                     stays, and so does what they share

        In every tier. Of a store only what memory knows to follow can be named; what else is there is right, and found
        only when the prompt has been computed again.
        """
        manager = self._manager
        node = self._node(chain)
        below = [each.keys[: each.num_blocks * KEY_BYTES] for each in _below(node)]
        while node.parent is not None and node.parent.parent is not None and len(node.parent.children) == 1:
            node = node.parent
        first = node.start
        for store in manager.stores.values():
            store.drop(chain.keys()[first * KEY_BYTES :] + b"".join(below))
        return manager.tree.drop(chain, first=first)

    def clear_stores(self) -> None:
        """Have every store forget all of this cache."""
        for store in self._manager.stores.values():
            store.drop()

    def set_quota(self, tier: str, salt: bytes, num_blocks: int | None) -> None:
        """At most so many slots of a tier for one tenant's salt; None: no limit."""
        self._manager.tree.set_quota(self.tier(tier), salt, num_blocks)

    def vacate(self, tier: str, first_slot: int = 0) -> None:
        """Nothing stays in these slots of a tier. Nobody may run, nothing may be under way."""
        self._must_be_still()
        self._manager.tree.vacate(self.tier(tier), first_slot)

    def resize(self, tier: str, num_blocks: int) -> None:
        """Another number of slots; what lies beyond is lost. Nobody may run, nothing may be under way."""
        if num_blocks < 1:
            raise RangeError(f"a tier needs at least one block, got {num_blocks} for {tier}")
        self.vacate(tier, num_blocks)
        self.tier(tier).pool.resize(num_blocks)

    def _must_be_still(self) -> None:
        manager = self._manager
        if manager.moves.in_flight or manager.stats.num_holds:
            raise StateError(
                f"{manager.stats.num_holds} requests hold blocks or transfers are under way: pause and wait first"
            )

    def _node(self, chain: Chain) -> Node:
        lease = self._manager.tree.match(chain)
        self._manager.tree.release(lease, used=False)
        return lease.node


def _below(node: Node) -> list[Node]:
    """All nodes under a node, parents first."""
    nodes = list(node.children.values())
    for each in nodes:
        nodes.extend(each.children.values())
    return nodes
