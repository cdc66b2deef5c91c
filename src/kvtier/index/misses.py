"""MissList: records the removal of blocks from the tree, to explain later misses."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from kvtier.index.chain import Chain
from kvtier.index.node import Node


class MissReason(Enum):
    """Reason why a match ended: the state of the first block that did not match."""

    NONE = "every full block was found"
    NEVER_SEEN = "never cached, or removed too long ago to be recorded"
    EVICTED = "evicted to make room"
    EXPIRED = "its time to live has passed"
    DROPPED = "dropped on request"
    NOT_READY = "it is not readable in any tier now"
    OTHER_SALT = "the same tokens are cached under another salt or adapter"
    OTHER_LAYOUT = "cached for another model, dtype, layout or block size"
    DISABLED = "prefix caching is off"


@dataclass(frozen=True, slots=True)
class Miss:
    """The first block that did not match, and the reason.

    `time` is the logical time of the block's removal, or 0 for OTHER_SALT and NEVER_SEEN. If the match itself found the
    reason (see `Lease.stopped`), `time` is the logical time of the match. If the learned policy evicted the block
    because of its estimated value, `value` is this value, and `cell` is the index of the block's class in the policy.
    Otherwise `cell` is -1.
    """

    block: int
    reason: MissReason
    time: int = 0
    policy: str = ""
    cell: int = -1
    value: float = 0.0

    def __str__(self) -> str:
        when = f" at logical time {self.time} by {self.policy}" if self.policy else ""
        return f"block {self.block}: {self.reason.value}{when}"


# Block number, CRC of the block's content, and (salt, adapter).
_Mark = tuple[int, int, tuple[bytes, bytes]]
_Removal = tuple[MissReason, int, str, int, float]


class MissList:
    """A bounded list of the most recent removals from the tree, newest last.

    Eviction removes the last blocks of a node. A later match stops at the first of these blocks, so only this block
    gets an entry. An entry does not identify the prefix of its block, so equal blocks at the same position of different
    prompts share an entry. The explanation of a miss can therefore be wrong. Matches do not use this list.
    """

    def __init__(self, capacity: int = 16_384) -> None:
        self.capacity = capacity
        self._removed: OrderedDict[_Mark, _Removal] = OrderedDict()
        self._heads: dict[int, set[tuple[bytes, bytes]]] = {}

    def add(
        self,
        node: Node,
        block: int,
        reason: MissReason,
        time: int,
        policy: str = "",
        cell: int = -1,
        value: float = 0.0,
    ) -> None:
        """Record the removal of a node's last blocks, starting with the block at index `block` of the node."""
        removed = self._removed
        mark = (node.start + block, _crc_of(node, block), node.domain)
        removed[mark] = (reason, time, policy, cell, value)
        removed.move_to_end(mark)
        if len(removed) > self.capacity:
            removed.popitem(last=False)

    def explain(self, chain: Chain, block: int, time: int) -> Miss:
        """Return the reason for a miss at block number `block` of a chain, at logical time `time`."""
        crc = _crc(memoryview(chain.label(block)), chain.extras.get(block))
        removed = self._removed.get((block, crc, (chain.salt, chain.adapter)))
        if removed is not None and removed[1] <= time:
            return Miss(block, *removed)
        if block == 0 and self._heads.get(crc, set()) - {(chain.salt, chain.adapter)}:
            return Miss(block, MissReason.OTHER_SALT)
        return Miss(block, MissReason.NEVER_SEEN)

    def add_head(self, node: Node) -> None:
        """Record the salt and the adapter of a node that contains the first block of a prompt."""
        self._heads.setdefault(_crc_of(node, 0), set()).add(node.domain)

    def remove_head(self, node: Node) -> None:
        crc = _crc_of(node, 0)
        domains = self._heads.get(crc, set())
        domains.discard(node.domain)
        if not domains:
            self._heads.pop(crc, None)

    def other_layout(self) -> None:
        """Change the reason of all entries to OTHER_LAYOUT, after a change of the namespace."""
        self._removed = OrderedDict(
            (mark, (MissReason.OTHER_LAYOUT, removal[1], "", -1, 0.0)) for mark, removal in self._removed.items()
        )
        self._heads.clear()


def _crc_of(node: Node, block: int) -> int:
    return _crc(node.label(block), node.extras.get(node.start + block) if node.extras else None)


def _crc(label: memoryview, extra: bytes | None) -> int:
    """Return a CRC of a block's extras and of its first and last 16 tokens. Only explanations of misses use it."""
    crc = zlib.crc32(label) if len(label) <= 128 else zlib.crc32(label[-64:], zlib.crc32(label[:64]))
    return zlib.crc32(extra, crc) if extra else crc
