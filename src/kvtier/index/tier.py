"""Tier: one pool's side of the tree: what it holds of each node, and which nodes it may evict from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvtier.errors import StateError
from kvtier.index.node import NO_SLOT, BlockState, Node, Residency
from kvtier.index.policies import Policy
from kvtier.index.pool import BlockPool, Shortage, Slots


def tenant_of(salt: bytes) -> bytes:
    """Whose quota a salt counts for: what stands before its first NUL. The rest parts a tenant's own cache."""
    return salt.partition(b"\0")[0]


class Candidates:
    """Nodes that may be evicted from, by priority and then by policy; `num_blocks` is what can go in the end."""

    __slots__ = ("_by_priority", "_in_order", "_new_policy", "num_blocks", "quota")

    def __init__(self, new_policy: Callable[[], Policy], quota: int = 0) -> None:
        self.quota = quota
        self.num_blocks = 0
        self._new_policy = new_policy
        self._by_priority: dict[int, Policy] = {}
        self._in_order: list[Policy] = []

    def offer(self, node: Node) -> None:
        """It may be evicted from."""
        policy = self._by_priority.get(node.usage.priority)
        if policy is None:
            policy = self._by_priority[node.usage.priority] = self._new_policy()
            self._in_order = [self._by_priority[priority] for priority in sorted(self._by_priority)]
        policy.offer(node)

    def withdraw(self, node: Node) -> None:
        """It may not, if it might."""
        policy = self._by_priority.get(node.usage.priority)
        if policy is not None:
            policy.withdraw(node)

    def __contains__(self, node: Node) -> bool:
        policy = self._by_priority.get(node.usage.priority)
        return policy is not None and node in policy

    def victim(self) -> Node | None:
        """Whom to take from next."""
        for policy in self._in_order:
            node = policy.victim()
            if node is not None:
                return node
        return None


class Tier:
    """A pool and its candidates. `number` is its place in Node.held, the fastest tier first.

    A node is a candidate here iff no lease covers it, this tier holds blocks of it, and none below it:

        leases == 0  and  held[number].num_held > 0  and  below[number] == 0

    Transfers hold leases, so a node without one has no block in WRITING or READING. `num_evictable` counts the blocks
    of all nodes without lease: leaves go first, but all of them can go. A tenant with a quota has candidates of its own
    beside those of all.
    """

    def __init__(self, number: int, pool: BlockPool, new_policy: Callable[[], Policy]) -> None:
        self.number = number
        self.pool = pool
        self.name = pool.tier
        self.policy_name = new_policy().name
        self.num_evicted = 0
        """Blocks that went to make room, so far."""
        self.used_by: dict[bytes, int] = {}
        """Slots by tenant."""
        self._new_policy = new_policy
        self._all = Candidates(new_policy)
        self._tenants: dict[bytes, Candidates] = {}

    @property
    def num_evictable(self) -> int:
        """Blocks that can go."""
        return self._all.num_blocks

    def quota(self, salt: bytes) -> int | None:
        """The most slots a tenant may use, if it has a limit."""
        found = self._tenants.get(tenant_of(salt))
        return found.quota if found is not None else None

    def num_used_by(self, salt: bytes) -> int:
        """Slots of a salt's tenant."""
        return self.used_by.get(tenant_of(salt), 0)

    def evictable_by(self, salt: bytes) -> int:
        """Blocks of a tenant with a quota that can go."""
        return self._tenants[tenant_of(salt)].num_blocks

    def quota_shortage(self, salt: bytes, n: int) -> Shortage | None:
        """Why n more slots do not fit a tenant's quota, whatever of its own goes for them; None: they do."""
        quota = self.quota(salt)
        if quota is None:
            return None
        used, evictable = self.num_used_by(salt), self.evictable_by(salt)
        if used + n <= quota + evictable:
            return None
        return Shortage(self.name, n, max(0, quota - used), evictable, quota=tenant_of(salt).hex() or "no salt")

    def candidates(self, salt: bytes | None = None) -> Candidates:
        """Those of all, or of one tenant with a quota; for looking."""
        return self._all if salt is None else self._tenants[tenant_of(salt)]

    @property
    def tenants(self) -> tuple[bytes, ...]:
        """Those with a quota."""
        return tuple(self._tenants)

    def victim(self, salt: bytes | None = None) -> Node:
        """The next node to take from, of one tenant with a quota or of all; the caller knows that there is one."""
        node = self.candidates(salt).victim()
        if node is None:
            raise StateError(f"{self.name}: {self.num_evictable} blocks counted evictable, no candidate left")
        return node

    def use(self, salt: bytes, count: int) -> None:
        """A tenant has so many slots more, or fewer."""
        tenant = tenant_of(salt)
        left = self.used_by.get(tenant, 0) + count
        if left:
            self.used_by[tenant] = left
        else:
            self.used_by.pop(tenant, None)

    # ---- what it holds ---------------------------------------------------------------------------------------------

    def put(self, node: Node, first: int, slots: Slots, state: BlockState) -> None:
        """Blocks [first, first + len(slots)) of a node are here now. The caller holds a lease on the node."""
        held, count = node.held[self.number], len(slots.ids)
        if held is None and count == node.num_blocks:
            node.held[self.number] = Residency(slots.ids, bytearray((state,)) * count)
            self._gained(node)
            return
        if held is None:
            held = node.held[self.number] = Residency.nothing(node.num_blocks)
            self._gained(node)
        if held.states.count(BlockState.ABSENT, first, first + count) != count:
            raise StateError(f"{self.name} already holds some of blocks [{first}, {first + count}) of the node")
        held.slots = held.slots.copy()  # a split may have left it a view
        held.slots[first : first + count] = slots.ids
        held.states[first : first + count] = bytes((state,)) * count
        held.num_held += count

    def take(self, node: Node, first: int, stop: int | None = None, *, cut: bool = False) -> Slots:
        """Blocks [first, stop) of a node are here no longer, as far as they were; their slots are the caller's.

        With `cut`, the node itself is about to end at `first`.
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
        """Count blocks out; True if nothing is left of the node."""
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

    # ---- who may go ------------------------------------------------------------------------------------------------

    def leased(self, node: Node) -> None:
        """The node got its first lease."""
        held = node.held[self.number]
        if held is not None:
            self._count(node, -held.num_held)
            if not node.below[self.number]:
                self.withdraw(node)

    def unleased(self, node: Node) -> None:
        """The node lost its last lease."""
        held = node.held[self.number]
        if held is not None:
            self._count(node, held.num_held)
            if not node.below[self.number]:
                self._offer(node)

    def refresh(self, node: Node) -> None:
        """Make it a candidate if it is one by the rule."""
        if not (node.leases or node.below[self.number]) and node.attached and node.held[self.number] is not None:
            self._offer(node)

    def withdraw(self, node: Node) -> None:
        """The node is no candidate any more, if it was one."""
        self._all.withdraw(node)
        if self._tenants and (tenant := self._limited(node)) is not None:
            tenant.withdraw(node)

    def unlinked(self, node: Node) -> None:
        """The node, with all below it, is about to leave the tree: what is above it may be a leaf here."""
        if node.held[self.number] is not None or node.below[self.number]:
            self._lower_above(node)

    def detached(self, node: Node) -> None:
        """The node left the tree: no candidate, not counted."""
        held = node.held[self.number]
        if held is not None and node.leases == 0:
            self._count(node, -held.num_held)
        self.withdraw(node)

    def set_quota(self, salt: bytes, quota: int | None, nodes: Iterable[Node]) -> None:
        """Limit a salt's tenant, or lift the limit; `nodes` are all there are."""
        self._tenants.pop(tenant_of(salt), None)
        if quota is None:
            return
        tenant = self._tenants[tenant_of(salt)] = Candidates(self._new_policy, quota)
        for node in nodes:
            held = node.held[self.number]
            if held is not None and not node.leases and self._limited(node) is tenant:
                tenant.num_blocks += held.num_held
                if not node.below[self.number]:
                    tenant.offer(node)

    def _offer(self, node: Node) -> None:
        self._all.offer(node)
        if self._tenants and (tenant := self._limited(node)) is not None:
            tenant.offer(node)

    def _count(self, node: Node, count: int) -> None:
        self._all.num_blocks += count
        if self._tenants and (tenant := self._limited(node)) is not None:
            tenant.num_blocks += count

    def _limited(self, node: Node) -> Candidates | None:
        """Those of the node's tenant, if it has a quota."""
        return self._tenants.get(tenant_of(node.domain[0]))

    def _gained(self, node: Node) -> None:
        """The tier holds something of this node now: what is above it is no leaf here any more."""
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
        """The tier holds nothing at or below this node now: what is above it may be a leaf here."""
        number, above = self.number, node.parent
        while above is not None:
            above.below[number] -= 1
            if above.below[number]:
                return
            if above.held[number] is not None:
                self.refresh(above)
                return
            above = above.parent
