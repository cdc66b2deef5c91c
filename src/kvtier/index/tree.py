"""RadixTree: which prefixes are where, who holds them, and what goes when room is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.index.chain import TOKEN_BYTES, Chain, Namespace
from kvtier.index.check import check_tree
from kvtier.index.events import IndexCleared, Listener
from kvtier.index.ghost import GhostCache
from kvtier.index.lease import Lease, PartialHit, Path, Published, Retention, path_to
from kvtier.index.misses import Miss, MissList, MissReason
from kvtier.index.node import NO_SLOT, READY, AccessStats, Node, device_slots, upwards
from kvtier.index.pool import I32, Shortage, Slots
from kvtier.index.tier import Tier
from kvtier.index.tree_edit import (
    TreeEvictor,
    TreeInserter,
    absorb_parent,
    common_blocks,
    common_tokens,
    split,
    were_one,
)

_NO_SLOTS = np.empty(0, np.int32)
_KEEP = Retention()


@dataclass(frozen=True, slots=True)
class TreeStats:
    """A tree in numbers."""

    num_nodes: int
    num_blocks: int
    num_leases: int
    num_evictable: tuple[int, ...]


class RadixTree:
    """A path-compressed tree over token blocks, one root for each salt and adapter.

    The edge is the unit: a match compares whole edges at memcmp speed, and a use, an eviction or a lease costs by edges
    and not by blocks. Not thread-safe, no clock: `now` is whatever the caller counts time to live in.
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
    ) -> None:
        if not tiers or [tier.number for tier in tiers] != list(range(len(tiers))):
            raise ArgumentError(f"tiers must be numbered 0, 1, .. fastest first, got {[tier.number for tier in tiers]}")
        self.namespace = namespace
        self.tiers = tuple(tiers)
        self.enabled = enabled
        self.with_keys = with_keys or listener is not None
        self.misses = misses or MissList()
        self.ghost = ghost
        self.clock = self.num_leases = 0
        self._listener = listener
        self._roots: dict[tuple[bytes, bytes], Node] = {}
        self._removal = TreeEvictor(self.tiers, self._roots, self.misses, listener)
        self._growth = TreeInserter(namespace, self.tiers, self.misses, listener, self.with_keys, self._hold)

    # ---- a request's life ------------------------------------------------------------------------------------------

    def match(
        self, chain: Chain, *, now: float = 0.0, max_blocks: int | None = None, retention: Retention = _KEEP
    ) -> Lease:
        """Lease the longest readable prefix of full blocks. Counts as a use only once it is committed."""
        if chain.namespace is not self.namespace and chain.namespace != self.namespace:
            raise ArgumentError(f"the chain is of {chain.namespace}, the tree of {self.namespace}")
        root = self._root(chain)
        want = chain.num_blocks if max_blocks is None else min(chain.num_blocks, max_blocks)
        if self.enabled:
            node, block, parts, stopped = self._descend(root, chain, want, now)
            table = _NO_SLOTS if not parts else parts[0] if len(parts) == 1 else np.concatenate(parts)
            lease = Lease(chain, node, block, table, retention, stopped, self.clock)
        else:
            lease = Lease(chain, root, 0, _NO_SLOTS, retention, MissReason.DISABLED, self.clock)
        self.num_leases += 1
        self._hold(lease.node, None)
        return lease

    def share(self, lease: Lease) -> Lease:
        """Another lease on the same path, without a table, to be released by itself: for whoever moves its blocks."""
        lease.must_be_open()
        return self._lease_of(lease.chain, lease.node, lease.retention, _NO_SLOTS)

    def match_within(self, lease: Lease, max_tokens: int, *, max_children: int, now: float = 0.0) -> PartialHit | None:
        """Lease the block below a lease that shares most of its next tokens, at most `max_tokens`.

        The child that begins with the very block is looked at first, then as many as told, newest first.
        """
        lease.must_be_open()
        chain, node = lease.chain, lease.node
        tail = chain.tail(lease.num_blocks, max_tokens)
        begins, best, longest = tail[:TOKEN_BYTES], None, 0
        exact = node.children.get(chain.key_at(lease.num_blocks)) if chain.num_blocks > lease.num_blocks else None
        some = (exact,) if exact is not None else itertools.islice(reversed(node.children.values()), max_children)
        for child in some:
            if not child.key.startswith(begins) or child.extras or chain.extras:
                continue
            held = child.held[0]
            if held is not None and held.states[0] >= READY and (child.usage.expires > now or child.leases):
                common = common_tokens(child.label(0), tail)
                if common > longest:
                    best, longest = child, common
        if best is None:
            return None
        if best.num_blocks > 1:
            best = split(best, 1, self.tiers)
        slots = [device_slots(each) for each in upwards(best)]
        found = self._lease_of(chain, best, lease.retention, np.concatenate(slots[::-1]))
        found.num_matched = lease.num_blocks
        return PartialHit(found, longest)

    def allocate(self, lease: Lease, n: int) -> Slots | Shortage:
        """n more device slots for the lease's table, evicting if need be: all or none. Its own until published."""
        lease.must_be_open()
        slots = self.reserve(self.tiers[0], n, lease.chain.salt)
        if isinstance(slots, Slots):
            lease.table = np.concatenate((lease.table, slots.ids)) if len(lease.table) else slots.ids
        return slots

    def publish(self, lease: Lease, computed_tokens: int, *, now: float = 0.0) -> Published:
        """Make the full blocks of what is computed matchable. Where others were first, the lease keeps its own copy."""
        lease.must_be_open()
        stop = self._publishable(lease, computed_tokens)
        first = block = lease.num_blocks
        if stop <= first or not self.enabled or not lease.node.attached:
            return Published(0, 0)
        node, num_adopted = lease.node, 0
        while block < stop:
            child = node.children.get(lease.chain.key_at(block))
            if child is None:
                break
            node, adopted = self._growth.join(lease, child, block, stop)
            num_adopted += node.num_blocks if adopted else 0
            block = node.stop
        num_duplicate = block - first - num_adopted
        if block < stop:
            usage = AccessStats(self.clock, self.clock, 0, lease.retention.priority, now + lease.retention.ttl)
            node = self._growth.grow(lease, node, block, stop, usage)
        lease.node, lease.num_blocks = node, stop
        return Published(stop - first - num_duplicate, num_duplicate)

    def graft(self, lease: Lease, tier: Tier, slots: Slots, *, now: float = 0.0) -> bool:
        """The blocks after a lease's path come from outside the tree into slots reserved in a tier: WRITING, and held.

        The lease then ends with them; `end_write` tells how it went. False, and nothing changes, where somebody else
        has brought or computed the first of them already. For a lease without slots of its own.
        """
        lease.must_be_open()
        first, stop = lease.num_blocks, lease.num_blocks + len(slots)
        if len(lease.table) != first or stop > lease.chain.num_blocks:
            raise StateError(
                f"cannot graft blocks [{first}, {stop}): the chain has {lease.chain.num_blocks} full blocks, "
                f"the lease {len(lease.table) - first} slots of its own"
            )
        if not self.enabled or not lease.node.attached or lease.chain.key_at(first) in lease.node.children:
            return False
        usage = AccessStats(self.clock, self.clock, 0, lease.retention.priority, now + lease.retention.ttl)
        lease.node = self._growth.graft(lease, lease.node, tier, slots, usage)
        lease.num_blocks = stop
        lease.table = np.concatenate((lease.table, np.full(len(slots), NO_SLOT, np.int32)))
        return True

    def pin(self, chain: Chain, *, now: float = 0.0) -> Lease:
        """Keep what is cached of a chain, in whatever tier, until it is unpinned."""
        return self.match(chain, now=now)

    def unpin(self, pin: Lease) -> None:
        """What `pin` returned may be evicted again."""
        self.release(pin, used=False)

    def commit(self, lease: Lease, *, now: float = 0.0) -> None:
        """The lease's path is used. However often this is called, it counts as one use."""
        lease.must_be_open()
        self._use(lease, now)
        lease.committed = True

    def release(self, lease: Lease, *, used: bool = True, now: float = 0.0) -> None:
        """End the lease: its own slots are free, its published blocks stay. `used=False` if it was not scheduled."""
        lease.must_be_open()
        if used:
            self._use(lease, now)
        lease.closed = True
        self.num_leases -= 1
        if len(lease.table) > lease.num_blocks or lease.spare:
            own = np.concatenate((lease.table[lease.num_blocks :], *lease.spare))
            self._removal.give_back(self.tiers[0], Slots(self.tiers[0].name, own), lease.chain.salt)
        self._let_go(lease.node)

    # ---- room ------------------------------------------------------------------------------------------------------

    def evict(self, tier: Tier, n: int, *, salt: bytes | None = None) -> Shortage | None:
        """Free n slots of a tier, leaves first, of one tenant with a quota or of all; or change nothing and say why."""
        if salt is not None and tier.quota(salt) is None:
            raise ArgumentError(f"{tier.name}: {salt.hex() or 'no salt'} has no quota, so its blocks are not listed")
        available = tier.num_evictable if salt is None else tier.evictable_by(salt)
        if n > available:
            return Shortage(tier.name, n, tier.pool.num_free, available)
        freed = self._removal.evict(tier, n, salt, self.clock)
        if freed:
            tier.pool.release(Slots(tier.name, np.concatenate(freed)))
        return None

    def reserve(self, tier: Tier, n: int, salt: bytes = b"") -> Slots | Shortage:
        """n slots of a tier for a tenant, evicting if need be: all or none. They are the caller's."""
        room = self._room(tier, n, salt)
        if isinstance(room, Shortage):
            return room
        # what is evicted goes straight to the caller: through the pool it would be freed and marked used again
        more = n - sum(map(len, room))
        if more or not room:
            slots = tier.pool.allocate(more)
            assert isinstance(slots, Slots)
            room.append(slots.ids)
        tier.use(salt, n)
        return Slots(tier.name, room[0] if len(room) == 1 else np.concatenate(room))

    def give_back(self, tier: Tier, slots: Slots, salt: bytes = b"") -> None:
        """Slots that were reserved and are not needed."""
        self._removal.give_back(tier, slots, salt)

    def _room(self, tier: Tier, n: int, salt: bytes) -> list[I32] | Shortage:
        """Evict as many blocks as n more slots for a tenant take, or change nothing and say why.

        What its quota has no room for must come from the tenant's own blocks, the rest from anybody's.
        """
        if n < 0:
            raise RangeError(f"cannot allocate {n} slots")
        short, over = n - tier.pool.num_free, 0
        quota = tier.quota(salt)
        if quota is not None and n:
            shortage = tier.quota_shortage(salt, n)
            if shortage is not None:
                return shortage
            over = max(0, tier.num_used_by(salt) + n - quota)
        if short > tier.num_evictable:
            return Shortage(tier.name, n, tier.pool.num_free, tier.num_evictable)
        if over > n:  # its quota was lowered: the excess goes first
            self.evict(tier, over - n, salt=salt)
            over = n
        freed = self._removal.evict(tier, over, salt, self.clock) if over else []
        return freed + self._removal.evict(tier, short - over, None, self.clock) if short > over else freed

    def demote(self, tier: Tier, chain: Chain) -> int:
        """Free the slots of a tier that hold blocks of a chain, or of what follows it, which another tier holds too;
        returns how many. What a lease covers stays, and so does what is above it."""
        lease = self.match(chain)
        node = lease.node
        self.release(lease, used=False)
        freed = self._removal.demote(tier, node, self.clock, below=0 < lease.num_blocks == chain.num_blocks)
        if freed:
            tier.pool.release(Slots(tier.name, np.concatenate(freed)))
        return sum(map(len, freed))

    def vacate(self, tier: Tier, first_slot: int = 0, detached: Iterable[Node] = ()) -> None:
        """Nothing stays in slots [first_slot, ..) of a tier: for memory that goes away. No lease's table may be in use,
        no transfer under way. `detached` are nodes that left the tree and are still leased."""
        self._removal.vacate(tier, [*self.nodes(), *detached], first_slot, self.clock)

    def lose(self, tier: Tier, slots: I32) -> int:
        """What is in these slots of a tier and ready there, with no reader, is in it no longer; returns how many."""
        return self._removal.lose(tier, list(self.nodes()), slots, self.clock)

    def expire(self, now: float) -> int:
        """Drop what no lease covers and whose time to live is over; returns the blocks dropped. Walks the tree."""
        over = [node for node in self.nodes() if node.usage.expires <= now and not node.leases]
        return sum(self._removal.detach(node, MissReason.EXPIRED, self.clock) for node in over if node.attached)

    def drop(self, chain: Chain, *, first: int = 0) -> int:
        """Forget blocks [first, ..) of a chain and all below them; what is leased is freed with its lease."""
        return self._removal.drop(chain, first, self.clock)

    def reset(self, namespace: Namespace | None = None) -> None:
        """Forget everything, and go on under another namespace if one is given. Leases live on with what they hold."""
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self._removal.detach(child, MissReason.DROPPED, self.clock)
            root.attached = False
        self._roots.clear()
        if namespace is not None and namespace != self.namespace:
            self.namespace = self._growth.namespace = namespace
            self.misses.other_layout()
        if self._listener:
            self._listener(IndexCleared())

    def set_quota(self, tier: Tier, salt: bytes, num_blocks: int | None) -> None:
        """At most that many slots of a tier for a salt's tenant (`tenant_of`); None lifts the limit."""
        tier.set_quota(salt, num_blocks, self.nodes())

    # ---- looking ---------------------------------------------------------------------------------------------------

    def path(self, lease: Lease) -> Path:
        """The lease's blocks in order, each with the fastest tier it can be read from."""
        return path_to(lease.node)

    def explain(self, lease: Lease) -> Miss:
        """Why the match stopped where it did."""
        if lease.stopped is not None:
            return Miss(lease.num_matched, lease.stopped, lease.matched_at)
        return self.misses.explain(lease.chain, lease.num_matched, lease.matched_at)

    def nodes(self) -> Iterator[Node]:
        """Every node with blocks, parents first."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def check(self, leases: Iterable[Lease] | None = None) -> None:
        """Raise, with the numbers, unless every invariant holds; `leases` are all that are open, if known."""
        check_tree(self, leases)

    @property
    def roots(self) -> dict[tuple[bytes, bytes], Node]:
        """Salt and adapter -> the empty node above all their blocks; not to be changed."""
        return self._roots

    @property
    def stats(self) -> TreeStats:
        """Walks the tree."""
        nodes = list(self.nodes())
        return TreeStats(
            len(nodes),
            sum(node.num_blocks for node in nodes),
            self.num_leases,
            tuple(tier.num_evictable for tier in self.tiers),
        )

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _lease_of(self, chain: Chain, node: Node, retention: Retention, table: I32) -> Lease:
        """A lease on the path that ends with a node."""
        self.num_leases += 1
        self._hold(node, None)
        return Lease(chain, node, node.stop, table, retention, None, self.clock)

    def _root(self, chain: Chain) -> Node:
        domain = (chain.salt, chain.adapter)
        root = self._roots.get(domain)
        if root is None:
            usage = AccessStats(self.clock, self.clock)
            root = self._roots[domain] = Node(None, domain, b"", 0, 0, memoryview(b""), usage, len(self.tiers))
        return root

    def _descend(
        self, node: Node, chain: Chain, want: int, now: float
    ) -> tuple[Node, int, list[I32], MissReason | None]:
        """Follow the chain down as far as it can be read, splitting where that ends inside an edge.

        The reason for stopping is None where the tree has no more of it: `explain` looks that up if someone asks.
        """
        block = 0
        parts: list[I32] = []
        while block < want:
            child = node.children.get(chain.key_at(block))
            if child is None:
                return node, block, parts, None
            if child.usage.expires <= now and not child.leases:
                return node, block, parts, MissReason.EXPIRED
            common = common_blocks(child, chain, block, want)
            held = child.held[0]
            is_ready = held is not None and held.states.count(READY) == child.num_blocks
            take = common if is_ready else min(common, child.num_readable())
            if take:
                node = child if take == child.num_blocks else split(child, take, self.tiers)
                block += take
                parts.append(device_slots(node))
            if take < common:
                return node, block, parts, MissReason.NOT_READY
        return node, block, parts, MissReason.NONE

    def _hold(self, node: Node | None, stop: Node | None) -> None:
        """One lease more on every node from here up to, and without, `stop`."""
        while node is not stop and node is not None:
            node.leases += 1
            if node.leases == 1 and node.parent is not None:
                for tier in self.tiers:
                    tier.leased(node)
            node = node.parent

    def _let_go(self, node: Node | None) -> None:
        """One lease fewer from here up to the root."""
        while node is not None:
            node.leases -= 1
            if node.leases == 0:
                if node.attached and node.parent is not None:
                    for tier in self.tiers:
                        tier.unleased(node)
                    held = node.held[0]
                    if held is None or held.num_held < node.num_blocks:
                        self._removal.forget(node, self.clock)
                elif not node.attached:
                    self._removal.empty(node)
                elif not node.children:
                    self._roots.pop(node.domain, None)
            node = node.parent

    def _use(self, lease: Lease, now: float) -> None:
        """The path was used now; matched blocks count a use the first time. Undoes splits nobody needs any more."""
        self.clock += 1
        if self.ghost is not None and not lease.committed:
            self.ghost.saw(lease.chain, lease.num_matched)
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
            if above.leases == node.leases and len(above.children) == 1 and were_one(above, node, priority, expires):
                absorb_parent(node, self.tiers)
            else:
                node = above

    def _publishable(self, lease: Lease, computed_tokens: int) -> int:
        """Blocks that are full once that many tokens are computed."""
        stop = computed_tokens // self.namespace.block_tokens
        if not 0 <= computed_tokens <= lease.chain.num_tokens:
            raise RangeError(f"{computed_tokens} tokens computed, the chain has {lease.chain.num_tokens}")
        if stop > len(lease.table):
            raise StateError(f"{computed_tokens} tokens fill {stop} blocks, the lease has {len(lease.table)} slots")
        return stop

    # ---- for transfers ---------------------------------------------------------------------------------------------

    def stored(self, tier: Tier, node: Node, first: int, stop: int) -> None:
        """Blocks [first, stop) of a node can be read from a tier from now on: tell the listener."""
        self._growth.stored(tier, node, first, stop)

    def lost(self, tier: Tier, node: Node, first: int, stop: int) -> None:
        """Blocks [first, stop) of a leased node leave a tier; where that was the last, they go with their lease."""
        self._removal.lost(tier, node, first, stop)
