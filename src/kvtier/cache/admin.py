"""CacheAdmin: operations for the operator of a cache. They change the index and queue transfers."""

from __future__ import annotations

from kvtier.cache.manager import CacheManager
from kvtier.cache.writeback import WritebackJob
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index import Chain, Tier
from kvtier.index.node import Node
from kvtier.index.tree_edit import common_blocks
from kvtier.messages import KEY_BYTES


class CacheAdmin:
    """Operations on whole prompts and whole tiers. Call them in the manager's thread, never during a step."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager

    def tier(self, name: str) -> Tier:
        tiers = {tier.name: tier for tier in self._manager.tree.tiers}
        if name not in tiers:
            raise ArgumentError(f"no tier {name!r} in memory; known: {', '.join(tiers)}")
        return tiers[name]

    def save(self, chain: Chain) -> None:
        """Queue copies of a prompt's blocks to lower tiers, regardless of the write policy.

        If memory has all blocks of the prompt, also queue copies of all continuations of the prompt.
        """
        manager = self._manager
        node, num_blocks = self._find_end(chain)
        below = (node, *node.descendants()) if node is not None and num_blocks == chain.num_blocks else ()
        leaves = [leaf for leaf in below if not leaf.children and leaf.stop > num_blocks]
        for each in (chain, *(Chain.of_node(manager.namespace, leaf) for leaf in leaves)):
            for queue in manager.queues:
                queue.jobs.append(WritebackJob(each, 0, each.num_blocks, always=True))

    def save_all(self) -> None:
        """Queue copies of all blocks in memory to lower tiers, regardless of the write policy."""
        tree = self._manager.tree
        for node in [node for node in tree.nodes() if not node.children]:
            self.save(Chain.of_node(tree.namespace, node))

    def plan_saves(self, now: float) -> bool:
        """Plan queued copies, even if the write policy would wait. Return True if jobs remain in the queues."""
        for queue in self._manager.queues:
            queue.plan(now, flush=True)
        return any(queue.jobs for queue in self._manager.queues)

    def demote(self, chain: Chain) -> int:
        """Free the device slots of a prompt's blocks and, if the whole prompt is cached, of all its continuations.

        A tree node (a run of blocks) keeps its slots if it is leased, if one of its blocks is not readable on the
        host, or if one of its descendants still has device slots. Return the number of freed slots.
        """
        tree = self._manager.tree
        return tree.demote(tree.tiers[0], chain)

    def drop(self, chain: Chain) -> int:
        """Drop a prompt's unshared blocks and their descendants from every tier. Return the number dropped from memory.

            system ─┬─ [ this prompt ]── completions     dropped, except the blocks of `system`
                    └─ other prompts                     kept

        The blocks that this prompt shares with another prompt in memory are kept, if the other prompt branches off
        before the end of this prompt. A store keeps descendants whose keys are not in memory. They cannot match until
        this prompt is computed again.
        """
        manager = self._manager
        node, num_blocks = self._find_end(chain)
        first, below = 0, b""
        if node is not None:
            is_whole = num_blocks == chain.num_blocks
            is_leaf = num_blocks == node.stop and node.parent is not None and not node.children
            first = _first_unshared(node) if is_whole or is_leaf else num_blocks
            below = _keys_after(node, num_blocks) if is_whole else b""
        for store in manager.stores.values():
            store.drop(chain.keys()[first * KEY_BYTES :] + below)
        return manager.tree.drop(chain, first=first) if node is not None else 0

    def clear_stores(self) -> None:
        """Remove all blocks of this cache from every store."""
        for store in self._manager.stores.values():
            store.clear()

    def set_quota(self, tier: str, salt: bytes, num_blocks: int | None) -> None:
        """Limit the number of slots in a tier for one tenant, identified by its salt. None removes the limit."""
        self.tier(tier).set_quota(salt, num_blocks, self._manager.tree.nodes())

    def vacate(self, tier: str, first_slot: int = 0) -> None:
        """Remove all blocks from slots `first_slot` and above. No request or transfer may be in flight."""
        manager = self._manager
        if manager.transfers.in_flight or manager.stats.num_allocations:
            raise StateError(
                f"{manager.stats.num_allocations} requests hold blocks, and {len(manager.transfers.in_flight)} "
                f"transfers are in flight; pause the engine and wait for them first"
            )
        detached = {node: None for lease in manager.leases for node in lease.node.upwards() if not node.attached}
        manager.tree.vacate(self.tier(tier), first_slot, detached)

    def resize(self, tier: str, num_blocks: int) -> None:
        """Change the number of slots in a tier. Drop the blocks in removed slots."""
        if num_blocks < 1:
            raise RangeError(f"a tier needs at least one block, got {num_blocks} for {tier}")
        self.vacate(tier, num_blocks)
        self.tier(tier).pool.resize(num_blocks)

    def _find_end(self, chain: Chain) -> tuple[Node | None, int]:
        """Return the node that contains a chain's last cached block, and the number of cached blocks.

        If the number is 0, the node is a root or None.
        """
        tree = self._manager.tree
        node, block, stop = tree.roots.get((chain.salt, chain.adapter)), 0, chain.num_blocks
        if node is None or not stop or chain.namespace != tree.namespace:
            return None, 0
        while block < stop and (child := node.children.get(chain.key_at(block))) is not None:
            node = child
            block += common_blocks(child, chain, block, stop)
            if block < child.stop:
                break
        return node, block


def _first_unshared(node: Node) -> int:
    """Count the leading blocks of a node's path that other paths share: the blocks above the lowest branching point.

    A branching point at the end of the node, or below the node, does not count.
    """
    while node.parent is not None and node.parent.parent is not None and len(node.parent.children) == 1:
        node = node.parent
    return node.start


def _keys_after(node: Node, num_blocks: int) -> bytes:
    """Return the keys of the blocks after the first `num_blocks` blocks of a node's path, and of all descendants."""
    rest = node.keys[(num_blocks - node.start) * KEY_BYTES :]
    return rest + b"".join(child.keys for child in node.descendants())
