"""Edits of the radix tree: compare, split, join and cut edges; insert, evict and remove blocks.

TreeInserter adds computed blocks. TreeEvictor removes blocks from a tier or from the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtier.index.chain import KEY_BYTES, Chain, Namespace, as_ids, chain_keys
from kvtier.index.events import BlocksRemoved, BlocksStored, Listener
from kvtier.index.lease import Lease
from kvtier.index.misses import MissList, MissReason
from kvtier.index.node import NO_SLOT, READY, AccessStats, BlockState, Node, Residency, upwards
from kvtier.index.pool import I32, Slots
from kvtier.index.tier import Tier

# A leaf its own request keeps extending is copied at each block up to this size; then a new node begins.
GROW_BYTES = 64 * 1024


def common_blocks(node: Node, chain: Chain, block: int, stop: int) -> int:
    """How many leading blocks of a node equal the chain's from `block` on, up to `stop`. Compares the tokens."""
    count = min(node.num_blocks, stop - block)
    width, at = chain.label_bytes, block * chain.label_bytes
    if count == node.num_blocks and chain.labels.startswith(node.labels, at):
        common = count
    else:
        mine = as_ids(memoryview(chain.labels)[at : at + count * width])
        same = mine == as_ids(node.labels[: count * width])
        common = count if same.all() else int(same.argmin()) * 4 // width
    if node.extras or chain.extras:
        extras = node.extras or {}
        common = next((i for i in range(common) if extras.get(block + i) != chain.extras.get(block + i)), common)
    return common


def common_tokens(label: memoryview, tokens: bytes) -> int:
    """How many leading tokens a block's label shares with others."""
    count = min(len(label), len(tokens))
    same = as_ids(label[:count]) == as_ids(tokens[:count])
    return len(same) if same.all() else int(same.argmin())


def split(node: Node, count: int, tiers: Sequence[Tier]) -> Node:
    """Cut a node after `count` blocks; returns the new upper part.

        parent --[ b0 b1 b2 b3 ]-- children          parent --[ b0 b1 ]--[ b2 b3 ]-- children
                      node                                      upper      node

    The lower part stays the same object, so leases that end in it and candidates in it stay what they are.
    """
    parent, at = node.parent, count * node.label_bytes
    assert parent is not None
    upper = Node(
        parent, node.domain, node.key, node.start, count, _own(node.labels[:at]), node.usage.copy(), len(tiers)
    )
    upper.leases, upper.attached = node.leases, node.attached
    upper.keys, node.keys = node.keys[: count * KEY_BYTES], node.keys[count * KEY_BYTES :]
    extras = node.extras
    node.labels, node.start, node.num_blocks = _own(node.labels[at:]), node.start + count, node.num_blocks - count
    if extras:
        upper.extras = {block: extra for block, extra in extras.items() if block < node.start}
        node.extras = {block: extra for block, extra in extras.items() if block >= node.start}
    for number, held in enumerate(node.held):
        if held is not None:
            high, low = held.cut(0, count), held.cut(count, len(held.states))
            upper.held[number] = high if high.num_held else None
            node.held[number] = low if low.num_held else None
    node.parent, node.key = upper, node.key_at(0)
    upper.children[node.key] = node
    if node.attached:
        parent.children[upper.key] = upper
    for tier in tiers:
        number = tier.number
        upper.below[number] = int(node.held[number] is not None or node.below[number] > 0)
        if node.held[number] is None:
            tier.withdraw(node)
            tier.refresh(upper)
    return upper


def absorb_parent(node: Node, tiers: Sequence[Tier]) -> None:
    """Undo a split: the only child takes its parent's blocks in front of its own."""
    upper = node.parent
    assert upper is not None
    assert upper.parent is not None
    node.labels = memoryview(bytes(upper.labels) + bytes(node.labels))
    node.keys = upper.keys + node.keys
    if upper.extras or node.extras:
        node.extras = {**(upper.extras or {}), **(node.extras or {})}
    for tier in tiers:
        high, low = upper.held[tier.number], node.held[tier.number]
        tier.withdraw(upper)
        if high is not None or low is not None:
            high = high or Residency.nothing(upper.num_blocks)
            low = low or Residency.nothing(node.num_blocks)
            node.held[tier.number] = high.joined(low)
    node.usage.uses = max(node.usage.uses, upper.usage.uses)
    node.start, node.num_blocks = upper.start, upper.num_blocks + node.num_blocks
    node.parent, node.key = upper.parent, upper.key
    node.parent.children[node.key] = node
    for tier in tiers:
        tier.refresh(node)


def were_one(upper: Node, node: Node, priority: int, expires: float) -> bool:
    """Whether two nodes of one path may become one by a use with that retention: no policy could tell the difference.

    The use has reached the lower one already. That is the upper's only child, unless it has left the tree.
    """
    mine, above = node.usage, upper.usage
    return (
        upper.parent is not None
        and node.attached
        and above.created == mine.created
        and max(above.priority, priority) == mine.priority
        and max(above.expires, expires) == mine.expires
    )


def can_grow(node: Node, usage: AccessStats) -> bool:
    """A leaf that is its lease's alone, kept no longer than what is added, short enough to copy."""
    return (
        node.leases == 1
        and node.usage.priority <= usage.priority
        and node.usage.expires <= usage.expires
        and not node.children
        and node.attached
        and len(node.labels) < GROW_BYTES
        and node.held[0] is not None
    )


def lengthen(node: Node, labels: memoryview, keys: bytes, extras: dict[int, bytes] | None, slots: I32) -> None:
    """More blocks at the end of a leaf, on the device only."""
    new = Residency(slots, bytearray((BlockState.READY,)) * len(slots))
    for number, held in enumerate(node.held):
        if held is not None:
            node.held[number] = held.joined(Residency.nothing(len(slots)) if number else new)
    node.num_blocks += len(slots)
    node.labels = memoryview(bytes(node.labels) + bytes(labels))
    node.keys += keys
    if extras:
        node.extras = {**(node.extras or {}), **extras}


def truncate(node: Node, count: int) -> None:
    """Keep the first `count` blocks; the tiers have cut theirs (Tier.take)."""
    at = count * node.label_bytes
    node.labels = node.labels[:at]
    if 2 * at < memoryview(node.labels.obj).nbytes:
        node.labels = _own(node.labels)  # do not keep a long string alive for a short view of it
    node.keys = node.keys[: count * KEY_BYTES]
    node.num_blocks = count
    if node.extras:
        node.extras = {block: extra for block, extra in node.extras.items() if block < node.stop}


def _own(labels: memoryview) -> memoryview:
    return memoryview(bytes(labels))


class TreeInserter:
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

    def grow(self, lease: Lease, node: Node, block: int, stop: int, usage: AccessStats) -> Node:
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

    def graft(self, lease: Lease, node: Node, tier: Tier, slots: Slots, usage: AccessStats) -> Node:
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

    def _add(self, chain: Chain, node: Node, block: int, stop: int, usage: AccessStats) -> Node:
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


Mask = np.ndarray[Any, np.dtype[np.bool_]]
_NO_SLOTS = np.empty(0, np.int32)


class TreeEvictor:
    """Shares the tree's tiers, roots and list of misses. `time` is the tree's logical clock."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        roots: dict[tuple[bytes, bytes], Node],
        misses: MissList,
        listener: Listener | None,
    ) -> None:
        self._tiers = tiers
        self._roots = roots
        self._misses = misses
        self._listener = listener

    def evict(self, tier: Tier, n: int, salt: bytes | None, time: int) -> list[I32]:
        """Take n blocks, each time from the end of the victim; the caller knows that there are as many.

            victim   [ b0 b1 b2 b3 b4 ]   n = 2   ->   [ b0 b1 b2 ]      b3 and b4 are free, b0..b2 stay matchable

        The slots are the caller's: the pool still counts them as used.
        """
        freed: list[I32] = []
        tier.num_evicted += n
        while n > 0:
            node = tier.victim(salt)
            held = node.held[tier.number]
            assert held is not None
            count = held.num_held if held.num_held < n else n
            n -= count
            if self._is_only_in(tier, node):
                freed.append(self.cut(node, node.num_blocks - count, tier, time))
            else:
                freed.append(self._take_last(tier, node, held, count, time))
        return freed

    def _take_last(self, tier: Tier, node: Node, held: Residency, count: int, time: int) -> I32:
        """The last blocks that a tier holds of a node, which others may hold too; what none holds then is cut off."""
        if held.num_held == len(held.states):
            first = len(held.states) - count
        else:
            first = int(np.flatnonzero(np.frombuffer(held.states, np.uint8))[-count])
        if self._listener:
            self._removed(tier, node, first)
        taken = tier.take(node, first).ids
        tier.use(node.domain[0], -count)
        kept = node.num_kept()
        if kept < node.num_blocks:
            self.cut(node, kept, tier, time)
        return taken

    def demote(self, tier: Tier, node: Node, time: int, *, below: bool) -> list[I32]:
        """Take from a tier what another can be read for: of all below a node, if told so, then from it upwards.

        As far as nobody holds it, nor a block below it that stays.
        """
        nodes = list(node.children.values()) if below else []
        for each in nodes:  # parents before children; it grows as it goes
            nodes.extend(each.children.values())
        freed: list[I32] = []
        for each in (*reversed(nodes), *upwards(node)):
            held = each.held[tier.number]
            if held is None or each.leases or each.below[tier.number]:
                continue
            others = [other for other in each.held if other is not None and other is not held]
            if any(min(other.states) >= BlockState.READY for other in others):
                freed.append(self._take_last(tier, each, held, held.num_held, time))
        return freed

    def vacate(self, tier: Tier, nodes: Sequence[Node], first_slot: int, time: int) -> None:
        """Take every block out of slots [first_slot, ..) of a tier, leased or not: nobody may be using it."""
        for node in nodes:
            held = node.held[tier.number]
            if held is not None:
                self._take_where(tier, node, held.slots >= first_slot, time)

    def lose(self, tier: Tier, nodes: Sequence[Node], slots: I32, time: int) -> int:
        """Take the blocks in these slots out of a tier, as far as they are ready and nobody reads them there."""
        num_lost = 0
        for node in nodes:
            held = node.held[tier.number]
            if held is not None:
                wanted = np.isin(held.slots, slots) & (np.frombuffer(bytes(held.states), np.uint8) == READY)
                num_lost += int(wanted.sum())
                self._take_where(tier, node, wanted, time)
        return num_lost

    def _take_where(self, tier: Tier, node: Node, wanted: Mask, time: int) -> None:
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).tolist()
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            self.lost(tier, node, first, stop)
        if edges and not node.leases and node.attached:
            self.forget(node, time)

    def _is_only_in(self, tier: Tier, node: Node) -> bool:
        return node.held[tier.number] is not None and node.held.count(None) == len(node.held) - 1

    def cut(self, node: Node, kept: int, evicting: Tier, time: int) -> I32:
        """Blocks [kept, ..) of a node, and all below it, leave the tree: the first of them is in no tier, or is to go.

        Returns the slots the evicting tier held; those of other tiers go back to their pools.
        """
        self._misses.left(node, kept, MissReason.EVICTED, time, evicting.policy_name)
        return self._drop_tail(node, kept, evicting, time)

    def _drop_tail(self, node: Node, kept: int, evicting: Tier | None, time: int) -> I32:
        if node.children:
            for child in list(node.children.values()):
                self.detach(child, MissReason.EVICTED, time)
        taken = _NO_SLOTS
        for tier in self._tiers:
            if node.held[tier.number] is not None:
                if self._listener:
                    self._removed(tier, node, kept)
                slots = tier.take(node, kept, cut=True)
                if tier is evicting:
                    taken = slots.ids
                    tier.use(node.domain[0], -len(taken))
                else:
                    self.give_back(tier, slots, node.domain[0])
        if kept:
            truncate(node, kept)
        else:
            self._unlink(node)
        return taken

    def forget(self, node: Node, time: int) -> None:
        """As `cut`, for a node whose last lease ended, if it lost blocks in every tier meanwhile."""
        kept = node.num_kept()
        if kept < node.num_blocks:
            self._misses.left(node, kept, MissReason.EVICTED, time)
            self._drop_tail(node, kept, None, time)

    def lost(self, tier: Tier, node: Node, first: int, stop: int) -> None:
        """Blocks [first, stop) of a leased node leave a tier, and nothing else changes yet."""
        if node.attached:
            self._removed(tier, node, first, stop)
        self.give_back(tier, tier.take(node, first, stop), node.domain[0])

    def detach(self, node: Node, reason: MissReason, time: int) -> int:
        """Take a node and all below it out of the tree. What no lease covers is freed now, the rest with its lease."""
        self._misses.left(node, 0, reason, time)
        for tier in self._tiers:
            tier.unlinked(node)
        self._unlink(node)
        waiting, num_blocks = [node], 0
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            num_blocks += node.num_blocks
            for tier in self._tiers:
                self._removed(tier, node, 0)
                tier.detached(node)
            node.attached = False
            if node.leases == 0:
                self.empty(node)
        return num_blocks

    def drop(self, chain: Chain, first: int, time: int) -> int:
        """Take blocks [first, ..) of a chain and all below them out of the tree; returns how many."""
        node, block = self._roots.get((chain.salt, chain.adapter)), 0
        while node is not None and block < chain.num_blocks:
            node = node.children.get(chain.key_at(block))
            if node is None:
                return 0
            stop = block + common_blocks(node, chain, block, chain.num_blocks)
            if stop > first:
                if node.start < first:
                    split(node, first - node.start, self._tiers)
                return self.detach(node, MissReason.DROPPED, time)
            if stop < node.stop:
                return 0
            block = stop
        return 0

    def _unlink(self, node: Node) -> None:
        above = node.parent
        assert above is not None
        del above.children[node.key]
        if above.parent is None:
            self._misses.head_went(node)
            if not above.children and not above.leases:
                self._roots.pop(above.domain, None)

    def empty(self, node: Node) -> None:
        """Free what a detached node holds."""
        for tier in self._tiers:
            held = node.held[tier.number]
            if held is not None:
                node.held[tier.number] = None
                self.give_back(tier, Slots(tier.name, held.slots[held.slots != NO_SLOT]), node.domain[0])

    def give_back(self, tier: Tier, slots: Slots, salt: bytes) -> None:
        """Slots nobody holds any more, to their pool."""
        tier.pool.release(slots)
        tier.use(salt, -len(slots.ids))

    def _removed(self, tier: Tier, node: Node, first: int, stop: int | None = None) -> None:
        """Tell the listener, of blocks it was told of: not of those that were still being written."""
        held = node.held[tier.number]
        if self._listener and held is not None:
            known = np.frombuffer(bytes(held.states[first:stop]), np.uint8) > BlockState.WRITING
            keys = np.frombuffer(node.keys, f"V{KEY_BYTES}")[first:stop][known].tobytes()
            if keys:
                self._listener(BlocksRemoved(tier.name, keys))
