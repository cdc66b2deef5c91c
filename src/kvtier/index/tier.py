"""Tier: a pool of slots, and the nodes whose blocks can be evicted from these slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from kvtier.errors import StateError
from kvtier.index.learned import Learned, learned
from kvtier.index.lookahead import Lookahead
from kvtier.index.node import ABSENT, IS_HELD, NO_SLOT, Node, Residency, mask_and
from kvtier.index.policies import Policy
from kvtier.index.pool import BlockPool, Shortage, Slots
from kvtier.index.tracker import ReuseTracker


def tenant_of(salt: bytes) -> bytes:
    """Return a salt's tenant, the part before the first NUL byte. Salts of a tenant share a quota, but no blocks."""
    return salt.partition(b"\0")[0]


class Candidates:
    """Candidates for eviction, ordered by priority and then by policy. `num_blocks` counts all evictable blocks.

    `duplicates` lists the nodes whose blocks may also be evicted as duplicates (see Tier). The last node in the list
    loses its duplicates first. Pass the number of the tier as `ahead` to choose the next victims early (see Lookahead).
    """

    __slots__ = ("_ahead", "_by_priority", "_in_order", "_new_policy", "duplicates", "num_blocks", "quota")

    def __init__(self, new_policy: Callable[[], Policy], quota: int = 0, ahead: int | None = None) -> None:
        self.quota = quota  # number of slots of a tenant; 0 for the candidates of all tenants
        self.num_blocks = 0
        self.duplicates: dict[Node, None] = {}
        self._ahead = ahead
        self._new_policy = new_policy
        self._by_priority: dict[int, Policy | Lookahead] = {}
        self._in_order: list[Policy | Lookahead] = []

    def offer(self, node: Node) -> None:
        policy = self._by_priority.get(node.usage.priority)
        if policy is None:
            policy = self._new_policy()
            if self._ahead is not None:
                policy = Lookahead(policy, self._ahead)
            self._by_priority[node.usage.priority] = policy
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

    def is_next(self, node: Node) -> bool:
        """True if the node is among the next victims."""
        policy = self._by_priority.get(node.usage.priority)
        return isinstance(policy, Lookahead) and node in policy.queue

    def look_ahead(self, num_blocks: int) -> list[Node]:
        """Choose next victims until they have `num_blocks` blocks. Return the nodes that were not chosen before."""
        pulled: list[Node] = []
        for policy in self._in_order:
            if num_blocks <= 0:
                break
            if isinstance(policy, Lookahead):
                pulled += policy.pull(num_blocks)
                num_blocks -= policy.num_blocks
        return pulled

    def check_next(self) -> None:
        """Raise StateError if the next victims are not counted correctly."""
        for policy in self._in_order:
            if isinstance(policy, Lookahead):
                policy.check()


class Tier:
    """A pool and its candidates for eviction. `number` is the index of the tier in Node.held; the fastest tier is 0.

    A node is a candidate if it has no lease, has blocks in this tier, and has no descendant with blocks in this tier:

        leases == 0  and  held[number].num_held > 0  and  below[number] == 0

    Transfers hold leases, so the blocks of a node without a lease are neither WRITING nor READING. `num_evictable`
    counts the blocks of all nodes without a lease, because a parent becomes a candidate after its children are evicted.
    If a tenant has a quota, its candidates are both in `everyone` and in `tenants`.

    An exclusive tier first evicts duplicates, which are blocks that the `faster` tier also holds. Their nodes may have
    descendants in this tier. Blocks of the faster tier's next victims are not evicted as duplicates, because this tier
    will soon hold their only copies.
    """

    def __init__(self, number: int, pool: BlockPool, new_policy: Callable[[], Policy]) -> None:
        self.number = number
        self.pool = pool
        self.name = pool.tier
        policy = new_policy()
        self.policy_name = policy.name
        self.learns = policy.name == Learned.name
        self.num_evicted = 0
        self.num_duplicates_evicted = 0
        """Number of evicted blocks that the faster tier also held. They may have to be copied to this tier again."""
        self.used_by: dict[bytes, int] = {}  # tenant -> number of slots
        self._new_policy = new_policy
        self.everyone = Candidates(new_policy)
        self.tenants: dict[bytes, Candidates] = {}
        """Candidates of each tenant with a quota."""
        self.faster: Tier | None = None
        """The next faster tier, if this tier is exclusive."""
        self.slower: Tier | None = None
        """The next slower tier, if the slower tier is exclusive."""

    def learn_from(self, tracker: ReuseTracker) -> None:
        """Use the learned policy, with a tracker that tiers share. Call this before the first block is cached."""
        self._new_policy = partial(learned, tracker)
        self.everyone = self._candidates()

    def exclude(self, faster: Tier) -> None:
        """Make this tier exclusive (see the class docstring). Call this before the first block is cached."""
        self.faster, faster.slower = faster, self
        faster.everyone = faster._candidates()

    def _candidates(self, quota: int = 0) -> Candidates:
        return Candidates(self._new_policy, quota, self.number if self.slower is not None else None)

    @property
    def num_evictable(self) -> int:
        return self.everyone.num_blocks

    def quota(self, salt: bytes) -> int | None:
        """Return the quota of a salt's tenant as a number of slots, or None if the tenant has no quota."""
        tenant = self.tenants.get(tenant_of(salt))
        return tenant.quota if tenant is not None else None

    def quota_shortage(self, salt: bytes, n: int) -> Shortage | None:
        """Return a Shortage if n more slots exceed the tenant's quota even after evicting all its evictable blocks."""
        tenant = self.tenants.get(tenant_of(salt))
        used = self.used_by.get(tenant_of(salt), 0)
        if tenant is None or used + n <= tenant.quota + tenant.num_blocks:
            return None
        name = tenant_of(salt).hex() or "no salt"
        return Shortage(self.name, n, max(0, tenant.quota - used), tenant.num_blocks, quota=name)

    def victim(self, salt: bytes | None = None) -> Node:
        """Return the next victim, of any tenant or of the tenant of `salt`. Raise StateError if there is none."""
        node = (self.everyone if salt is None else self.tenants[tenant_of(salt)]).victim()
        if node is None:
            raise StateError(f"{self.name}: {self.num_evictable} blocks counted as evictable, but no candidate left")
        return node

    def duplicate(self, salt: bytes | None = None) -> Node | None:
        """Return the next node with duplicates, of any tenant or of the tenant of `salt`, or None."""
        if self.faster is None:
            return None
        duplicates = (self.everyone if salt is None else self.tenants[tenant_of(salt)]).duplicates
        return next(reversed(duplicates)) if duplicates else None

    def duplicate_mask(self, node: Node) -> bytes:
        """Return one byte per block of a node: 1 if both this tier and the faster tier hold the block."""
        here = node.held[self.number]
        above = node.held[self.faster.number] if self.faster is not None else None
        if here is None or above is None:
            return bytes(node.num_blocks)
        return mask_and(bytes(here.states.translate(IS_HELD)), above.states.translate(IS_HELD))

    def duplicate_runs(self, node: Node, max_blocks: int) -> list[tuple[int, int]]:
        """Return runs of a node's blocks that the faster tier also holds, with at most `max_blocks` blocks in total.

        Runs near the beginning of the node come first. The faster tier evicts the end of a node first, so this tier
        keeps the copies of the last blocks longest. If all duplicates are returned, remove the node from `duplicates`.
        """
        both = self.duplicate_mask(node)
        runs, first = [], both.find(1)
        while first >= 0 and max_blocks:
            stop = both.find(0, first)
            stop = min(len(both) if stop < 0 else stop, first + max_blocks)
            max_blocks -= stop - first
            runs.append((first, stop))
            first = both.find(1, stop)
        if first < 0:
            self._unlist_duplicate(node)
        return runs

    def is_next(self, node: Node) -> bool:
        """True if the node is among the next victims of all tenants or of its own tenant."""
        if self.everyone.is_next(node):
            return True
        return bool(self.tenants) and (tenant := self._limited(node)) is not None and tenant.is_next(node)

    def look_ahead(self, num_blocks: int) -> list[Node]:
        """Choose next victims until they and the free slots make up about `num_blocks`. Return the new victims."""
        assert self.slower is not None
        pulled = self.everyone.look_ahead(num_blocks - self.pool.num_free)
        for name, tenant in self.tenants.items():  # for each tenant, at most a quarter of its quota
            wanted = min(num_blocks, tenant.quota // 4) - (tenant.quota - self.used_by.get(name, 0))
            pulled += tenant.look_ahead(wanted)
        for node in pulled:
            self.slower._unlist_duplicate(node)
        return pulled

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
        """Add blocks [first, first + len(slots)) of a leased node to this tier. The tier must not hold them yet."""
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
        """Remove blocks [first, stop) of a node from this tier. Return their slots, which the caller then owns.

        Set `cut` if the node will be truncated to `first` blocks.
        """
        held = node.held[self.number]
        if held is None:
            return Slots(self.name, np.empty(0, np.int32))
        slots = held.slots[first:stop] if first or stop is not None else held.slots
        if held.num_held < len(held.states) and ABSENT in held.states[first:stop]:
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
        if self.faster is not None:
            self._unlist_duplicate(node)
        if self.slower is not None:
            self.slower._unlist_duplicate(node)
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
            if self.faster is not None:
                self._unlist_duplicate(node)

    def unleased(self, node: Node) -> None:
        """Handle the end of the last lease on a node."""
        held = node.held[self.number]
        if held is not None:
            self._count(node, held.num_held)
            if not node.below[self.number]:
                self._offer(node)
            if self.faster is not None:
                self.list_duplicate(node)

    def list_duplicate(self, node: Node) -> None:
        """Add a node to `duplicates` if it satisfies the condition below, otherwise remove it.

        The node has blocks in this tier and in `faster`, has no lease, has not left the tree, and is not among the next
        victims of `faster`.
        """
        above = self.faster
        if above is None:
            return
        may_be = not node.leases and node.attached and node.held[self.number] is not None
        if may_be and node.held[above.number] is not None and not above.is_next(node):
            self.everyone.duplicates[node] = None
            if self.tenants and (tenant := self._limited(node)) is not None:
                tenant.duplicates[node] = None
        else:
            self._unlist_duplicate(node)

    def refresh(self, node: Node) -> None:
        """Make the node a candidate if it satisfies the condition in the class docstring."""
        if not (node.leases or node.below[self.number]) and node.attached and node.held[self.number] is not None:
            self._offer(node)

    def withdraw(self, node: Node) -> None:
        self.everyone.withdraw(node)
        if self.tenants and (tenant := self._limited(node)) is not None:
            tenant.withdraw(node)

    def unlinked(self, node: Node) -> None:
        """Handle the removal of a node and its descendants from the tree. An ancestor may become a candidate."""
        if node.held[self.number] is not None or node.below[self.number]:
            self._lower_above(node)

    def detached(self, node: Node) -> None:
        """Withdraw a node that was removed from the tree, and subtract its blocks from the evictable blocks."""
        held = node.held[self.number]
        if held is not None and node.leases == 0:
            self._count(node, -held.num_held)
        self.withdraw(node)
        if self.faster is not None:
            self._unlist_duplicate(node)

    def set_quota(self, salt: bytes, quota: int | None, nodes: Iterable[Node]) -> None:
        """Limit the number of slots for a salt's tenant; None removes the limit. `nodes` are all nodes of the tree."""
        self.tenants.pop(tenant_of(salt), None)
        tenant = None if quota is None else self._candidates(quota)
        if tenant is not None:
            self.tenants[tenant_of(salt)] = tenant
        for node in nodes:
            held = node.held[self.number]
            if self.slower is not None:
                self.slower.list_duplicate(node)  # the node may have been a next victim of the tenant
            if tenant is not None and held is not None and not node.leases and self._limited(node) is tenant:
                tenant.num_blocks += held.num_held
                if not node.below[self.number]:
                    tenant.offer(node)
                if node in self.everyone.duplicates:
                    tenant.duplicates[node] = None

    def _offer(self, node: Node) -> None:
        self.everyone.offer(node)
        if self.tenants and (tenant := self._limited(node)) is not None:
            tenant.offer(node)
        if self.slower is not None and node in self.slower.everyone.duplicates and self.is_next(node):
            self.slower._unlist_duplicate(node)  # the node is one of the next victims again

    def _unlist_duplicate(self, node: Node) -> None:
        self.everyone.duplicates.pop(node, None)
        if self.tenants and (tenant := self._limited(node)) is not None:
            tenant.duplicates.pop(node, None)

    def _count(self, node: Node, count: int) -> None:
        self.everyone.num_blocks += count
        if self.tenants and (tenant := self._limited(node)) is not None:
            tenant.num_blocks += count

    def _limited(self, node: Node) -> Candidates | None:
        """Return the candidates of the node's tenant, or None if the tenant has no quota."""
        return self.tenants.get(tenant_of(node.domain[0]))

    def _gained(self, node: Node) -> None:
        """Update the ancestors of a node that got its first block in this tier. They are no longer candidates."""
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
        """Update the ancestors of a node whose subtree left this tier. One of them may become a candidate."""
        number, above = self.number, node.parent
        while above is not None:
            above.below[number] -= 1
            if above.below[number]:
                return
            if above.held[number] is not None:
                self.refresh(above)
                return
            above = above.parent
