"""Tier: a pool of slots and the candidates for eviction from these slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from kvtier.errors import StateError
from kvtier.index.learned import Learned
from kvtier.index.node import NO_SLOT, Node, Residency
from kvtier.index.policies import Policy
from kvtier.index.pool import BlockPool, Shortage, Slots
from kvtier.index.tracker import ReuseTracker


def tenant_of(salt: bytes) -> bytes:
    """Return a salt's tenant, the part before the first NUL byte. Salts of one tenant share a quota, but no blocks."""
    return salt.partition(b"\0")[0]


class Candidates:
    """Candidates for eviction, ordered by priority and then by policy. `num_blocks` counts all evictable blocks."""

    __slots__ = ("_by_priority", "_in_order", "_new_policy", "num_blocks", "quota")

    def __init__(self, new_policy: Callable[[], Policy], quota: int = 0) -> None:
        self.quota = quota
        self.num_blocks = 0
        self._new_policy = new_policy
        self._by_priority: dict[int, Policy] = {}
        self._in_order: list[Policy] = []

    def offer(self, node: Node) -> None:
        policy = self._by_priority.get(node.usage.priority)
        if policy is None:
            policy = self._by_priority[node.usage.priority] = self._new_policy()
            self._in_order = [self._by_priority[priority] for priority in sorted(self._by_priority)]
        policy.offer(node)

    def withdraw(self, node: Node) -> None:
        policy = self._by_priority.get(node.usage.priority)
        if policy is not None:
            policy.withdraw(node)

    def __contains__(self, node: Node) -> bool:
        policy = self._by_priority.get(node.usage.priority)
        return policy is not None and node in policy

    def victim(self) -> Node | None:
        for policy in self._in_order:
            node = policy.victim()
            if node is not None:
                return node
        return None


class Tier:
    """A pool and its candidates for eviction. `number` is the index of the tier in Node.held; the fastest tier is 0.

    A node is a candidate if it has no lease, has blocks in this tier, and has no descendant with blocks in this tier:

        leases == 0  and  held[number].num_held > 0  and  below[number] == 0

    Transfers hold leases, so the blocks of a node without a lease are neither WRITING nor READING. `num_evictable`
    counts the blocks of all nodes without a lease, because a parent becomes a candidate after its children are evicted.
    The nodes of a tenant with a quota are both in `everyone` and in the tenant's own candidates.
    """

    def __init__(self, number: int, pool: BlockPool, new_policy: Callable[[], Policy]) -> None:
        self.number = number
        self.pool = pool
        self.name = pool.tier
        policy = new_policy()
        self.policy_name = policy.name
        self.learns = isinstance(policy, Learned)
        self.num_evicted = 0
        self.used_by: dict[bytes, int] = {}
        self._new_policy = new_policy
        self.everyone = Candidates(new_policy)
        self.tenants: dict[bytes, Candidates] = {}
        """Candidates of each tenant with a quota."""

    def learn_from(self, tracker: ReuseTracker) -> None:
        """Let all policies of a tier that learns use one tracker. Call it before the first block is cached."""
        self._new_policy = partial(Learned, tracker)
        self.everyone = Candidates(self._new_policy)

    @property
    def num_evictable(self) -> int:
        return self.everyone.num_blocks

    def quota(self, salt: bytes) -> int | None:
        """Return the quota of a salt's tenant as a number of slots, or None if the tenant has no quota."""
        tenant = self.tenants.get(tenant_of(salt))
        return tenant.quota if tenant is not None else None

    def quota_shortage(self, salt: bytes, n: int) -> Shortage | None:
        """Return a Shortage if n more slots exceed a tenant's quota even after evicting all of the tenant's blocks."""
        tenant = self.tenants.get(tenant_of(salt))
        used = self.used_by.get(tenant_of(salt), 0)
        if tenant is None or used + n <= tenant.quota + tenant.num_blocks:
            return None
        name = tenant_of(salt).hex() or "no salt"
        return Shortage(self.name, n, max(0, tenant.quota - used), tenant.num_blocks, quota=name)

    def victim(self, salt: bytes | None = None) -> Node:
        """Return the next candidate, of any tenant or of the tenant of `salt`. Raise if there is no candidate."""
        node = (self.everyone if salt is None else self.tenants[tenant_of(salt)]).victim()
        if node is None:
            raise StateError(f"{self.name}: {self.num_evictable} blocks counted as evictable, but no candidate left")
        return node

    def use(self, salt: bytes, count: int) -> None:
        """Add `count` to the number of slots that a tenant uses. `count` may be negative."""
        tenant = tenant_of(salt)
        left = self.used_by.get(tenant, 0) + count
        if left:
            self.used_by[tenant] = left
        else:
            self.used_by.pop(tenant, None)

    def give_back(self, slots: Slots, salt: bytes = b"") -> None:
        self.pool.release(slots)
        self.use(salt, -len(slots.ids))

    # ---- blocks of nodes -------------------------------------------------------------------------------------------

    def put(self, node: Node, first: int, slots: Slots, state: int) -> None:
        """Add blocks [first, first + len(slots)) of a leased node. The blocks must be absent from this tier."""
        held, count = node.held[self.number], len(slots.ids)
        if held is None and count == node.num_blocks:
            node.held[self.number] = Residency(slots.ids, bytearray((state,)) * count)
            self._gained(node)
            return
        if held is None:
            held = node.held[self.number] = Residency.absent(node.num_blocks)
            self._gained(node)
        held.slots = held.slots.copy()  # may be a view after a split
        held.slots[first : first + count] = slots.ids
        held.states[first : first + count] = bytes((state,)) * count
        held.num_held += count

    def take(self, node: Node, first: int, stop: int | None = None, *, cut: bool = False) -> Slots:
        """Remove blocks [first, stop) of a node. Return their slots; the caller becomes the owner of the slots.

        Set `cut` if the node will be truncated to `first` blocks.
        """
        held = node.held[self.number]
        if held is None:
            return Slots(self.name, np.empty(0, np.int32))
        slots = held.slots[first:stop] if first or stop is not None else held.slots
        if held.num_held < len(held.states):
            slots = slots[slots != NO_SLOT]
        if self._lose(node, held, len(slots)):
            pass
        elif cut:
            held.slots = held.slots[:first]
            del held.states[first:]
        elif len(slots):
            held.slots = held.slots.copy()
            held.slots[first:stop] = NO_SLOT
            held.states[first:stop] = bytes(len(held.states[first:stop]))
        return Slots(self.name, slots)

    def _lose(self, node: Node, held: Residency, count: int) -> bool:
        """Subtract `count` from the number of a node's blocks in this tier. Return True if no block is left."""
        if node.leases == 0 and node.attached:
            self._count(node, -count)
        held.num_held -= count
        if held.num_held:
            return False
        self.withdraw(node)
        node.held[self.number] = None
        if not node.below[self.number] and node.attached:
            self._lower_above(node)
        return True

    # ---- candidates ------------------------------------------------------------------------------------------------

    def leased(self, node: Node) -> None:
        """Handle the first lease on a node."""
        held = node.held[self.number]
        if held is not None:
            self._count(node, -held.num_held)
            if not node.below[self.number]:
                self.withdraw(node)

    def unleased(self, node: Node) -> None:
        """Handle the end of the last lease on a node."""
        held = node.held[self.number]
        if held is not None:
            self._count(node, held.num_held)
            if not node.below[self.number]:
                self._offer(node)

    def refresh(self, node: Node) -> None:
        """Make the node a candidate if it satisfies the condition in the class docstring."""
        if not (node.leases or node.below[self.number]) and node.attached and node.held[self.number] is not None:
            self._offer(node)

    def withdraw(self, node: Node) -> None:
        self.everyone.withdraw(node)
        if self.tenants and (tenant := self._limited(node)) is not None:
            tenant.withdraw(node)

    def unlinked(self, node: Node) -> None:
        """Handle the removal of a node and its descendants from the tree. The parent may become a candidate."""
        if node.held[self.number] is not None or node.below[self.number]:
            self._lower_above(node)

    def detached(self, node: Node) -> None:
        """Withdraw a node that was removed from the tree, and subtract its blocks from the evictable blocks."""
        held = node.held[self.number]
        if held is not None and node.leases == 0:
            self._count(node, -held.num_held)
        self.withdraw(node)

    def set_quota(self, salt: bytes, quota: int | None, nodes: Iterable[Node]) -> None:
        """Limit the number of slots for a salt's tenant; None removes the limit. `nodes` are all nodes of the tree."""
        self.tenants.pop(tenant_of(salt), None)
        if quota is None:
            return
        tenant = self.tenants[tenant_of(salt)] = Candidates(self._new_policy, quota)
        for node in nodes:
            held = node.held[self.number]
            if held is not None and not node.leases and self._limited(node) is tenant:
                tenant.num_blocks += held.num_held
                if not node.below[self.number]:
                    tenant.offer(node)

    def _offer(self, node: Node) -> None:
        self.everyone.offer(node)
        if self.tenants and (tenant := self._limited(node)) is not None:
            tenant.offer(node)

    def _count(self, node: Node, count: int) -> None:
        self.everyone.num_blocks += count
        if self.tenants and (tenant := self._limited(node)) is not None:
            tenant.num_blocks += count

    def _limited(self, node: Node) -> Candidates | None:
        """Return the candidates of the node's tenant, or None if the tenant has no quota."""
        return self.tenants.get(tenant_of(node.domain[0]))

    def _gained(self, node: Node) -> None:
        """Handle the first block of a node in this tier. The parent is no longer a candidate."""
        number, above = self.number, node.parent
        if node.below[number] or not node.attached:
            return
        while above is not None:
            above.below[number] += 1
            if above.below[number] > 1:
                return
            if above.held[number] is not None:
                self.withdraw(above)
                return
            above = above.parent

    def _lower_above(self, node: Node) -> None:
        """Handle the removal of the last block in the subtree of a node. The parent may become a candidate."""
        number, above = self.number, node.parent
        while above is not None:
            above.below[number] -= 1
            if above.below[number]:
                return
            if above.held[number] is not None:
                self.refresh(above)
                return
            above = above.parent
