"""Functions that compare, split, join, extend and cut nodes of the radix tree.

RadixTree (kvtier.index.tree) calls these functions, and owns the roots, the tiers and the logical clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvtier.index.chain import TOKEN_BYTES, Chain, as_ids, chain_keys
from kvtier.index.events import last_key
from kvtier.index.node import NO_SLOT, READY, AccessStats, Node, Residency
from kvtier.index.pool import Slots
from kvtier.index.tier import Tier
from kvtier.messages import I32, KEY_BYTES

# Extending a leaf copies its labels. If its labels have at least this many bytes, new blocks form a new node instead.
GROW_BYTES = 64 * 1024


def common_blocks(node: Node, chain: Chain, block: int, stop: int) -> int:
    """Count the leading blocks of a node that equal the chain's blocks [block, stop) in tokens and extras."""
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


def closest_child(node: Node, chain: Chain, max_tokens: int, max_children: int, now: float) -> tuple[Node | None, int]:
    """Find the child on the device whose first block shares the most leading tokens with the chain's next block.

    Return the child and the number of shared tokens. If a child on the device begins with exactly the chain's next
    block, compare only this child. Otherwise compare the `max_children` newest children. Skip a child that has extras
    (digests of media) in any of its blocks. If the chain has extras, compare no child.
    """
    if not node.children:
        return None, 0
    block, closest, longest = node.stop, None, 0
    tail = chain.tail(block, max_tokens)
    exact = node.children.get(chain.key_at(block)) if chain.num_blocks > block else None
    newest = islice(reversed(node.children.values()), max_children)
    some = (exact,) if exact is not None and _is_on_device(exact, now) else newest
    for child in some:
        if not child.key.startswith(tail[:TOKEN_BYTES]) or child.extras or chain.extras:
            continue
        if _is_on_device(child, now):
            same = as_ids(child.label(0)[: len(tail)]) == as_ids(tail)
            common = len(same) if same.all() else int(same.argmin())
            if common > longest:
                closest, longest = child, common
    return closest, longest


def _is_on_device(node: Node, now: float) -> bool:
    """True if the first block of a node can be read on the device, and the node is leased or has not expired."""
    held = node.held[0]
    return held is not None and held.states[0] >= READY and (node.usage.expires > now or node.leases > 0)


def split(node: Node, count: int, tiers: Sequence[Tier]) -> Node:
    """Split a node after `count` blocks. Return the new node, which contains the upper part.

        parent --[ b0 b1 b2 b3 ]-- children          parent --[ b0 b1 ]--[ b2 b3 ]-- children
                      node                                      upper      node

    The lower part stays in the same object, so its leases and its place among the candidates remain valid.
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
        tier.list_duplicate(upper)
        tier.list_duplicate(node)
    return upper


def absorb_parent(node: Node, tiers: Sequence[Tier]) -> None:
    """Undo a split: prepend the parent's blocks to the node. The node must be the parent's only child."""
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
            high = high or Residency.absent(upper.num_blocks)
            low = low or Residency.absent(node.num_blocks)
            node.held[tier.number] = high.joined(low)
    node.usage.uses = max(node.usage.uses, upper.usage.uses)
    node.start, node.num_blocks = upper.start, upper.num_blocks + node.num_blocks
    node.parent, node.key = upper.parent, upper.key
    node.parent.children[node.key] = node
    upper.attached = False
    for tier in tiers:
        tier.refresh(node)


def can_join(upper: Node, node: Node, priority: int, expires: float) -> bool:
    """True if a node and its parent `upper` can be joined: creation time, touch, priority and expiry are equal.

    The root and nodes that have left the tree cannot be joined. `priority` and `expires` come from a use of the path
    that has been recorded in the node, but not yet in the parent.
    """
    mine, above = node.usage, upper.usage
    return (
        upper.parent is not None
        and node.attached
        and above.created == mine.created
        and above.touch is mine.touch
        and max(above.priority, priority) == mine.priority
        and max(above.expires, expires) == mine.expires
    )


def can_grow(node: Node, usage: AccessStats) -> bool:
    """True if blocks with the statistics `usage` can be appended to `node`.

    The node must be a short leaf of the tree with one lease and blocks in tier 0. Its priority and its expiry must not
    exceed those of `usage`.
    """
    return (
        node.leases == 1
        and node.usage.priority <= usage.priority
        and node.usage.expires <= usage.expires
        and not node.children
        and node.attached
        and len(node.labels) < GROW_BYTES
        and node.held[0] is not None
    )


def lengthen(
    node: Node, labels: memoryview, keys: bytes, extras: dict[int, bytes] | None, tier: int, slots: I32, state: int
) -> None:
    """Append blocks to a leaf that has blocks in the tier `tier`. The new blocks are in this tier only."""
    new = Residency(slots, bytearray((state,)) * len(slots))
    for number, held in enumerate(node.held):
        if held is not None:
            node.held[number] = held.joined(new if number == tier else Residency.absent(len(slots)))
    node.num_blocks += len(slots)
    node.labels = memoryview(bytes(node.labels) + bytes(labels))
    node.keys += keys
    if extras:
        node.extras = {**(node.extras or {}), **extras}


def truncate(node: Node, count: int) -> None:
    """Keep the first `count` blocks of a node. Tier.take must already have removed all other blocks from the tiers."""
    at = count * node.label_bytes
    node.labels = _own(node.labels[:at])
    node.keys = node.keys[: count * KEY_BYTES]
    node.num_blocks = count
    if node.extras:
        node.extras = {block: extra for block, extra in node.extras.items() if block < node.stop}


def _own(labels: memoryview) -> memoryview:
    """Copy labels that fill less than half of their buffer, because a short view must not keep a large buffer alive."""
    return labels if 2 * labels.nbytes >= memoryview(labels.obj).nbytes else memoryview(bytes(labels))


def content_below(
    node: Node, chain: Chain, block: int, stop: int, *, with_keys: bool
) -> tuple[memoryview, bytes, dict[int, bytes] | None]:
    """Return labels, keys and extras of the chain's blocks [block, stop), which follow the blocks of a node."""
    labels, keys = chain.label_view(block, stop), b""
    if with_keys:
        if chain.num_keys >= block:  # the chain already has the keys of all earlier blocks
            keys = b"".join(chain.key_list(block, stop))
        else:  # continue from the node's last key: computing the keys of the whole path could take long
            above = last_key(node, chain.namespace)
            keys = b"".join(chain_keys(above, labels, chain.label_bytes, chain.extras, block))
    extras = {i: extra for i, extra in chain.extras.items() if block <= i < stop} if chain.extras else None
    return labels, keys, extras


def add_lease(node: Node | None, stop: Node | None, tiers: Sequence[Tier]) -> None:
    """Add one lease to a node and to each of its ancestors below `stop`."""
    while node is not stop and node is not None:
        node.leases += 1
        if node.leases == 1 and node.parent is not None:
            for tier in tiers:
                tier.leased(node)
        node = node.parent


def free_detached(node: Node, tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        held = node.held[tier.number]
        if held is not None:
            node.held[tier.number] = None
            tier.give_back(Slots(tier.name, held.slots[held.slots != NO_SLOT]), node.domain[0])
