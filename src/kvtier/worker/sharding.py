"""How blocks are cut for stores, so that what is stored does not depend on the number of ranks.

A stored block is one object for each of S shards of its KV heads, S being fixed for a store; of n ranks, rank r has
shards [r S/n, (r + 1) S/n). Tensors that every rank has whole (a latent, an indexer) are an object of their own, which
rank 0 writes and all read.

    one tensor of a block, 4 heads      token 0  | h0 h1 h2 h3 |       the block of the one rank, or
                                        token 1  | h0 h1 h2 h3 |       | h0 h1 | of rank 0 and | h2 h3 | of rank 1
    object of shard 2 of 4                            h2 h2 ..         the same bytes for both

An object is the shard's part of each tensor in the order of the block. With one shard it is the block as it is, and so
it is where a rank has one shard: then nothing is gathered.
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
    """Which rank this is, of how many, and into how many shards stored blocks are cut."""

    rank: int = 0
    num_ranks: int = 1
    num_shards: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks:
            raise ArgumentError(f"there is no rank {self.rank} of {self.num_ranks}")
        if self.num_shards < 1 or self.num_shards % self.num_ranks:
            raise ArgumentError(
                f"{self.num_ranks} ranks cannot share {self.num_shards} shards of a block equally: choose a number of "
                f"shards that every number of ranks divides which is to read the store"
            )

    @property
    def shards(self) -> range:
        """Those of this rank."""
        count = self.num_shards // self.num_ranks
        return range(self.rank * count, (self.rank + 1) * count)


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns [start, start + width) of equal rows in a rank's block; one row where it is contiguous."""

    offset: int
    num_rows: int
    row_bytes: int
    start: int
    width: int

    @classmethod
    def of(cls, offset: int, num_rows: int, row_bytes: int, start: int, width: int) -> Piece:
        """In the simplest form."""
        if width < row_bytes and num_rows > 1:
            return cls(offset, num_rows, row_bytes, start, width)
        nbytes = num_rows * width
        return cls(offset + start, 1, nbytes, 0, nbytes)

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.num_rows * self.width

    def joined(self, other: Piece) -> Piece | None:
        """Both as one, if the other continues this one."""
        if self.offset + self.num_rows * self.row_bytes != other.offset:
            return None
        if self.num_rows == other.num_rows == 1:
            return Piece.of(self.offset, 1, self.row_bytes + other.row_bytes, 0, self.width + other.width)
        if (self.row_bytes, self.start, self.width) == (other.row_bytes, other.start, other.width):
            return replace(self, num_rows=self.num_rows + other.num_rows)
        return None

    def rows(self, block: Bytes) -> Bytes:
        """Its bytes of a block: a view [row, column]."""
        whole = block[self.offset : self.offset + self.num_rows * self.row_bytes]
        return whole.reshape(self.num_rows, self.row_bytes)[:, self.start : self.start + self.width]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectPart:
    """What one object has of a rank's block."""

    group: int
    shard: int | None
    """None: every rank has it."""
    pieces: tuple[Piece, ...]
    name: bytes
    """Among the objects of a block; empty for the first, whose key is the block's own."""
    is_written: bool
    """Whether this rank writes it."""

    @property
    def nbytes(self) -> int:
        """Of the object."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def span(self) -> Span | None:
        """Where it is in the block, if it is in one place."""
        (only, *others) = self.pieces
        return Span(only.offset, only.nbytes) if not others and only.num_rows == 1 else None

    def namespace(self, fingerprint: bytes) -> bytes:
        """What its objects are labelled with."""
        return hashlib.sha256(fingerprint + self.name).digest() if self.name else fingerprint

    def keys(self, keys: bytes) -> bytes:
        """Of its objects for blocks, and of blocks for its objects: to do it twice is to do nothing."""
        if not self.name:
            return keys
        mask = np.frombuffer(hashlib.sha256(self.name).digest(), np.uint8)
        return (np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES) ^ mask).tobytes()

    def key_list(self, keys: bytes) -> list[bytes]:
        """The same, one by one."""
        return split_keys(self.keys(keys))

    def gather(self, block: Bytes, thing: Bytes) -> None:
        """From a rank's block to the object."""
        for ours, theirs in self._pairs(block, thing):
            theirs[:] = ours

    def scatter(self, thing: Bytes, block: Bytes) -> None:
        """From the object to a rank's block."""
        for ours, theirs in self._pairs(block, thing):
            ours[:] = theirs

    def _pairs(self, block: Bytes, thing: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Each piece in the block and in the object: views [row, column]."""
        at = 0
        for piece in self.pieces:
            yield piece.rows(block), thing[at : at + piece.nbytes].reshape(piece.num_rows, piece.width)
            at += piece.nbytes


def parts_of(groups: Sequence[CacheGroup], sharding: Sharding) -> tuple[ObjectPart, ...]:
    """The objects of a rank's blocks; `groups` are the rank's own (`KVLayout.of_rank`)."""
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
    """The place-th of `count` equal runs of heads."""
    axis = spec.head_axis
    assert axis is not None
    heads, per_head = spec.shape[axis], math.prod(spec.shape[axis + 1 :])
    if heads % count or heads * per_head // count * spec.dtype.bits % 8:
        raise ArgumentError(
            f"{spec.name!r} has {heads} KV heads of {per_head} {spec.dtype} on each rank: they cannot be cut into "
            f"{count} shards of whole heads and bytes"
        )
    width = spec.dtype.nbytes(heads * per_head // count)
    return Piece.of(span.offset, math.prod(spec.shape[:axis]), width * count, place * width, width)


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """As few as possible: equal layers are one."""
    joined = [pieces[0]]
    for piece in itertools.islice(pieces, 1, None):
        both = joined[-1].joined(piece)
        joined[-1:] = [joined[-1], piece] if both is None else [both]
    return tuple(joined)
