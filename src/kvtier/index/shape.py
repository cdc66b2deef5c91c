"""The shape of the tree: edges compared, split, joined and cut. No policy, no pools' slots freed here."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.index.chain import Chain
from kvtier.index.keys import KEY_BYTES
from kvtier.index.node import BlockState, Held, Node, Usage
from kvtier.index.pool import I32
from kvtier.index.tier import Tier
from kvtier.index.tokens import as_ids

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
            high = high or Held.nothing(upper.num_blocks)
            low = low or Held.nothing(node.num_blocks)
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


def can_grow(node: Node, usage: Usage) -> bool:
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
    new = Held(slots, bytearray((BlockState.READY,)) * len(slots))
    for number, held in enumerate(node.held):
        if held is not None:
            node.held[number] = held.joined(Held.nothing(len(slots)) if number else new)
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
