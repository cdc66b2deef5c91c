"""Compare pool, tree, leases and transfers with index_model.Model after every random call."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from index_cases import path_of, remove
from index_model import BLOCK_TOKENS, Copy, Holder, Model, Spec, block_contents, key_of, namespace_bytes, root_key
from kvtier.errors import KvtierError, StateError
from kvtier.index import (
    BlockPool,
    BlocksRemoved,
    BlocksStored,
    Chain,
    IndexCleared,
    Lease,
    MediaItem,
    MissReason,
    Namespace,
    RadixTree,
    Retention,
    Shortage,
    Slots,
    Tier,
    make_policy,
    transitions,
)
from kvtier.index.check import check_tree

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
STEPS = 50
# maps each number in Residency.states to (state, number of readers), as in the model
STATES = {1: ("writing", 0), **{2 + n: ("ready", n) for n in range(254)}}
REVISIONS = ("a", "b")
MOST_TOKENS = 13
DOMAINS = [(b"", b"")] * 4 + [(b"s", b""), (b"s\0x", b""), (b"", b"l"), (b"s", b"l")]
MEDIA = [()] * 4 + [((2, 2, b"x"),), ((1, 4, b"x"),), ((2, 2, b"y"),), ((4, 1, b"x"), (5, 2, b"y"))]


def spec_of(number: int) -> Spec:
    """Return a prompt of zeros and at most one 1. Pairs of such prompts share prefixes of many different lengths."""
    number, length = divmod(number, MOST_TOKENS + 1)
    number, flip = divmod(number, MOST_TOKENS + 1)
    number, domain = divmod(number, len(DOMAINS))
    tokens = tuple(int(at == flip) for at in range(MOST_TOKENS - length))
    return Spec(tokens, MEDIA[number], DOMAINS[domain])


SPECS = st.integers(0, (MOST_TOKENS + 1) ** 2 * len(DOMAINS) * len(MEDIA) - 1).map(spec_of)
ANY = st.integers(0, 11)
RETENTIONS = st.sampled_from([(0, math.inf)] * 4 + [(1, math.inf), (2, 3.0), (0, 2.0), (-1, 5.0)])


@dataclass(eq=False)
class LeasePair:
    """A lease and its counterpart in the model."""

    lease: Lease
    holder: Holder
    num_moves: int = 0


@dataclass(eq=False)
class Move:
    """A copy in flight. The machine does not release the lease of a copy before the copy ends."""

    owner: LeasePair
    source: int
    target: int
    first: int
    slots: list[int]


class Machine(RuleBasedStateMachine):
    NAMES = ("device",)
    steps: ClassVar[Counter[str]] = Counter()

    @initialize(
        sizes=st.tuples(st.integers(1, 16), st.integers(1, 10), st.integers(1, 10)),
        policy=st.sampled_from(["lru", "lru", "fifo", "s3fifo", "arc", "cost", "learned"]),
        exclusive=st.booleans(),
    )
    def start(self, sizes, policy, exclusive):
        self.sizes = sizes[: len(self.NAMES)]
        self.tiers = [
            Tier(number, BlockPool(name, size), lambda: make_policy(policy))
            for number, (name, size) in enumerate(zip(self.NAMES, self.sizes, strict=True))
        ]
        self.published: dict[str, set[bytes]] = {name: set() for name in self.NAMES}
        self.revision = REVISIONS[0]
        self.tree = RadixTree(self.namespace, self.tiers, listener=self.on_event, exclusive=exclusive)
        self.model = Model(self.sizes, exact_lru=policy == "lru", exclusive=exclusive)
        self.open: list[LeasePair] = []
        self.closed: list[Lease] = []
        self.in_flight: list[Move] = []
        self.memory: list[dict[int, object]] = [{} for _ in self.NAMES]
        self.now = 0.0

    @property
    def namespace(self) -> Namespace:
        return Namespace("m", self.revision, block_tokens=BLOCK_TOKENS)

    def on_event(self, event):
        if isinstance(event, IndexCleared):
            for keys in self.published.values():
                keys.clear()
            return
        keys = {event.keys[at : at + 32] for at in range(0, len(event.keys), 32)}
        assert keys
        assert len(keys) * 32 == len(event.keys)
        if isinstance(event, BlocksStored):
            assert not keys & self.published[event.tier], "a stored block was stored again"
            assert len(event.token_bytes) == len(keys) * BLOCK_TOKENS * 4
            self.published[event.tier] |= keys
        elif isinstance(event, BlocksRemoved):
            assert keys <= self.published[event.tier], "removed a block that was not stored"
            self.published[event.tier] -= keys

    # ---- requests ----

    def chain(self, spec: Spec) -> Chain:
        media = [MediaItem(*item) for item in spec.media]
        return Chain(self.namespace, spec.tokens, salt=spec.domain[0], adapter=spec.domain[1], media=media)

    def do_match(self, spec: Spec, limit: int, retention: tuple[int, float]) -> LeasePair:
        lease = self.tree.match(self.chain(spec), now=self.now, max_blocks=limit, retention=Retention(*retention))
        holder = self.model.match(spec, self.now, limit, *retention)
        pair = LeasePair(lease, holder)
        self.open.append(pair)
        assert lease.num_matched == lease.num_blocks == holder.num_matched
        assert lease.table.tolist() == holder.table
        assert (lease.stopped.name if lease.stopped else None) == holder.stopped
        assert self.tree.explain(lease).block == holder.num_matched
        assert self.tree.explain(lease).reason in MissReason
        path = path_of(lease)
        for block, tier, slot in zip(holder.path, path.tiers.tolist(), path.slots.tolist(), strict=True):
            assert (tier, slot) == (block.best, block.copies[tier].slot)
            assert self.memory[tier][slot] == block.name, "a matched slot holds another block"
        return pair

    def do_evict(self, tier: int, tenants: list[bytes | None]) -> None:
        content = observed(self.tree)
        self.model.evict(tier, tenants, [name for name, copies in content.items() if tier in copies])

    def note_next_victims(self) -> None:
        """Set the next victims of the model to the blocks that the tree has chosen."""
        names: dict[object, set] = {node: set() for node in self.tree.nodes()}
        observed(self.tree, names)
        self.model.next_victims = [
            {
                salt: set().union(*(names[node] for node in names if candidates.is_next(node)))
                for salt, candidates in {None: tier.everyone, **tier.tenants}.items()
            }
            for tier in self.tiers
        ]

    def do_reserve(self, tier: int, n: int, spec: Spec, call) -> list[int] | None:
        """Run `call`, which reserves n slots, and compare its result and evictions with the model."""
        self.note_next_victims()
        tenants = self.model.victims_needed(tier, n, spec.domain[0])
        before = observed(self.tree)
        slots = call()
        if tenants is None:
            assert isinstance(slots, Shortage)
            assert slots.wanted == n
            assert str(slots)
            assert observed(self.tree) == before
            return None
        assert isinstance(slots, Slots)
        assert slots.tier == self.NAMES[tier]
        assert len(slots) == len(set(slots.ids.tolist())) == n
        self.do_evict(tier, tenants)
        for slot in slots.ids.tolist():
            self.memory[tier][slot] = None
        return slots.ids.tolist()

    def do_allocate(self, pair: LeasePair, n: int) -> bool:
        slots = self.do_reserve(0, n, pair.holder.spec, lambda: self.tree.allocate(pair.lease, n))
        if slots is None:
            return False
        pair.holder.table += slots
        assert pair.lease.table.tolist() == pair.holder.table
        return True

    def do_publish(self, pair: LeasePair, num_blocks: int, more_tokens: int) -> None:
        holder, spec = pair.holder, pair.holder.spec
        num_tokens = min(num_blocks * BLOCK_TOKENS + more_tokens, len(spec.tokens))
        if num_tokens // BLOCK_TOKENS > len(holder.table):
            with pytest.raises(StateError):
                self.tree.publish(pair.lease, num_tokens, now=self.now)
            return
        for number in range(len(holder.path), num_tokens // BLOCK_TOKENS):
            self.memory[0][holder.table[number]] = (spec.domain, tuple(spec.contents[: number + 1]))
        before = sum(map(len, pair.lease.duplicate_slots))
        num_new = self.tree.publish(pair.lease, num_tokens, now=self.now)
        num_duplicate = sum(map(len, pair.lease.duplicate_slots)) - before
        assert (num_new, num_duplicate) == self.model.publish(holder, num_tokens, self.now)

    def do_release(self, pair: LeasePair, used: bool) -> None:
        # Before the first use of a new block, its TTL and priority in the tree can differ from those in the model.
        # Therefore, if a lease with a TTL or a priority has unused new blocks, set `used`. An engine always sets `used`
        # for a request that has published blocks.
        used = used or (pair.holder.has_unused_blocks and (pair.holder.ttl != math.inf or pair.holder.priority != 0))
        self.tree.release(pair.lease, used=used, now=self.now)
        self.model.release(pair.holder, used, self.now)
        self.open.remove(pair)
        self.closed.append(pair.lease)

    @rule(spec=SPECS, limit=st.sampled_from([99, 99, 99, 0, 1, 2, 4]), retention=RETENTIONS)
    def match(self, spec, limit, retention):
        if len(self.open) < 8:
            self.do_match(spec, limit, retention)

    @rule(spec=SPECS, retention=RETENTIONS, used=st.booleans())
    def whole_request(self, spec, retention, used):
        """Match, allocate, publish and release a request. On a shortage, release the request without publishing."""
        pair = self.do_match(spec, 99, retention)
        missing = pair.lease.num_missing(len(spec.tokens))
        assert missing == -(-len(spec.tokens) // BLOCK_TOKENS) - len(pair.holder.path)
        if self.do_allocate(pair, missing):
            self.do_publish(pair, len(spec.contents), 1)
            self.do_release(pair, used)
        else:
            self.do_release(pair, False)

    @rule(spec=SPECS, first=ANY, second=ANY)
    def two_equal_requests(self, spec, first, second):
        """Let two requests compute equal blocks in different slots. If both get slots, publish the blocks in turns."""
        pairs = [self.do_match(spec, 99, (0, math.inf)) for _ in range(2)]
        if all(self.do_allocate(pair, len(spec.contents) - len(pair.holder.path)) for pair in pairs):
            for pair, part in zip([*pairs, *pairs], [first, second, 99, 99], strict=True):
                self.do_publish(pair, part, 0)
        for pair in pairs:
            self.do_release(pair, True)

    @precondition(lambda self: self.open)
    @rule(which=ANY, n=st.integers(0, 6))
    def allocate(self, which, n):
        self.do_allocate(self.open[which % len(self.open)], n)

    @precondition(lambda self: self.open)
    @rule(which=ANY, num_blocks=st.integers(0, 7), more=st.integers(0, 1))
    def publish(self, which, num_blocks, more):
        self.do_publish(self.open[which % len(self.open)], num_blocks, more)

    @precondition(lambda self: self.open)
    @rule(which=ANY, tokens=st.lists(st.integers(0, 1), max_size=4))
    def extend(self, which, tokens):
        pair = self.open[which % len(self.open)]
        pair.lease.chain.append(tokens)
        spec = pair.holder.spec
        pair.holder.spec = Spec(spec.tokens + tuple(tokens), spec.media, spec.domain)

    @precondition(lambda self: self.open)
    @rule(which=ANY)
    def generate(self, which):
        """Append two tokens and allocate the missing slots. Without a shortage, publish the full blocks."""
        self.extend(which, [1, 0])
        pair = self.open[which % len(self.open)]
        missing = pair.lease.num_missing(len(pair.holder.spec.tokens))
        if self.do_allocate(pair, missing):
            self.do_publish(pair, len(pair.holder.spec.contents), 0)

    @precondition(lambda self: self.open)
    @rule(which=ANY)
    def commit(self, which):
        pair = self.open[which % len(self.open)]
        self.tree.commit(pair.lease, now=self.now)
        self.model.use(pair.holder, self.now)

    @precondition(lambda self: self.free_leases)
    @rule(which=ANY, used=st.booleans())
    def release(self, which, used):
        self.do_release(self.free_leases[which % len(self.free_leases)], used)

    @precondition(lambda self: self.free_leases)
    @rule(which=ANY, retention=RETENTIONS)
    def preempt_and_resume(self, which, retention):
        pair = self.free_leases[which % len(self.free_leases)]
        self.do_release(pair, True)
        self.do_match(pair.holder.spec, 99, retention)

    @precondition(lambda self: self.open)
    @rule(which=ANY, max_tokens=st.integers(1, 2))
    def match_within(self, which, max_tokens):
        """Match the tokens that follow a leased path with the first tokens of each next block on the device.

        The result must be the longest match, unless the prompt or a node below the path has media.
        """
        pair = self.open[which % len(self.open)]
        spec, end = pair.holder.spec, pair.holder.end
        tokens, held = spec.tokens[len(pair.holder.path) * BLOCK_TOKENS :][:max_tokens], self.model.held()
        hit = self.tree.match_within(pair.lease, max_tokens, max_children=99, now=self.now)
        expected = {
            child: num_common(tokens, child.content[0])
            for child in end.children.values()
            if 0 in child.copies
            and child.copies[0].readable
            and (child.attached or child in held)  # a dropped block stays readable until its last lease ends
            and (child.expires > self.now or child in held)
        }
        num_tokens = 0
        if hit is not None:
            lease, num_tokens = hit
            check_tree(self.tree, [*(each.lease for each in self.open), lease])
            names = {child.copies[0].slot: child for child in expected}
            assert num_tokens == expected[names[int(lease.table[-1])]] > 0
            assert len(lease.table) == len(pair.holder.path) + 1
            self.tree.release(lease, used=False)
        # The tree skips prompts with media, and nodes that contain a block with media.
        if not spec.media and not any(block.content[1] for child in expected for block in child.below()):
            assert num_tokens == max(expected.values(), default=0)

    @precondition(lambda self: self.closed)
    @rule(which=ANY)
    def use_released_lease(self, which):
        lease = self.closed[-1 - which % len(self.closed)]
        for call in (
            lambda: self.tree.release(lease),
            lambda: self.tree.release(lease, used=False),
            lambda: self.tree.allocate(lease, 1),
            lambda: self.tree.publish(lease, 0),
            lambda: self.tree.commit(lease),
            lambda: transitions.begin_read(lease, self.tiers[0], 0, 0),
        ):
            with pytest.raises(StateError, match="released"):
                call()

    @property
    def free_leases(self) -> list[LeasePair]:
        return [pair for pair in self.open if not pair.num_moves]

    # ---- operations ----

    @rule(spec=SPECS, first=st.integers(0, 5))
    def drop(self, spec, first):
        assert self.tree.drop(self.chain(spec), first=first) == self.model.drop(spec, first)

    @precondition(lambda self: self.open)
    @rule(which=ANY, cut=st.integers(1, 2))
    def drop_under_a_lease(self, which, cut):
        """Drop the end of a leased path and run another request that continues the remaining path."""
        holder = self.open[which % len(self.open)].holder
        left = len(holder.path) - cut
        if left > 0:
            self.drop(holder.spec, left)
            tokens = (*holder.spec.tokens[: left * BLOCK_TOKENS], 1, 1)
            self.whole_request(Spec(tokens, holder.spec.media, holder.spec.domain), (0, math.inf), True)

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.5]))
    def expire(self, seconds):
        self.now += seconds
        assert self.tree.expire(self.now) == self.model.expire(self.now)

    @rule(seconds=st.sampled_from([1.0, 2.5]))
    def advance_clock(self, seconds):
        self.now += seconds

    @rule(new_revision=st.booleans(), skip=st.integers(0, 3))
    def reset(self, new_revision, skip):
        if skip:  # most resets are skipped, so that blocks can grow old
            return
        if new_revision:
            old = self.chain(Spec((0, 0)))
            self.revision = REVISIONS[self.revision == REVISIONS[0]]
            self.tree.reset(self.namespace)
            with pytest.raises(KvtierError):
                self.tree.match(old)
        else:
            self.tree.reset()
        self.model.reset()

    @rule(tier=ANY, salt=st.sampled_from([b"", b"s"]), quota=st.sampled_from([None, 0, 2, 4, 8]))
    def set_quota(self, tier, salt, quota):
        tier %= len(self.tiers)
        self.tiers[tier].set_quota(salt, quota, self.tree.nodes())
        self.model.quotas[tier].pop(salt, None)
        if quota is not None:
            self.model.quotas[tier][salt] = quota

    @rule(tier=ANY, n=st.integers(0, 5))
    def evict(self, tier, n):
        tier %= len(self.tiers)
        enough = n <= len(self.model.evictable(tier))
        self.note_next_victims()
        shortage = self.tree.evict(self.tiers[tier], n)
        assert (shortage is None) == enough
        self.do_evict(tier, [None] * n if enough else [])

    @rule(tier=ANY, n=st.integers(1, 5))
    def evict_from_tenant(self, tier, n):
        tier %= len(self.tiers)
        for salt in self.model.quotas[tier]:
            enough = n <= len(self.model.evictable(tier, salt))
            self.note_next_victims()
            assert (self.tree.evict(self.tiers[tier], n, salt=salt) is None) == enough
            self.do_evict(tier, [salt] * n if enough else [])

    @rule(tier=ANY, n=st.integers(0, 5), salt=st.sampled_from([b"", b"s", b"s\0x"]))
    def reserve_and_give_back(self, tier, n, salt):
        tier %= len(self.tiers)
        spec = Spec((), (), (salt, b""))
        slots = self.do_reserve(tier, n, spec, lambda: self.tree.reserve(self.tiers[tier], n, salt))
        if slots is not None:
            reserved = Slots(self.NAMES[tier], np.array(slots, np.int32))
            self.tiers[tier].give_back(reserved, salt)
            if n:
                with pytest.raises(KvtierError):
                    self.tiers[tier].give_back(reserved, salt)

    @rule(tier=ANY, by=st.integers(-6, 6))
    def resize(self, tier, by):
        tier %= len(self.tiers)
        size = max(0, self.model.sizes[tier] + by)
        highest = max((slot for slot, _ in self.model.owners(tier)), default=-1)
        if highest >= size:
            with pytest.raises(StateError):
                self.tiers[tier].pool.resize(size)
        else:
            self.tiers[tier].pool.resize(size)
            self.model.sizes[tier] = size

    # ---- invariants ----

    @invariant()
    def check_against_model(self):
        self.steps[type(self).__name__] += 1
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree, [pair.lease for pair in self.open])
        assert observed(self.tree) == self.model.content()
        for number, tier in enumerate(self.tiers):
            owners = self.model.owners(number)
            used = {slot for slot, _ in owners}
            assert len(used) == len(owners), "two owners have the same slot"
            assert tier.pool.free_slots().tolist() == sorted(set(range(self.model.sizes[number])) - used)
            assert tier.num_evictable == len(self.model.evictable(number))
            for salt in (b"", b"s"):
                assert tier.used_by.get(salt, 0) == self.model.used_by(number, salt)
        for pair in self.open:
            assert pair.lease.num_blocks == len(pair.holder.path)
            for number, slot in enumerate(pair.holder.table[: len(pair.holder.path)]):
                if slot >= 0:
                    assert self.memory[0][slot] == pair.holder.path[number].name, "a leased slot was overwritten"

    @invariant()
    def check_published_keys(self):
        if not hasattr(self, "tree"):
            return
        readable: dict[str, set[bytes]] = {name: set() for name in self.NAMES}
        namespace = namespace_bytes("m", self.revision, "", "", BLOCK_TOKENS)
        waiting = [
            (child, root_key(namespace, *domain))
            for domain, root in self.model.roots.items()
            for child in root.children.values()
        ]
        while waiting:
            block, above = waiting.pop()
            key = key_of(above, block.content)
            for tier, copy in block.copies.items():
                if copy.state != "writing":
                    readable[self.NAMES[tier]].add(key)
            waiting += [(child, key) for child in block.children.values()]
        assert self.published == readable


class TieredMachine(Machine):
    """The machine with three tiers and copies between the tiers."""

    NAMES = ("device", "host", "disk")

    @precondition(lambda self: self.open)
    @rule(which=ANY, to=ANY, first=ANY, count=st.integers(1, 7))
    def begin_copy(self, which, to, first, count):
        """Start a copy of readable blocks to a tier that does not hold these blocks."""
        pair = self.open[which % len(self.open)]
        path = pair.holder.path
        if not path or len(self.in_flight) > 4:
            return
        target = to % len(self.tiers)
        first %= len(path)
        source = path[first].best
        if source is None or source == target:
            return
        run = []
        for block in path[first : first + count]:
            if target in block.copies or source not in block.copies or not block.copies[source].readable:
                break
            run.append(block)
        if not run:
            return
        spec = pair.holder.spec
        slots = self.do_reserve(
            target, len(run), spec, lambda: self.tree.reserve(self.tiers[target], len(run), spec.domain[0])
        )
        if slots is None:
            return
        transitions.begin_read(pair.lease, self.tiers[source], first, len(run))
        ids = Slots(self.NAMES[target], np.array(slots, np.int32))
        transitions.begin_write(pair.lease, self.tiers[target], first, ids)
        for block, slot in zip(run, slots, strict=True):
            block.copies[source].readers += 1
            block.copies[target] = Copy(slot, "writing")
        pair.num_moves += 1
        self.in_flight.append(Move(pair, source, target, first, slots))

    @rule(tier=st.integers(0, 1), n=st.integers(0, 6))
    def look_ahead(self, tier, n):
        """Choose the next victims of a tier. If the tier has no quotas, check the choice.

        A leaf that is not chosen must not have a lower priority than a newly chosen leaf. With LRU and equal
        priorities, its last use must not be earlier than that of the newly chosen leaf.
        """
        if not self.model.exclusive:
            return
        self.note_next_victims()
        before = set().union(*self.model.next_victims[tier].values())
        content = observed(self.tree)
        self.tiers[tier].look_ahead(n)
        assert observed(self.tree) == content
        self.note_next_victims()
        after = self.model.next_victims[tier]
        if not self.model.quotas[tier]:
            self.model.check_new_victims(tier, {name for name in after[None] - before if tier in content[name]})
            wanted = n - self.tiers[tier].pool.num_free
            # if a chosen node was split, the policy still counts the blocks of the whole node
            chosen = sum(policy.num_blocks for policy in self.tiers[tier].everyone._in_order)
            leaves = {block.name for block in self.model.leaves(tier)}
            assert chosen >= wanted or leaves <= after[None]

    @rule(spec=SPECS, to=st.integers(1, 2), ok=st.integers(0, 4))
    def store(self, spec, to, ok):
        """Run a request and copy its blocks to a slower tier if such a copy can start. Some copies fail."""
        if len(self.in_flight) > 4:
            return
        self.whole_request(spec, (0, math.inf), True)
        self.do_match(spec, 99, (0, math.inf))
        before = len(self.in_flight)
        self.begin_copy(len(self.open) - 1, to, 0, 99)
        if len(self.in_flight) > before:
            self.end(before, ok > 0)
        self.do_release(self.open[-1], True)

    @precondition(lambda self: self.open)
    @rule(which=ANY, tier=ANY, first=ANY, count=st.integers(1, 4))
    def remove(self, which, tier, first, count):
        """Remove blocks without readers from a tier, except device blocks in the table of a lease."""
        pair = self.open[which % len(self.open)]
        path = pair.holder.path
        if not path:
            return
        tier, first = tier % len(self.tiers), first % len(path)
        tables = {slot for other in self.open for slot in other.holder.table} if tier == 0 else set()
        run = 0
        for block in path[first : first + count]:
            copy = block.copies.get(tier)
            if copy is None or copy.state != "ready" or copy.readers or copy.slot in tables:
                break
            run += 1
        if run:
            remove(self.tree, pair.lease, self.tiers[tier], first, run)
            for block in path[first : first + run]:
                del block.copies[tier]

    @precondition(lambda self: self.in_flight)
    @rule(which=ANY, ok=st.booleans())
    def end(self, which, ok):
        move = self.in_flight.pop(which % len(self.in_flight))
        pair = move.owner
        pair.num_moves -= 1
        path = pair.holder.path
        count = len(move.slots)
        for block, slot in zip(path[move.first : move.first + count], move.slots, strict=True):
            source = block.copies[move.source]
            assert self.memory[move.source][source.slot] == block.name, "the source of a copy was overwritten"
            source.readers -= 1
            if ok:
                self.memory[move.target][slot] = block.name
                block.copies[move.target].state = "ready"
            else:
                del block.copies[move.target]
        transitions.end_read(pair.lease, self.tiers[move.source], move.first, count)
        transitions.end_write(self.tree, pair.lease, self.tiers[move.target], move.first, count, ok=ok)

    @precondition(lambda self: self.open)
    @rule(which=ANY, tier=ANY, first=ANY)
    def check_invalid_transitions_raise(self, which, tier, first):
        """Make invalid calls. The invariants then check that no block has changed."""
        pair = self.open[which % len(self.open)]
        path = pair.holder.path
        if not path:
            return
        tier, first = tier % len(self.tiers), first % len(path)
        copy, at, lease = path[first].copies.get(tier), self.tiers[tier], pair.lease
        refused = []
        if copy is None or not copy.readable:
            refused.append(lambda: transitions.begin_read(lease, at, first, 1))
        if copy is None or not copy.readers:
            refused.append(lambda: transitions.end_read(lease, at, first, 1))
        if copy is None or copy.state != "writing":
            refused.append(lambda: transitions.end_write(self.tree, lease, at, first, 1, ok=False))
        if any(tier in block.copies for block in path[first:]):
            slots = Slots(at.name, np.arange(len(path) - first, dtype=np.int32))
            refused.append(lambda: transitions.begin_write(lease, at, first, slots))
        other = Slots("elsewhere", np.zeros(1, np.int32))
        refused.append(lambda: transitions.begin_write(lease, at, first, other))
        refused.append(lambda: transitions.begin_read(lease, at, first, len(path)) if first else at.pool.release(other))
        for call in refused:
            with pytest.raises(KvtierError):
                call()


def observed(tree: RadixTree, names: dict | None = None) -> dict:
    """Return (slot, state, number of readers) of every block copy in the tree, by (domain, prefix) and tier.

    If `names` is given, add the (domain, prefix) of each block to `names[node]`.
    """
    content = {}
    prefixes: dict[object, tuple] = dict.fromkeys(tree.roots.values(), ())
    for node in tree.nodes():
        prefix = prefixes[node.parent]
        ids = np.frombuffer(bytes(node.labels), "<i4").reshape(-1, BLOCK_TOKENS).tolist()
        for number, tokens in enumerate(ids):
            prefix = (*prefix, (tuple(tokens), parse_extras((node.extras or {}).get(node.start + number, b""))))
            if names is not None:
                names[node].add((node.domain, prefix))
            content[node.domain, prefix] = {
                tier: (int(held.slots[number]), *STATES[held.states[number]])
                for tier, held in enumerate(node.held)
                if held is not None and held.states[number]
            }
        prefixes[node] = prefix
    return content


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of equal leading tokens."""
    return next((n for n in range(min(len(one), len(other)), 0, -1) if one[:n] == other[:n]), 0)


def parse_extras(extras: bytes) -> tuple:
    """Parse extras into media items (first, count, digest).

    For each item, the bytes contain b"first,count" and the digest. Eight bytes before each of them are its length.
    """
    parts = []
    while extras:
        size = int.from_bytes(extras[:8], "little")
        parts.append(extras[8 : 8 + size])
        extras = extras[8 + size :]
    return tuple((*map(int, place.split(b",")), digest) for place, digest in zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("machine", "examples"), [(Machine, 245), (TieredMachine, 245)])
def test_tree_equals_model_after_every_random_call(machine, examples):
    """Run at least 10,000 steps. KVTIER_SOAK multiplies this number."""
    before = machine.steps[machine.__name__]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * SOAK,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.steps[machine.__name__] - before >= 10_000 * SOAK


def test_model_assigns_media_to_overlapping_blocks():
    """Check the model itself. A media item belongs to the blocks that it overlaps."""
    contents = block_contents((1, 2, 3, 4, 5, 6, 7), [(2, 2, b"x"), (5, 1, b"y")])
    assert contents == [((1, 2), ()), ((3, 4), ((0, 2, b"x"),)), ((5, 6), ((1, 1, b"y"),))]
