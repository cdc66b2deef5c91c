"""RadixTree: the index of cached prefixes, with leases on prefixes and eviction of blocks from the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, StateError
from kvtier.index import tree_edit as edit
from kvtier.index.chain import Chain, Namespace
from kvtier.index.events import IndexCleared, Listener, removed_event, stored_event
from kvtier.index.ghost import GhostCache
from kvtier.index.labels import Outcome
from kvtier.index.lease import Lease, Retention
from kvtier.index.misses import Miss, MissList, MissReason
from kvtier.index.native import native
from kvtier.index.node import ABSENT, IS_HELD, NO_SLOT, READABLE, READY, WRITING, AccessStats, Node, Residency
from kvtier.index.pool import Shortage, Slots
from kvtier.index.tier import Tier, tenant_of
from kvtier.index.tracker import ReuseTracker, session_of
from kvtier.messages import I32

Mask = np.ndarray[Any, np.dtype[np.bool_]]
_NO_SLOTS = np.empty(0, np.int32)
_KEEP = Retention()
_UNKNOWN = Outcome()


class RadixTree:
    """A path-compressed tree of token blocks, with one root for each pair of salt and adapter.

    A match compares whole nodes with memcmp. The cost of a use, an eviction or a lease depends on the number of nodes
    and not on the number of blocks. Callers pass the time as `now`. `clock` is a logical time. Not thread-safe.
    """

    def __init__(
        self,
        namespace: Namespace,
        tiers: Sequence[Tier],
        *,
        enabled: bool = True,
        with_keys: bool = False,
        listener: Listener | None = None,
        misses: MissList | None = None,
        ghost: GhostCache | None = None,
        exclusive: bool = False,
    ) -> None:
        """With `exclusive`, slower tiers first evict blocks that the next faster tier also holds (see Tier)."""
        if not tiers or [tier.number for tier in tiers] != list(range(len(tiers))):
            raise ArgumentError(f"tiers must be numbered 0, 1, .. fastest first, got {[tier.number for tier in tiers]}")
        self.namespace = namespace
        self.tiers = tuple(tiers)
        self.enabled = enabled
        self.with_keys = with_keys or listener is not None
        self.roots: dict[tuple[bytes, bytes], Node] = {}
        """(salt, adapter) -> root node. A root has no blocks. Other modules must not modify the dict."""
        self.clock = self.num_leases = 0
        self._misses = misses or MissList()
        self.ghost = ghost
        self._listener = listener
        self.tracker: ReuseTracker | None = None
        """Observations for the learned policy. None if no tier uses this policy."""
        for tier in tiers[1:] if exclusive else ():
            tier.exclude(tiers[tier.number - 1])
        if any(tier.learns for tier in tiers):
            capacity = (sum if exclusive else max)(tier.pool.num_slots for tier in tiers)
            self.tracker = ReuseTracker(capacity, namespace.block_tokens, native().code)
            for tier in tiers:
                if tier.learns:
                    tier.learn_from(self.tracker)

    # ---- life of a request -----------------------------------------------------------------------------------------

    def match(
        self, chain: Chain, *, now: float = 0.0, max_blocks: int | None = None, retention: Retention = _KEEP
    ) -> Lease:
        """Lease the longest prefix of readable full blocks, with at most `max_blocks` blocks.

        Expired blocks match only while they are leased. If the tree is not enabled, no block matches. The lease counts
        as a use only at `commit` or `release`.
        """
        if chain.namespace is not self.namespace and chain.namespace != self.namespace:
            raise ArgumentError(f"the chain has the namespace {chain.namespace}, but the tree has {self.namespace}")
        if self.tracker is not None:
            self.tracker.see(now)
        root = self._root(chain)
        want = chain.num_blocks if max_blocks is None else min(chain.num_blocks, max_blocks)
        if not self.enabled:
            return self._lease_of(chain, root, retention, _NO_SLOTS, MissReason.DISABLED)
        node, parts, stopped = self._descend(root, chain, want, now)
        table = _NO_SLOTS if not parts else parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self._lease_of(chain, node, retention, table, stopped)

    def share(self, lease: Lease) -> Lease:
        """Return another lease on the same path, with an empty table, for example for a transfer."""
        lease.must_be_open()
        return self._lease_of(lease.chain, lease.node, lease.retention, _NO_SLOTS)

    def match_within(
        self, lease: Lease, max_tokens: int, *, max_children: int, now: float = 0.0
    ) -> tuple[Lease, int] | None:
        """Find the device block after a leased path that has the longest common prefix with the rest of the chain.

        Compare at most `max_tokens` tokens of at most `max_children` blocks (see `closest_child`). Return a lease that
        ends with the found block, and the number of shared tokens. Return None if no token is shared.
        """
        lease.must_be_open()
        best, num_tokens = edit.closest_child(lease.node, lease.chain, max_tokens, max_children, now)
        if best is None:
            return None
        if best.num_blocks > 1:
            best = edit.split(best, 1, self.tiers)
        slots = [above.device_slots() for above in best.upwards()]
        partial = self._lease_of(lease.chain, best, lease.retention, np.concatenate(slots[::-1]))
        partial.num_matched = lease.num_blocks
        return partial, num_tokens

    def allocate(self, lease: Lease, n: int) -> Slots | Shortage:
        """Reserve n device slots and add them to the lease's table. After a Shortage, nothing has changed."""
        lease.must_be_open()
        slots = self.reserve(self.tiers[0], n, lease.chain.salt)
        if isinstance(slots, Slots):
            lease.table = np.concatenate((lease.table, slots.ids)) if len(lease.table) else slots.ids
        return slots

    def publish(self, lease: Lease, computed_tokens: int, *, now: float = 0.0) -> int:
        """Make the full computed blocks matchable. Return the number of blocks that are new on the device.

        If another request has already published a block on the device, the lease keeps its own copy of this block. If
        the tree is not enabled or has dropped the path, publish nothing.
        """
        lease.must_be_open()
        stop = lease.num_full_blocks(computed_tokens)
        first = block = lease.num_blocks
        if stop <= first or not self.enabled or not lease.node.attached:
            return 0
        node, num_new = lease.node, 0
        while block < stop:
            child = node.children.get(lease.chain.key_at(block))
            if child is None:
                break
            node, adopted = self._join(lease, child, block, stop)
            num_new += node.num_blocks if adopted else 0
            block = node.stop
        if block < stop:
            node = self._grow(lease, node, block, stop, now)
            num_new += stop - block
        lease.node, lease.num_blocks = node, stop
        return num_new

    def graft(self, lease: Lease, tier: Tier, slots: Slots, *, now: float = 0.0, grow: bool = False) -> None:
        """Append blocks to the path of a lease, in reserved slots of a tier and in the state WRITING.

        When a transfer has written the slots, the caller calls `transitions.end_write`. With `grow`, extend the last
        node of the path if possible. Raise StateError if the lease owns slots, if the chain is too short, if the tree
        has dropped the path, or if the tree already has the first of these blocks.
        """
        lease.must_be_open()
        first, stop = lease.num_blocks, lease.num_blocks + len(slots)
        can_follow = lease.node.attached and lease.chain.key_at(first) not in lease.node.children
        if len(lease.table) > first or stop > lease.chain.num_blocks or not can_follow:
            raise StateError(
                f"cannot graft blocks [{first}, {stop}): the chain has {lease.chain.num_blocks} full blocks, the lease "
                f"owns {max(0, len(lease.table) - first)} slots, and the blocks can follow the path: {can_follow}"
            )
        node, usage = lease.node, self._new_usage(lease, now)
        if grow and node.parent is not None and edit.can_grow(node, usage) and node.held[tier.number] is not None:
            content = edit.content_below(node, lease.chain, first, stop, with_keys=self.with_keys)
            edit.lengthen(node, *content, tier.number, slots.ids, WRITING)
            node.usage.expires = usage.expires
        else:
            lease.node = self._add(lease.chain, node, first, stop, usage)
            tier.put(lease.node, 0, slots, WRITING)
        lease.num_blocks = stop
        if len(lease.table) == first:
            lease.table = np.concatenate((lease.table, np.full(len(slots), NO_SLOT, np.int32)))

    def lease_at(self, chain: Chain, node: Node, retention: Retention = _KEEP) -> Lease:
        """Lease the path of a chain that ends with `node`, whatever the states of its blocks. The table is empty."""
        return self._lease_of(chain, node, retention, _NO_SLOTS)

    def follow(self, lease: Lease, stop: int) -> None:
        """Extend a lease by cached blocks up to block `stop`, whatever their states. The lease must not own slots."""
        lease.must_be_open()
        node, block = lease.node, lease.num_blocks
        while block < stop and node.attached:
            child = node.children.get(lease.chain.key_at(block))
            if child is None:
                break
            count = edit.common_blocks(child, lease.chain, block, stop)
            node = child if count == child.num_blocks else edit.split(child, count, self.tiers)
            edit.add_lease(node, node.parent, self.tiers)
            block = node.stop
        if len(lease.table) == lease.num_blocks:
            lease.table = np.concatenate((lease.table, np.full(block - lease.num_blocks, NO_SLOT, np.int32)))
        lease.node, lease.num_blocks = node, block

    def commit(self, lease: Lease, *, now: float = 0.0) -> None:
        """Count the path of a lease as used. Repeated calls count as one use, but update the time and the expiry."""
        lease.must_be_open()
        self._use(lease, now)
        lease.committed = True

    def release(self, lease: Lease, *, used: bool = True, now: float = 0.0, outcome: Outcome = _UNKNOWN) -> None:
        """End a lease and free the slots that it owns. Published blocks stay. If `used` is False, count no use."""
        lease.must_be_open()
        if used:
            self._use(lease, now)
            if self.tracker is not None:
                returned = self.tracker.returned(lease)
                if returned is not None and not self.tracker.state.is_lru:
                    self._split_at(lease.node, returned[0])
                self.tracker.touch(lease, returned, outcome, now)
        lease.closed = True
        self.num_leases -= 1
        if len(lease.table) > lease.num_blocks or lease.duplicate_slots:
            device = self.tiers[0]
            own = np.concatenate((lease.table[lease.num_blocks :], *lease.duplicate_slots))
            device.give_back(Slots(device.name, own), lease.chain.salt)
        self._remove_lease(lease.node)

    def close(self, salt: bytes, session_id: str, *, now: float = 0.0) -> int:
        """Record the end of a session, for the learned policy. Without this policy, do nothing and return 0.

        Return the number of blocks whose last use was the last request of the session.
        """
        nodes = self.tracker.close(session_of(salt, session_id), now) if self.tracker is not None else []
        for node in nodes:
            for tier in self.tiers:
                tier.withdraw(node)
                tier.refresh(node)
            for tier in self.tiers:  # the node may no longer be one of the next victims
                tier.list_duplicate(node)
        return sum(node.num_blocks for node in nodes)

    # ---- slots and eviction ----------------------------------------------------------------------------------------

    def evict(self, tier: Tier, n: int, *, salt: bytes | None = None) -> Shortage | None:
        """Evict n blocks from a tier. If fewer are evictable, evict none and return a Shortage.

        With `salt`, evict only blocks of the salt's tenant, which must have a quota.
        """
        if salt is not None and tier.quota(salt) is None:
            raise ArgumentError(f"{tier.name}: the tenant of {salt.hex() or 'no salt'} has no quota")
        available = tier.num_evictable if salt is None else tier.tenants[tenant_of(salt)].num_blocks
        if n > available:
            return Shortage(tier.name, n, tier.pool.num_free, available)
        self._free(tier, self._evict(tier, n, salt))
        return None

    def reserve(self, tier: Tier, n: int, salt: bytes = b"") -> Slots | Shortage:
        """Reserve n slots in a tier for the caller, evicting if necessary. After a Shortage, nothing has changed."""
        evicted = self._make_room(tier, n, salt)
        if isinstance(evicted, Shortage):
            return evicted
        # Return the evicted slots directly, without releasing them to the pool and allocating them again.
        more = n - sum(map(len, evicted))
        if more or not evicted:
            slots = tier.pool.allocate(more)
            assert isinstance(slots, Slots)
            evicted.append(slots.ids)
        tier.use(salt, n)
        return Slots(tier.name, evicted[0] if len(evicted) == 1 else np.concatenate(evicted))

    def demote(self, tier: Tier, chain: Chain) -> int:
        """Remove the nodes of a chain from a tier. Return the number of freed slots.

        If the whole chain is cached, its continuations are removed too. A node stays if it is leased, or if no other
        tier has readable copies of all its blocks. The ancestors of a node that stays also stay.
        """
        lease = self.match(chain)
        node = lease.node
        self.release(lease, used=False)
        below = node.descendants() if 0 < lease.num_blocks == chain.num_blocks else []
        freed: list[I32] = []
        for each in (*reversed(below), *node.upwards()):
            held = each.held[tier.number]
            if held is None or each.leases or each.below[tier.number]:
                continue
            others = [other for other in each.held if other is not None and other is not held]
            if any(min(other.states) >= READY for other in others):
                freed.append(self._take_last(tier, each, held, held.num_held))
        self._free(tier, freed)
        return sum(map(len, freed))

    def vacate(self, tier: Tier, first_slot: int = 0, detached: Iterable[Node] = ()) -> None:
        """From a tier, remove all blocks in slots `first_slot` and above, even if they are leased.

        No step or transfer may be in flight. `detached` lists leased nodes that are no longer in the tree.
        """
        for node in [*self.nodes(), *detached]:
            held = node.held[tier.number]
            if held is not None:
                self._remove_where(tier, node, held.slots >= first_slot)

    def invalidate(self, tier: Tier, slots: I32) -> int:
        """Remove the READY blocks in these slots of a tier. Return the number of removed blocks."""
        num_removed = 0
        for node in list(self.nodes()):
            held = node.held[tier.number]
            if held is not None:
                wanted = np.isin(held.slots, slots) & (np.frombuffer(bytes(held.states), np.uint8) == READY)
                num_removed += int(wanted.sum())
                self._remove_where(tier, node, wanted)
        return num_removed

    def expire(self, now: float) -> int:
        """Drop all expired nodes without a lease, and their descendants. Return the number of dropped blocks."""
        expired = [node for node in self.nodes() if node.usage.expires <= now and not node.leases]
        return sum(self._detach(node, MissReason.EXPIRED) for node in expired if node.attached)

    def drop(self, chain: Chain, *, first: int = 0) -> int:
        """Drop the cached blocks of a chain, starting at block `first`, and all blocks below them in the tree.

        Return the number of dropped blocks. Leased blocks keep their slots until their leases end.
        """
        node, block = self.roots.get((chain.salt, chain.adapter)), 0
        while node is not None and block < chain.num_blocks:
            node = node.children.get(chain.key_at(block))
            if node is None:
                return 0
            stop = block + edit.common_blocks(node, chain, block, chain.num_blocks)
            if stop > first:
                if node.start < first:
                    edit.split(node, first - node.start, self.tiers)
                return self._detach(node, MissReason.DROPPED)
            if stop < node.stop:
                return 0
            block = stop
        return 0

    def reset(self, namespace: Namespace | None = None) -> None:
        """Drop all blocks, and switch to `namespace` if it is given. Open leases keep their slots."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                self._detach(child, MissReason.DROPPED)
            root.attached = False
        self.roots.clear()
        if namespace is not None and namespace != self.namespace:
            self.namespace = namespace
            self._misses.other_layout()
        if self._listener:
            self._listener(IndexCleared())

    # ---- queries ---------------------------------------------------------------------------------------------------

    def explain(self, lease: Lease) -> Miss:
        """Return the first block that did not match, and the reason for the miss."""
        if lease.stopped is not None:
            return Miss(lease.num_matched, lease.stopped, lease.matched_at)
        miss = self._misses.explain(lease.chain, lease.num_matched, lease.matched_at)
        if miss.cell >= 0 and self.tracker is not None:
            return replace(miss, policy=self.tracker.describe(miss.cell, miss.value))
        return miss

    def nodes(self) -> Iterator[Node]:
        """Yield every node with blocks, parents first."""
        waiting = [child for root in self.roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    # ---- for transfers (kvtier.index.transitions) ------------------------------------------------------------------

    def notify_stored(self, tier: Tier, node: Node, first: int, stop: int | None = None) -> None:
        """Notify the listener that blocks [first, stop) of a node became readable in a tier."""
        if self._listener and node.attached:
            self._listener(stored_event(tier.name, node, first, stop, self.namespace))

    def remove(self, tier: Tier, node: Node, first: int, stop: int) -> None:
        """Remove blocks [first, stop) of a node from a tier. The length of the node does not change."""
        if node.attached:
            self._notify_removed(tier, node, first, stop)
        tier.give_back(tier.take(node, first, stop), node.domain[0])

    # ---- match and use ---------------------------------------------------------------------------------------------

    def _lease_of(
        self, chain: Chain, node: Node, retention: Retention, table: I32, stopped: MissReason | None = None
    ) -> Lease:
        self.num_leases += 1
        edit.add_lease(node, None, self.tiers)
        return Lease(chain, node, node.stop, table, retention, stopped, self.clock)

    def _root(self, chain: Chain) -> Node:
        domain = (chain.salt, chain.adapter)
        root = self.roots.get(domain)
        if root is None:
            usage = AccessStats(self.clock, self.clock)
            root = self.roots[domain] = Node(None, domain, b"", 0, 0, memoryview(b""), usage, len(self.tiers))
        return root

    def _descend(self, node: Node, chain: Chain, want: int, now: float) -> tuple[Node, list[I32], MissReason | None]:
        """Follow the chain through at most `want` readable blocks. If the match ends inside a node, split the node.

        Return the last node, the device slots of each node, and the reason why the match ended. The reason is None if
        the tree lacks the next block. In this case `explain` finds the reason later.
        """
        block = 0
        parts: list[I32] = []
        while block < want:
            child = node.children.get(chain.key_at(block))
            if child is None:
                return node, parts, None
            if child.usage.expires <= now and not child.leases:
                return node, parts, MissReason.EXPIRED
            common = edit.common_blocks(child, chain, block, want)
            held = child.held[0]
            is_ready = held is not None and held.states.count(READY) == child.num_blocks
            take = common if is_ready else min(common, child.num_leading(READABLE))
            if take:
                node = child if take == child.num_blocks else edit.split(child, take, self.tiers)
                block += take
                parts.append(node.device_slots())
            if take < common:
                return node, parts, MissReason.NOT_READY
        return node, parts, MissReason.NONE

    def _remove_lease(self, node: Node | None) -> None:
        """Remove one lease from a node and from all of its ancestors."""
        while node is not None:
            node.leases -= 1
            if node.leases == 0:
                if node.attached and node.parent is not None:
                    for tier in self.tiers:
                        tier.unleased(node)
                    held = node.held[0]
                    if held is None or held.num_held < node.num_blocks:
                        self._cut_absent(node)
                elif not node.attached:
                    edit.free_detached(node, self.tiers)
                elif not node.children:
                    self.roots.pop(node.domain, None)
            node = node.parent

    def _use(self, lease: Lease, now: float) -> None:
        """Update the access statistics of the path, and undo splits that are no longer needed.

        `uses` grows only for matched blocks, and at most once per lease.
        """
        self.clock += 1
        if self.tracker is not None and not lease.committed:
            lease.began = now, lease.chain.num_blocks
        if self.ghost is not None and not lease.committed:
            self.ghost.record(lease.chain, lease.num_matched, now)
        priority, expires = lease.retention.priority, now + lease.retention.ttl
        node = lease.node
        while node.parent is not None:
            usage = node.usage
            if usage.used != self.clock:
                usage.used = self.clock
                usage.uses += not lease.committed and node.start < lease.num_matched
            usage.priority = max(usage.priority, priority)
            usage.expires = max(usage.expires, expires)
            above = node.parent
            only_child = above.leases == node.leases and len(above.children) == 1
            if only_child and edit.can_join(above, node, priority, expires):
                edit.absorb_parent(node, self.tiers)
            else:
                node = above

    def _split_at(self, node: Node, block: int) -> None:
        """On the path to `node`, split the node that contains `block`, so that a node begins with this block."""
        while node.start >= block and node.parent is not None:
            node = node.parent
        if node.start < block < node.stop:
            edit.split(node, block - node.start, self.tiers)

    # ---- insertion -------------------------------------------------------------------------------------------------

    def _new_usage(self, lease: Lease, now: float) -> AccessStats:
        return AccessStats(self.clock, self.clock, 0, lease.retention.priority, now + lease.retention.ttl)

    def _join(self, lease: Lease, child: Node, block: int, stop: int) -> tuple[Node, bool]:
        """Extend a lease by an existing child. Return the child, and True if the child took over the lease's slots.

        First split the child where the chain ends or differs from it, or where its device blocks begin or end. If the
        child already has device blocks, the lease keeps its own slots in `duplicate_slots`.
        """
        device = self.tiers[0]
        count = edit.common_blocks(child, lease.chain, block, stop)
        held = child.held[0]
        if held is not None:
            absent = held.states.find(ABSENT)
            if absent == 0:
                count = min(count, len(held.states) - len(held.states.lstrip(b"\0")))
            elif absent > 0:
                count = min(count, absent)
        if count < child.num_blocks:
            child = edit.split(child, count, self.tiers)
        edit.add_lease(child, child.parent, self.tiers)
        own = lease.table[block : block + count]
        if child.held[0] is None:
            device.put(child, 0, Slots(device.name, own.copy()), READY)
            self.notify_stored(device, child, 0)
            return child, True
        lease.duplicate_slots.append(own)
        return child, False

    def _grow(self, lease: Lease, node: Node, block: int, stop: int, now: float) -> Node:
        """Add blocks [block, stop) of the chain. If possible, extend the leaf that the lease added last."""
        device, slots, usage = self.tiers[0], lease.table[block:stop].copy(), self._new_usage(lease, now)
        if node is lease.grown and edit.can_grow(node, usage):
            content = edit.content_below(node, lease.chain, block, stop, with_keys=self.with_keys)
            edit.lengthen(node, *content, 0, slots, READY)
            node.usage.expires = usage.expires
            self.notify_stored(device, node, block - node.start)
            return node
        new = self._add(lease.chain, node, block, stop, usage)
        device.put(new, 0, Slots(device.name, slots), READY)
        lease.grown = new
        self.notify_stored(device, new, 0)
        return new

    def _add(self, chain: Chain, node: Node, block: int, stop: int, usage: AccessStats) -> Node:
        """Add blocks [block, stop) of the chain as a child of a node. The child starts with one lease."""
        labels, keys, extras = edit.content_below(node, chain, block, stop, with_keys=self.with_keys)
        key = chain.key_at(block)
        new = Node(node, node.domain, key, block, stop - block, labels, usage, len(self.tiers), extras, keys)
        new.leases = 1
        node.children[key] = new
        if node.parent is None:
            self._misses.add_head(new)
        return new

    # ---- removal ---------------------------------------------------------------------------------------------------

    def _make_room(self, tier: Tier, n: int, salt: bytes) -> list[I32] | Shortage:
        """Evict enough blocks for n more slots of a tenant, or evict nothing and return a Shortage.

        If the tenant would exceed its quota, evict the excess from its own blocks. Evict the rest from any tenant.
        """
        short, over = n - tier.pool.num_free, 0
        quota = tier.quota(salt)
        if quota is not None and n > 0:
            shortage = tier.quota_shortage(salt, n)
            if shortage is not None:
                return shortage
            over = max(0, tier.used_by.get(tenant_of(salt), 0) + n - quota)
        if short > tier.num_evictable:
            return Shortage(tier.name, n, tier.pool.num_free, tier.num_evictable)
        if over > n:  # the quota was lowered, so evict the old excess first
            self.evict(tier, over - n, salt=salt)
            over = n
        evicted = self._evict(tier, over, salt) if over else []
        return evicted + self._evict(tier, short - over, None) if short > over else evicted

    def _free(self, tier: Tier, freed: list[I32]) -> None:
        if freed:
            tier.pool.release(Slots(tier.name, np.concatenate(freed)))

    def _evict(self, tier: Tier, n: int, salt: bytes | None) -> list[I32]:
        """Evict n blocks: first duplicates (see Tier), then blocks from the end of one victim after another.

        At least n blocks must be evictable.

            victim   [ b0 b1 b2 b3 b4 ]   n = 2   ->   [ b0 b1 b2 ]      b0, b1 and b2 stay matchable

        Return the slots, which the caller then owns. The pool still counts them as used.
        """
        freed: list[I32] = []
        tier.num_evicted += n
        while n > 0 and (duplicate := tier.duplicate(salt)) is not None:
            taken = self._evict_duplicates(tier, duplicate, n)
            n -= sum(map(len, taken))
            freed += taken
        while n > 0:
            node = tier.victim(salt)
            held = node.held[tier.number]
            assert held is not None
            count = held.num_held if held.num_held < n else n
            n -= count
            if node.held.count(None) == len(node.held) - 1:  # no other tier holds blocks of this node
                freed.append(self._cut(node, node.num_blocks - count, tier))
            else:
                freed.append(self._take_last(tier, node, held, count))
        return freed

    def _evict_duplicates(self, tier: Tier, node: Node, n: int) -> list[I32]:
        """From a node, evict at most n blocks that the faster tier also holds. Return their slots."""
        freed: list[I32] = []
        for first, stop in tier.duplicate_runs(node, n):
            if self._listener:
                self._notify_removed(tier, node, first, stop)
            freed.append(tier.take(node, first, stop).ids)
            tier.use(node.domain[0], first - stop)
            tier.num_duplicates_evicted += stop - first
        return freed

    def _take_last(self, tier: Tier, node: Node, held: Residency, count: int) -> I32:
        """Remove the last `count` held blocks of a node from a tier, then call `_cut_absent`. Return their slots."""
        stop = len(held.states.rstrip(b"\0"))
        first = stop - count
        if ABSENT in held.states[first:stop]:  # rarely, the last held blocks are not consecutive
            first = int(np.flatnonzero(np.frombuffer(held.states, np.uint8))[-count])
        if self._listener:
            self._notify_removed(tier, node, first)
        taken = tier.take(node, first, stop).ids
        tier.use(node.domain[0], -count)
        self._cut_absent(node, tier)
        return taken

    def _remove_where(self, tier: Tier, node: Node, wanted: Mask) -> None:
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).tolist()
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            self.remove(tier, node, first, stop)
        if edges and not node.leases and node.attached:
            self._cut_absent(node)

    def _cut_absent(self, node: Node, evicting: Tier | None = None) -> None:
        """Truncate a node before its first block that no tier holds. The node must not have a lease."""
        kept = node.num_leading(IS_HELD)
        if kept < node.num_blocks:
            self._cut(node, kept, evicting)

    def _cut(self, node: Node, kept: int, evicting: Tier | None) -> I32:
        """Truncate a node to its first `kept` blocks, or remove it if `kept` is 0. Remove all its descendants.

        Return the slots of the removed blocks in the evicting tier. Slots in other tiers are released to their pools.
        """
        policy, cell, value = evicting.policy_name if evicting is not None else "", -1, 0.0
        if self.tracker is not None:
            touch = node.usage.touch
            if evicting is not None and evicting.learns and touch is not None and not self.tracker.state.is_lru:
                cell, value = touch[1], self.tracker.state.lowest
            self.tracker.removed(node, kept)
        self._misses.add(node, kept, MissReason.EVICTED, self.clock, policy, cell, value)
        if node.children:
            for child in list(node.children.values()):
                self._detach(child, MissReason.EVICTED)
        taken = _NO_SLOTS
        for tier in self.tiers:
            if node.held[tier.number] is not None:
                if self._listener:
                    self._notify_removed(tier, node, kept)
                slots = tier.take(node, kept, cut=True)
                if tier is evicting:
                    taken = slots.ids
                    tier.use(node.domain[0], -len(taken))
                else:
                    tier.give_back(slots, node.domain[0])
        if kept:
            edit.truncate(node, kept)
        else:
            self._unlink(node)
            node.attached = False
        return taken

    def _detach(self, node: Node, reason: MissReason) -> int:
        """Remove a node and its descendants from the tree. Return the number of their blocks.

        The slots of leased nodes stay in use until the leases end.
        """
        self._misses.add(node, 0, reason, self.clock)
        for tier in self.tiers:
            tier.unlinked(node)
        self._unlink(node)
        num_blocks = 0
        for each in (node, *node.descendants()):
            num_blocks += each.num_blocks
            for tier in self.tiers:
                self._notify_removed(tier, each, 0)
                tier.detached(each)
            each.attached = False
            if self.tracker is not None:
                self.tracker.detached(each)
            if each.leases == 0:
                edit.free_detached(each, self.tiers)
        return num_blocks

    def _unlink(self, node: Node) -> None:
        above = node.parent
        assert above is not None
        del above.children[node.key]
        if above.parent is None:
            self._misses.remove_head(node)
            if not above.children and not above.leases:
                self.roots.pop(above.domain, None)

    def _notify_removed(self, tier: Tier, node: Node, first: int, stop: int | None = None) -> None:
        """Report removed blocks to the listener, except WRITING blocks, which were never readable."""
        held = node.held[tier.number]
        if self._listener is None or held is None:
            return
        event = removed_event(tier.name, node, held, first, stop)
        if event is not None:
            self._listener(event)
