"""Growth: how computed blocks come into the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.index.chain import Chain
from kvtier.index.events import BlocksStored, Listener
from kvtier.index.keys import KEY_BYTES, Namespace, chain_keys
from kvtier.index.lease import Lease
from kvtier.index.misses import MissList
from kvtier.index.node import BlockState, Node, Usage
from kvtier.index.pool import Slots
from kvtier.index.shape import can_grow, common_blocks, lengthen, split
from kvtier.index.tier import Tier


class Growth:
    """Shares the tree's tiers and list of misses. `hold` puts a lease on a node; `time` is the tree's logical clock."""

    def __init__(
        self,
        namespace: Namespace,
        tiers: Sequence[Tier],
        misses: MissList,
        listener: Listener | None,
        with_keys: bool,
        hold: Callable[[Node | None, Node | None], None],
    ) -> None:
        self.namespace = namespace
        self._tiers = tiers
        self._misses = misses
        self._listener = listener
        self._with_keys = with_keys
        self._hold = hold

    def join(self, lease: Lease, child: Node, block: int, stop: int) -> tuple[Node, bool]:
        """Go down an edge that is there; tell whether it took the lease's slots, because the device held none of it."""
        device = self._tiers[0]
        count = common_blocks(child, lease.chain, block, stop)
        held = child.held[0]
        if held is not None:
            absent = held.states.find(BlockState.ABSENT)
            if absent == 0:
                count = min(count, len(held.states) - len(held.states.lstrip(b"\0")))
            elif absent > 0:
                count = min(count, absent)
        if count < child.num_blocks:
            child = split(child, count, self._tiers)
        self._hold(child, child.parent)
        own = lease.table[block : block + count]
        if child.held[0] is None:
            device.put(child, 0, Slots(device.name, own.copy()), BlockState.READY)
            self.stored(device, child, 0)
            return child, True
        lease.spare.append(own)
        return child, False

    def grow(self, lease: Lease, node: Node, block: int, stop: int, usage: Usage) -> Node:
        """Blocks [block, stop) of the chain are new: at the end of the leaf the lease grew before, or in a new node."""
        device, slots = self._tiers[0], lease.table[block:stop].copy()
        if node is lease.grown and can_grow(node, usage):
            lengthen(node, *self._content(lease.chain, node, block, stop), slots)
            node.usage.expires = usage.expires
            self.stored(device, node, block - node.start)
            return node
        new = self._add(lease.chain, node, block, stop, usage)
        device.put(new, 0, Slots(device.name, slots), BlockState.READY)
        lease.grown = new
        self.stored(device, new, 0)
        return new

    def graft(self, lease: Lease, node: Node, tier: Tier, slots: Slots, usage: Usage) -> Node:
        """The next blocks of the lease's chain, which nobody has, are being written to a tier from outside the tree."""
        new = self._add(lease.chain, node, node.stop, node.stop + len(slots), usage)
        tier.put(new, 0, slots, BlockState.WRITING)
        return new

    def _content(
        self, chain: Chain, node: Node, block: int, stop: int
    ) -> tuple[memoryview, bytes, dict[int, bytes] | None]:
        """Labels, keys and extras of blocks below a node."""
        labels, keys = chain.label_view(block, stop), b""
        if self._with_keys:
            if chain.num_keys >= stop:  # somebody asked a store about them
                keys = b"".join(chain.key_list(block, stop))
            else:  # hashed from the node's own key on: what is above it may be long
                keys = b"".join(chain_keys(self._key_above(node), labels, chain.label_bytes, chain.extras, block))
        extras = {i: extra for i, extra in chain.extras.items() if block <= i < stop} if chain.extras else None
        return labels, keys, extras

    def _add(self, chain: Chain, node: Node, block: int, stop: int, usage: Usage) -> Node:
        """A new node of blocks [block, stop) below another, held by the one lease that brings it."""
        labels, keys, extras = self._content(chain, node, block, stop)
        key = chain.key_at(block)
        new = Node(node, node.domain, key, block, stop - block, labels, usage, len(self._tiers), extras, keys)
        new.leases = 1
        node.children[key] = new
        if node.parent is None:
            self._misses.head_came(new)
        return new

    def _key_above(self, node: Node) -> bytes:
        """The key that blocks below a node continue."""
        return node.keys[-KEY_BYTES:] or self.namespace.root_key(*node.domain)

    def stored(self, tier: Tier, node: Node, first: int, stop: int | None = None) -> None:
        """Blocks [first, stop) of a node can be read from a tier from now on: tell the listener."""
        if self._listener and node.attached:
            assert node.parent is not None
            parent = node.keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else self._key_above(node.parent)
            stop = node.num_blocks if stop is None else stop
            labels = bytes(node.labels[first * node.label_bytes : stop * node.label_bytes])
            keys = node.keys[first * KEY_BYTES : stop * KEY_BYTES]
            is_first = not first and not node.parent.keys
            self._listener(BlocksStored(tier.name, parent, keys, labels, is_first))
