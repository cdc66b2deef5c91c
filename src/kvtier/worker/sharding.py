"""Sharding of blocks for stores, so that stored objects do not depend on the number of ranks.

A block is stored as one object per cache group and shard of the KV heads. The number S of shards is fixed for a store.
If there are n ranks, rank r reads and writes the shards [r S/n, (r + 1) S/n). Tensors that are replicated on every
rank, such as a latent or an indexer, form a separate object. Rank 0 writes this object, and all ranks read it. A
disk store keeps this object in the folder of shard 0, so ranks without access to this folder do not find the object.

    4 heads of one token on 1 rank      | h0 h1 h2 h3 |
    4 heads of one token on 2 ranks     | h0 h1 |  | h2 h3 |
    object of shard 2 of 4, both cases  | h2 of token 0 | h2 of token 1 | ..

An object contains the shard's part of each tensor, in the order of the tensors in the block. These parts are gathered
before a write and scattered after a read. If a rank has one shard and no replicated tensors, the object is the rank's
whole block, so nothing is gathered or scattered.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.layout import CacheGroup, Span, TensorSpec
from kvtier.messages import KEY_BYTES, split_keys

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Sharding:
    """One of `num_ranks` ranks, and the number of shards into which the store divides each block."""

    rank: int = 0
    num_ranks: int = 1
    num_shards: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks:
            raise ArgumentError(f"invalid rank {self.rank} of {self.num_ranks}")
        if self.num_shards < 1 or self.num_shards % self.num_ranks:
            raise ArgumentError(
                f"{self.num_ranks} ranks cannot divide {self.num_shards} shards of a block equally; choose a number of "
                f"shards that is a multiple of every number of ranks that will read the store"
            )

    @property
    def shards(self) -> range:
        count = self.num_shards // self.num_ranks
        return range(self.rank * count, (self.rank + 1) * count)


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes [start, start + width) of each of `num_rows` consecutive rows in a rank's block.

    For example, a row has the K vectors of one token for all heads, and the piece selects some of the heads. The first
    row is at `offset`, and a row has `row_bytes` bytes. A contiguous piece has one row.
    """

    offset: int
    num_rows: int
    row_bytes: int
    start: int
    width: int

    @classmethod
    def of(cls, offset: int, num_rows: int, row_bytes: int, start: int, width: int) -> Piece:
        if width < row_bytes and num_rows > 1:
            return cls(offset, num_rows, row_bytes, start, width)
        nbytes = num_rows * width
        return cls(offset + start, 1, nbytes, 0, nbytes)

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.width

    def joined(self, other: Piece) -> Piece | None:
        """Return the union of both pieces, or None if they do not form one piece in this order."""
        if self.offset + self.num_rows * self.row_bytes != other.offset:
            return None
        if self.num_rows == other.num_rows == 1:
            return Piece.of(self.offset, 1, self.row_bytes + other.row_bytes, 0, self.width + other.width)
        if (self.row_bytes, self.start, self.width) == (other.row_bytes, other.start, other.width):
            return replace(self, num_rows=self.num_rows + other.num_rows)
        return None

    def rows(self, block: Bytes) -> Bytes:
        """Return the bytes of the piece in a block, as a view [row, column]."""
        whole = block[self.offset : self.offset + self.num_rows * self.row_bytes]
        return whole.reshape(self.num_rows, self.row_bytes)[:, self.start : self.start + self.width]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectPart:
    """Part of a rank's block that is stored in one object."""

    group: int
    shard: int | None
    """None if the part is not sharded."""
    pieces: tuple[Piece, ...]
    name: bytes
    """Distinguishes the objects of a block. If it is empty, the object has the same key as the block."""
    is_written: bool
    """True if this rank writes the object."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def span(self) -> Span | None:
        """Location of the part in the block, or None if the part is not contiguous."""
        (only, *others) = self.pieces
        return Span(only.offset, only.nbytes) if not others and only.num_rows == 1 else None

    def namespace(self, fingerprint: bytes) -> bytes:
        return hashlib.sha256(fingerprint + self.name).digest() if self.name else fingerprint

    def key_list(self, keys: bytes) -> list[bytes]:
        """Convert block keys to object keys, or object keys to block keys. The mapping is its own inverse."""
        if self.name:
            mask = np.frombuffer(hashlib.sha256(self.name).digest(), np.uint8)
            keys = (np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES) ^ mask).tobytes()
        return split_keys(keys)

    def gather(self, block: Bytes, data: Bytes) -> None:
        for in_block, in_object in self._pairs(block, data):
            in_object[:] = in_block

    def scatter(self, data: Bytes, block: Bytes) -> None:
        for in_block, in_object in self._pairs(block, data):
            in_block[:] = in_object

    def _pairs(self, block: Bytes, data: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield two views [row, column] of each piece: one of the block and one of the object."""
        at = 0
        for piece in self.pieces:
            yield piece.rows(block), data[at : at + piece.nbytes].reshape(piece.num_rows, piece.width)
            at += piece.nbytes


def parts_of(groups: Sequence[CacheGroup], sharding: Sharding) -> tuple[ObjectPart, ...]:
    """Return the parts of a rank's block. `groups` are the cache groups of this rank (see `KVLayout.of_rank`)."""
    return tuple(part for number, group in enumerate(groups) for part in _parts_of_group(number, group, sharding))


def _parts_of_group(number: int, group: CacheGroup, sharding: Sharding) -> Iterator[ObjectPart]:
    name = b"group " + group.name.encode() if number else b""
    is_first = sharding.rank == 0
    has_heads = [spec.head_axis is not None for _, spec, _ in group.tensors()]
    if sharding.num_shards == 1 or not any(has_heads):
        yield ObjectPart(number, None, (Piece.of(0, 1, group.block_bytes, 0, group.block_bytes),), name, is_first)
        return
    whole = [Piece.of(span.offset, 1, span.nbytes, 0, span.nbytes) for _, _, span in group.tensors()]
    common = [piece for piece, has in zip(whole, has_heads, strict=True) if not has]
    if common:
        yield ObjectPart(number, None, _joined(common), name + b" common", is_first)
    for place, shard in enumerate(sharding.shards):
        mine = [
            _columns(spec, span, place, len(sharding.shards))
            for _, spec, span in group.tensors()
            if spec.head_axis is not None
        ]
        yield ObjectPart(number, shard, _joined(mine), name + b" shard %d of %d" % (shard, sharding.num_shards), True)


def _columns(spec: TensorSpec, span: Span, place: int, count: int) -> Piece:
    """Divide the heads of a tensor into `count` equal runs, and return the piece of run `place`."""
    axis = spec.head_axis
    assert axis is not None
    heads, per_head = spec.shape[axis], math.prod(spec.shape[axis + 1 :])
    if heads % count or heads * per_head // count * spec.dtype.bits % 8:
        raise ArgumentError(
            f"{spec.name!r} has {heads} KV heads of {per_head} {spec.dtype} elements on each rank, which cannot be "
            f"divided into {count} shards of whole heads and bytes"
        )
    width = spec.dtype.nbytes(heads * per_head // count)
    return Piece.of(span.offset, math.prod(spec.shape[:axis]), width * count, place * width, width)


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge adjacent pieces. The pieces of equal consecutive layers become one piece."""
    joined = [pieces[0]]
    for piece in itertools.islice(pieces, 1, None):
        both = joined[-1].joined(piece)
        joined[-1:] = [joined[-1], piece] if both is None else [both]
    return tuple(joined)
