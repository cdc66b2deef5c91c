"""Index events for routers: blocks stored, blocks removed, and index cleared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtier.index.chain import Namespace
from kvtier.index.node import WRITING, Node, Residency
from kvtier.messages import KEY_BYTES


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks became readable in a tier. `parent` is the key of the block before the first block."""

    tier: str
    parent: bytes
    keys: bytes
    token_bytes: bytes
    is_first: bool = False
    """True if the first of these blocks has no block before it. `parent` is then a root key."""
    salt: bytes = b""
    adapter: bytes = b""
    """Salt and LoRA adapter of the blocks. Both are hashed into the keys."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Readable blocks were removed from a tier."""

    tier: str
    keys: bytes


@dataclass(frozen=True, slots=True)
class IndexCleared:
    """All blocks were removed from all tiers."""


Event = BlocksStored | BlocksRemoved | IndexCleared
Listener = Callable[[Event], None]


def last_key(node: Node, namespace: Namespace) -> bytes:
    """Return the key of a node's last block, or the root key for a root. This is the parent key of the next block."""
    return node.keys[-KEY_BYTES:] or namespace.root_key(*node.domain)


def stored_event(tier: str, node: Node, first: int, stop: int | None, namespace: Namespace) -> BlocksStored:
    """Return the event that reports blocks [first, stop) of a node as readable in a tier."""
    assert node.parent is not None
    stop = node.num_blocks if stop is None else stop
    parent = node.keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else last_key(node.parent, namespace)
    labels = bytes(node.labels[first * node.label_bytes : stop * node.label_bytes])
    keys = node.keys[first * KEY_BYTES : stop * KEY_BYTES]
    salt, adapter = node.domain
    return BlocksStored(tier, parent, keys, labels, not first and not node.parent.keys, salt, adapter)


def removed_event(tier: str, node: Node, held: Residency, first: int, stop: int | None) -> BlocksRemoved | None:
    """Return the event that reports the readable blocks in [first, stop) as removed; None if none is readable."""
    stored = np.frombuffer(bytes(held.states[first:stop]), np.uint8) > WRITING
    keys = np.frombuffer(node.keys, f"V{KEY_BYTES}")[first:stop][stored].tobytes()
    return BlocksRemoved(tier, keys) if keys else None
