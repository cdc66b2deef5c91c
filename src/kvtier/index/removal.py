"""Removal: everything that takes blocks out of the tree or out of a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.index.chain import Chain
from kvtier.index.events import BlocksRemoved, Listener
from kvtier.index.keys import KEY_BYTES
from kvtier.index.misses import MissList, MissReason
from kvtier.index.node import NO_SLOT, READY, BlockState, Held, Node, upwards
from kvtier.index.pool import I32, Slots
from kvtier.index.shape import common_blocks, split, truncate
from kvtier.index.tier import Tier

Mask = np.ndarray[Any, np.dtype[np.bool_]]
_NO_SLOTS = np.empty(0, np.int32)


class Removal:
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

    def _take_last(self, tier: Tier, node: Node, held: Held, count: int, time: int) -> I32:
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
