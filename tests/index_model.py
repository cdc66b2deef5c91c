"""The block index as one object per block, every question answered by a walk: what tests compare kvtier.index with."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 2
Content = tuple[tuple[int, ...], tuple[tuple[int, int, bytes], ...]]
Domain = tuple[bytes, bytes]


def tenant(salt: bytes) -> bytes:
    """Whom a salt's blocks count for: the part before a NUL."""
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
    """The full blocks: their tokens and, relative to the block, every item that shares a token with it."""
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
    """What a request asks for."""

    tokens: tuple[int, ...]
    media: tuple[tuple[int, int, bytes], ...] = ()
    domain: Domain = (b"", b"")

    @property
    def contents(self) -> list[Content]:
        return block_contents(self.tokens, self.media)


@dataclass(eq=False)
class Copy:
    """A block in one tier."""

    slot: int
    state: str = "ready"  # writing, ready
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
    """Last used between these two logical times: they differ for blocks that were published and never used."""
    high: int = 0
    priority: int = 0
    expires: float = math.inf
    attached: bool = True
    children: dict[Content, Block] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)

    @property
    def name(self) -> tuple[Domain, tuple[Content, ...]]:
        """Salt, adapter and the contents of all blocks from the first to this one."""
        contents: list[Content] = []
        at = self
        while at.parent is not None:
            assert at.content is not None
            contents.append(at.content)
            at = at.parent
        return self.domain, tuple(reversed(contents))

    def below(self) -> Iterator[Block]:
        """This block and all under it."""
        yield self
        for child in self.children.values():
            yield from child.below()

    @property
    def best(self) -> int | None:
        return min((tier for tier, copy in self.copies.items() if copy.readable), default=None)


@dataclass(eq=False)
class Holder:
    """A lease."""

    spec: Spec
    root: Block
    path: list[Block]
    table: list[int]
    since: int
    priority: int = 0
    ttl: float = math.inf
    spare: list[int] = field(default_factory=list)
    stopped: str | None = None
    num_matched: int = 0
    unused_blocks: bool = False
    """It published blocks and did not use its path since."""

    @property
    def end(self) -> Block:
        return self.path[-1] if self.path else self.root

    @property
    def own(self) -> list[int]:
        return self.table[len(self.path) :] + self.spare


class Model:
    """The cache."""

    def __init__(self, sizes: Sequence[int], *, exact_lru: bool) -> None:
        self.sizes = list(sizes)
        self.exact_lru = exact_lru
        self.roots: dict[Domain, Block] = {}
        self.holders: list[Holder] = []
        self.reserved: list[dict[int, Domain]] = [{} for _ in sizes]
        """Slots handed out by `reserve` that are in no block yet."""
        self.quotas: list[dict[bytes, int]] = [{} for _ in sizes]
        self.clock = 0

    # ---- looking ----

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
        """Every slot of a tier that is not free, with whom it counts for; a slot that comes twice has two owners."""
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

    def content(self) -> dict[tuple[Domain, tuple[Content, ...]], dict[int, tuple[int, str, int]]]:
        return {
            block.name: {tier: (copy.slot, copy.state, copy.readers) for tier, copy in block.copies.items()}
            for block in self.blocks()
        }

    # ---- a request ----

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
                holder.unused_blocks = True
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
        holder.unused_blocks = False

    def release(self, holder: Holder, used: bool, now: float) -> None:
        if used:
            self.use(holder, now)
        self.holders.remove(holder)
        held = self.held()
        for block in holder.path:
            if block.attached and block not in held and not block.copies:
                self.forget(block)

    # ---- room ----

    def victims_needed(self, tier: int, n: int, salt: bytes) -> list[bytes | None] | None:
        """Of whom the blocks must be that go for n slots, in order; None if it cannot be done."""
        salt = tenant(salt)
        quota, over = self.quotas[tier].get(salt), 0
        if quota is not None and n:
            over = max(0, self.used_by(tier, salt) + n - quota)
            if over > len(self.evictable(tier, salt)):
                return None
        short = n - self.num_free(tier)
        if short > len(self.evictable(tier)):
            return None
        return [salt] * over + [None] * (short - over)

    def evict(self, tier: int, whose: list[bytes | None], left: Iterable[tuple[Domain, tuple[Content, ...]]]) -> None:
        """Blocks left the tier, those named in `left` stayed: some order must explain it, leaves and oldest first."""
        stayed = set(left)
        gone = frozenset(block for block in self.blocks() if tier in block.copies and block.name not in stayed)
        assert len(gone) == len(whose), f"{len(gone)} blocks left tier {tier}, {len(whose)} should have"
        candidates = frozenset(self.evictable(tier))
        assert gone <= candidates, "a leased block was evicted"
        assert self._explained(tier, whose, gone, candidates, set()), (
            f"tier {tier}: no order of eviction explains that these left: "
            f"{[(block.name, block.low, block.high, block.priority) for block in gone]}, of "
            f"{[(block.name, block.low, block.high, block.priority) for block in candidates]}"
        )
        for block in gone:
            del block.copies[tier]
        for block in gone:
            if not block.copies and block.attached:
                self.forget(block)

    def _explained(self, tier, whose, gone, candidates, seen) -> bool:
        if not whose:
            return not gone
        if gone in seen:
            return False
        seen.add(gone)
        leaves = [
            block
            for block in candidates
            if whose[0] in (None, tenant(block.domain[0]))
            and not any(b in candidates for b in block.below() if b is not block)
        ]
        lowest = min((block.priority for block in leaves), default=0)
        leaves = [block for block in leaves if block.priority == lowest]
        oldest = min((block.high for block in leaves), default=0)
        return any(
            self._explained(tier, whose[1:], gone - {block}, candidates - {block}, seen)
            for block in leaves
            if block in gone and (block.low <= oldest or not self.exact_lru)
        )

    def forget(self, block: Block) -> int:
        """A block and all below it leave the tree; what is leased keeps its slots until it is released."""
        held = self.held()
        assert block.parent is not None
        del block.parent.children[block.content]
        gone = list(block.below())
        for each in gone:
            each.attached = False
            if each not in held:
                each.copies.clear()
        return len(gone)

    def expire(self, now: float) -> int:
        held = self.held()
        over = [block for block in self.blocks() if block.expires <= now and block not in held]
        return sum(self.forget(block) for block in over if block.attached)

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
