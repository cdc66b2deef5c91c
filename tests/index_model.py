"""Reference model of the block index. It has one object per block, and every query walks over all blocks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 2
Content = tuple[tuple[int, ...], tuple[tuple[int, int, bytes], ...]]
Domain = tuple[bytes, bytes]
Name = tuple[Domain, tuple[Content, ...]]


def tenant(salt: bytes) -> bytes:
    """Return the part of a salt before the first NUL byte. This part names the tenant."""
    return salt.split(b"\0")[0]


def framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def namespace_bytes(model: str, revision: str, dtype: str, layout: str, block_tokens: int) -> bytes:
    named = {"model": model, "revision": revision, "dtype": dtype, "layout": layout, "block_tokens": str(block_tokens)}
    return hashlib.sha256(framed(*(part.encode() for item in named.items() for part in item))).digest()


def root_key(namespace: bytes, salt: bytes, adapter: bytes) -> bytes:
    return hashlib.sha256(b"kvtier block key 1\0" + namespace + framed(salt, adapter)).digest()


def block_contents(
    tokens: Sequence[int], media: Iterable[tuple[int, int, bytes]] = (), block_tokens: int = BLOCK_TOKENS
) -> list[Content]:
    """Return the tokens and the overlapping media items of each full block.

    Item positions are relative to the block.
    """
    contents = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        span = set(range(start, start + block_tokens))
        items = [(at - start, n, digest) for at, n, digest in sorted(media) if span & set(range(at, at + n))]
        contents.append((tuple(tokens[start : start + block_tokens]), tuple(items)))
    return contents


def key_of(above: bytes, content: Content) -> bytes:
    tokens, items = content
    ids = b"".join(token.to_bytes(4, "little") for token in tokens)
    extras = b"".join(framed(f"{at},{n}".encode(), digest) for at, n, digest in items)
    return hashlib.sha256(above + ids + extras).digest()


@dataclass(frozen=True)
class Spec:
    """The prompt of a request."""

    tokens: tuple[int, ...]
    media: tuple[tuple[int, int, bytes], ...] = ()
    domain: Domain = (b"", b"")

    @property
    def contents(self) -> list[Content]:
        return block_contents(self.tokens, self.media)


@dataclass(eq=False)
class Copy:
    """A copy of a block in one tier."""

    slot: int
    state: str = "ready"  # "writing" or "ready"
    readers: int = 0

    @property
    def readable(self) -> bool:
        return self.state == "ready"


@dataclass(eq=False)
class Block:
    parent: Block | None
    content: Content | None
    domain: Domain
    low: int = 0
    high: int = 0
    """`low` and `high` bound the logical time of the last use. In a new block, they are the times of the match and of
    the publication. Each use sets both to the same time."""
    priority: int = 0
    expires: float = math.inf
    attached: bool = True
    children: dict[Content, Block] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)

    @property
    def name(self) -> Name:
        """Return the domain, and the contents of all blocks from the root to this block."""
        contents: list[Content] = []
        at = self
        while at.parent is not None:
            assert at.content is not None
            contents.append(at.content)
            at = at.parent
        return self.domain, tuple(reversed(contents))

    def below(self) -> Iterator[Block]:
        """Yield this block and all its descendants."""
        yield self
        for child in self.children.values():
            yield from child.below()

    @property
    def best(self) -> int | None:
        return min((tier for tier, copy in self.copies.items() if copy.readable), default=None)


@dataclass(eq=False)
class Holder:
    """The model of a lease."""

    spec: Spec
    root: Block
    path: list[Block]
    table: list[int]
    since: int
    """Logical time of the match."""
    priority: int = 0
    ttl: float = math.inf
    spare: list[int] = field(default_factory=list)
    """Slots of published blocks that the device already held in other slots."""
    stopped: str | None = None
    """Name of the MissReason that ended the match, or "NONE" if every block up to the limit matched.

    If the next block is not in the tree, the value is None, because the model does not record why a block is missing.
    """
    num_matched: int = 0
    has_unused_blocks: bool = False
    """True if the lease has added blocks to the tree and has not used its path since then."""

    @property
    def end(self) -> Block:
        return self.path[-1] if self.path else self.root

    @property
    def own(self) -> list[int]:
        return self.table[len(self.path) :] + self.spare


class Model:
    """All blocks, leases and quotas."""

    def __init__(self, sizes: Sequence[int], *, exact_lru: bool, exclusive: bool = False) -> None:
        self.sizes = list(sizes)
        self.exact_lru = exact_lru
        self.exclusive = exclusive
        self.next_victims: list[dict[bytes | None, set[Name]]] = [{} for _ in sizes]
        """Names of the blocks that the tree will evict next, per tier and tenant. The key None stands for all tenants.
        The state machine of the tests copies these names from the tree before each eviction."""
        self.roots: dict[Domain, Block] = {}
        self.holders: list[Holder] = []
        self.reserved: list[dict[int, Domain]] = [{} for _ in sizes]
        """Per tier: reserved slots that do not belong to a block yet, with the domain of the owner."""
        self.quotas: list[dict[bytes, int]] = [{} for _ in sizes]
        self.clock = 0

    # ---- queries ----

    def blocks(self) -> Iterator[Block]:
        for root in self.roots.values():
            for child in root.children.values():
                yield from child.below()

    def held(self) -> set[Block]:
        return {block for holder in self.holders for block in holder.path}

    def evictable(self, tier: int, salt: bytes | None = None) -> list[Block]:
        held = self.held()
        return [
            block
            for block in self.blocks()
            if tier in block.copies and block not in held and salt in (None, tenant(block.domain[0]))
        ]

    def owners(self, tier: int) -> list[tuple[int, Domain]]:
        """Return every used slot of a tier with the domain of its owner. A slot with two owners is listed twice."""
        found = [
            (copy.slot, block.domain)
            for block in {*self.blocks(), *self.held()}
            for number, copy in block.copies.items()
            if number == tier
        ]
        if tier == 0:
            found += [(slot, holder.spec.domain) for holder in self.holders for slot in holder.own]
        return found + list(self.reserved[tier].items())

    def num_free(self, tier: int) -> int:
        return self.sizes[tier] - len(self.owners(tier))

    def used_by(self, tier: int, salt: bytes) -> int:
        return sum(tenant(domain[0]) == salt for _, domain in self.owners(tier))

    def content(self) -> dict[Name, dict[int, tuple[int, str, int]]]:
        return {
            block.name: {tier: (copy.slot, copy.state, copy.readers) for tier, copy in block.copies.items()}
            for block in self.blocks()
        }

    # ---- requests ----

    def match(self, spec: Spec, now: float, limit: int, priority: int, ttl: float) -> Holder:
        root = self.roots.setdefault(spec.domain, Block(None, None, spec.domain))
        held, path, at, stopped = self.held(), [], root, "NONE"
        for content in spec.contents[:limit]:
            child = at.children.get(content)
            if child is None:
                stopped = None
                break
            if child.expires <= now and child not in held:
                stopped = "EXPIRED"
                break
            if child.best is None:
                stopped = "NOT_READY"
                break
            path.append(child)
            at = child
        table = [block.copies[0].slot if 0 in block.copies and block.copies[0].readable else -1 for block in path]
        holder = Holder(spec, root, path, table, self.clock, priority, ttl, stopped=stopped, num_matched=len(path))
        self.holders.append(holder)
        return holder

    def publish(self, holder: Holder, num_tokens: int, now: float) -> tuple[int, int]:
        num_new = num_duplicate = 0
        if not holder.end.attached:
            return 0, 0
        for number in range(len(holder.path), num_tokens // BLOCK_TOKENS):
            content, slot = holder.spec.contents[number], holder.table[number]
            block = holder.end.children.get(content)
            if block is None:
                block = Block(holder.end, content, holder.spec.domain, holder.since, self.clock, holder.priority)
                block.expires = now + holder.ttl
                holder.end.children[content] = block
                holder.has_unused_blocks = True
            if 0 in block.copies:
                holder.spare.append(slot)
                num_duplicate += 1
            else:
                block.copies[0] = Copy(slot)
                num_new += 1
            holder.path.append(block)
        return num_new, num_duplicate

    def use(self, holder: Holder, now: float) -> None:
        self.clock += 1
        for block in holder.path:
            block.low = block.high = self.clock
            block.priority = max(block.priority, holder.priority)
            block.expires = max(block.expires, now + holder.ttl)
        holder.has_unused_blocks = False

    def release(self, holder: Holder, used: bool, now: float) -> None:
        if used:
            self.use(holder, now)
        self.holders.remove(holder)
        held = self.held()
        for block in holder.path:
            if block.attached and block not in held and not block.copies:
                self.forget(block)

    # ---- eviction ----

    def victims_needed(self, tier: int, n: int, salt: bytes) -> list[bytes | None] | None:
        """Return the tenant of each block that must be evicted to get n slots. None stands for any tenant.

        Return None instead of a list if too few blocks can be evicted.
        """
        salt = tenant(salt)
        quota, excess = self.quotas[tier].get(salt), 0
        if quota is not None and n:
            excess = max(0, self.used_by(tier, salt) + n - quota)
            if excess > len(self.evictable(tier, salt)):
                return None
        short = n - self.num_free(tier)
        if short > len(self.evictable(tier)):
            return None
        return [salt] * excess + [None] * (short - excess)

    def evict(self, tier: int, tenants: list[bytes | None], left: Iterable[Name]) -> None:
        """Evict all blocks of a tier except the blocks named in `left`.

        `tenants` is the result of `victims_needed`. Check that a valid eviction order for these tenants removes exactly
        the evicted blocks.
        """
        stayed = set(left)
        evicted = frozenset(block for block in self.blocks() if tier in block.copies and block.name not in stayed)
        assert len(evicted) == len(tenants), (
            f"{len(evicted)} blocks were evicted from tier {tier}, expected {len(tenants)}"
        )
        candidates = frozenset(self.evictable(tier))
        assert evicted <= candidates, "a leased block was evicted"
        assert self._explained(tier, tenants, evicted, candidates, set()), (
            f"tier {tier}: no valid eviction order removes exactly "
            f"{[(block.name, block.low, block.high, block.priority) for block in evicted]} from the candidates "
            f"{[(block.name, block.low, block.high, block.priority) for block in candidates]}"
        )
        for block in evicted:
            del block.copies[tier]
        for block in evicted:
            if not block.copies and block.attached:
                self.forget(block)

    def _explained(self, tier, tenants, evicted, candidates, seen) -> bool:
        if not tenants:
            return not evicted
        if evicted in seen:
            return False
        seen.add(evicted)
        return any(
            self._explained(tier, tenants[1:], evicted - {block}, candidates - {block}, seen)
            for block in self._victims(tier, tenants[0], candidates)
            if block in evicted
        )

    def _victims(self, tier: int, salt: bytes | None, candidates: frozenset[Block]) -> list[Block]:
        """Return the blocks that a tier may evict next, for one tenant or for any tenant."""
        mine = [block for block in candidates if salt in (None, tenant(block.domain[0]))]
        if self.exclusive and tier:
            needed = set().union(*self.next_victims[tier - 1].values())
            duplicates = [block for block in mine if tier - 1 in block.copies and block.name not in needed]
            if duplicates:
                return duplicates
        leaves = [block for block in mine if not any(b in candidates for b in block.below() if b is not block)]
        lowest = min((block.priority for block in leaves), default=0)
        leaves = [block for block in leaves if block.priority == lowest]
        chosen = self.next_victims[tier].get(salt, set())
        if any(block.name in chosen for block in leaves):
            return [block for block in leaves if block.name in chosen]
        oldest = min((block.high for block in leaves), default=0)
        return [block for block in leaves if block.low <= oldest or not self.exact_lru]

    def leaves(self, tier: int) -> list[Block]:
        """Return the evictable blocks of a tier that have no evictable descendants."""
        candidates = frozenset(self.evictable(tier))
        return [block for block in candidates if not any(b in candidates for b in block.below() if b is not block)]

    def check_new_victims(self, tier: int, new: set[Name]) -> None:
        """Check the next victims that the tree has just chosen. `new` contains their names.

        Every new victim must be evictable. Compare each new victim that is a leaf with each other leaf that is not a
        next victim. The victim's priority must not be higher. With exact LRU and equal priorities, the victim's `low`
        must not exceed the other leaf's `high`.
        """
        leaves, chosen = self.leaves(tier), set().union(*self.next_victims[tier].values())
        evictable = {block.name for block in self.evictable(tier)}
        assert new <= evictable, "a leased block was chosen as the next victim"
        for block in leaves:
            for other in leaves:
                if block.name in new and other.name not in chosen:
                    assert block.priority <= other.priority
                    assert block.priority < other.priority or block.low <= other.high or not self.exact_lru

    def forget(self, block: Block) -> int:
        """Remove a block and its descendants from the tree. Leased blocks keep their slots until the lease ends."""
        held = self.held()
        assert block.parent is not None
        del block.parent.children[block.content]
        removed = list(block.below())
        for descendant in removed:
            descendant.attached = False
            if descendant not in held:
                descendant.copies.clear()
        return len(removed)

    def expire(self, now: float) -> int:
        held = self.held()
        expired = [block for block in self.blocks() if block.expires <= now and block not in held]
        return sum(self.forget(block) for block in expired if block.attached)

    def drop(self, spec: Spec, first: int) -> int:
        at = self.roots.get(spec.domain)
        for content in spec.contents[: first + 1]:
            at = at.children.get(content) if at is not None else None
        return self.forget(at) if at is not None and len(spec.contents) > first else 0

    def reset(self) -> None:
        for root in self.roots.values():
            for child in list(root.children.values()):
                self.forget(child)
            root.attached = False
        self.roots.clear()
