"""Chain: the tokens of a sequence, divided into blocks, and the keys of the blocks.

A key identifies a block and its whole prefix. Equal blocks have equal keys on all machines. Keys are chained:

    root    = SHA-256( "kvtier block key 1\0" | namespace | salt | adapter )
    key[0]  = SHA-256( root     | tokens of block 0 | extras of block 0 )
    key[i]  = SHA-256( key[i-1] | tokens of block i | extras of block i )

Tokens are little-endian int32. Extras describe the images and other media in a block. All blocks in a namespace have
the same number of tokens, so the extras always start at the same offset. Different blocks therefore never have the same
hash input. docs/keys.md has test vectors.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from kvtier.errors import ArgumentError, DTypeError, RangeError
from kvtier.index.node import Node
from kvtier.messages import KEY_BYTES, split_keys

# A list of ints, an array.array, a numpy array or an object that numpy can view, such as a torch tensor on the CPU.
TokenIds: TypeAlias = "Sequence[int] | array[int] | np.ndarray[Any, Any]"

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1
_INT32 = np.dtype("<i4")
_PACK_ONE = struct.Struct("<i").pack


def token_bytes(tokens: TokenIds) -> bytes:
    """Return the ids as little-endian int32.

    struct.pack converts lists and tuples in 7.6 ns per token. numpy would take 20 ns (measured with Python 3.11 on
    x86-64, 2026-11-15). An int32 array is only checked and copied.
    """
    if isinstance(tokens, list | tuple):
        return _packed(tokens)
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ArgumentError(f"tokens must have one dimension, got an array of shape {ids.shape}")
    if not len(ids):
        return b""
    if ids.dtype.kind not in "iu":
        raise DTypeError(f"tokens must be whole numbers, got {ids.dtype}")
    # A negative id must make `high` exceed MAX_TOKEN too. A negative int32, read as unsigned, is at least 2**31. For
    # other types, -min << 32 exceeds MAX_TOKEN if min is negative.
    high = (
        int(np.maximum.reduce(ids.view(np.uint32)))
        if ids.dtype == _INT32
        else max(int(ids.max()), -int(ids.min()) << 32)
    )
    if high > MAX_TOKEN:
        wrong = int(ids[(ids < 0) | (ids > MAX_TOKEN)][0])
        raise RangeError(f"token ids must be in [0, {MAX_TOKEN}], got {wrong}")
    return (ids if ids.dtype == _INT32 else ids.astype(_INT32)).tobytes()


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        packed = _PACK_ONE(*tokens) if len(tokens) == 1 else struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error:
        for token in tokens:
            if not isinstance(token, int | np.integer):
                raise DTypeError(f"tokens must be whole numbers, got {token!r}") from None
        raise RangeError(f"token ids must be in [0, {MAX_TOKEN}], got {min(tokens)} to {max(tokens)}") from None
    if tokens and min(tokens) < 0:
        raise RangeError(f"token ids must be in [0, {MAX_TOKEN}], got {min(tokens)}")
    return packed


def as_ids(labels: bytes | bytearray | memoryview) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Convert token bytes to ids. On a little-endian machine, the result is a view."""
    ids = np.frombuffer(labels, "<i4")
    return ids if sys.byteorder == "little" else ids.astype(np.int32)


_ROOT_PREFIX = b"kvtier block key 1\0"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Identity of a cache. Engines share KV only if all fields are equal."""

    model: str
    revision: str = ""
    """Revision of the weights, such as a commit or a digest of the files."""
    dtype: str = ""
    """Element types of the stored KV and of its scales."""
    layout: str = ""
    """Fingerprint of the KVLayout, which includes layers, heads and head sizes."""
    block_tokens: int = 16
    fingerprint: bytes = field(init=False, repr=False, compare=False)
    """SHA-256 of the names and values of the fields above."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise RangeError(f"a block needs at least one token, got block_tokens={self.block_tokens}")
        parts = [part for each in fields(self) if each.init for part in (each.name, str(getattr(self, each.name)))]
        fingerprint = hashlib.sha256(_framed(part.encode() for part in parts)).digest()
        object.__setattr__(self, "fingerprint", fingerprint)  # computed once, because every root key contains it

    def root_key(self, salt: bytes = b"", adapter: bytes = b"") -> bytes:
        """Return the key that precedes block 0, for one tenant's salt and one LoRA adapter."""
        return hashlib.sha256(_ROOT_PREFIX + self.fingerprint + _framed((salt, adapter))).digest()


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, video or audio clip. The tokens [start, start + num_tokens) of the prompt are its placeholders."""

    start: int
    num_tokens: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1:
            raise RangeError(f"a media item needs start >= 0 and num_tokens >= 1, got {self.start}, {self.num_tokens}")
        if not self.digest:
            raise ArgumentError("a media item needs the digest of its content, got b''")


def media_extras(items: Sequence[MediaItem], block_tokens: int) -> dict[int, bytes]:
    """Return the extras of each block that overlaps a media item, by block number.

    An item that ends where a block starts does not overlap this block:

        block        [0      )[1      )[2      )
        item             [##########)               in blocks 0 and 1

    The extras include the offset of the item in the block, so moving an image by one token changes the key.
    """
    extras: dict[int, list[bytes]] = {}
    for item in sorted(items, key=lambda item: (item.start, item.num_tokens, item.digest)):
        for block in range(item.start // block_tokens, -(-(item.start + item.num_tokens) // block_tokens)):
            position = f"{item.start - block * block_tokens},{item.num_tokens}".encode()
            extras.setdefault(block, []).extend((position, item.digest))
    return {block: _framed(parts) for block, parts in extras.items()}


def chain_keys(
    parent: bytes, labels: bytes | bytearray | memoryview, label_bytes: int, extras: Mapping[int, bytes], first: int
) -> list[bytes]:
    """Return the keys of consecutive blocks. `labels` has the token bytes of these blocks, `label_bytes` per block.

    `first` is the number of the first block. `parent` is the key of the block before it, or the root key.
    """
    sha256, view, key = hashlib.sha256, memoryview(labels), parent
    keys = []
    if extras:
        for number, at in enumerate(range(0, len(view), label_bytes), first):
            key = sha256(key + view[at : at + label_bytes] + extras.get(number, b"")).digest()
            keys.append(key)
    else:
        for at in range(0, len(view), label_bytes):
            key = sha256(key + view[at : at + label_bytes]).digest()
            keys.append(key)
    return keys


def _framed(parts: Iterable[bytes]) -> bytes:
    """Join parts, each prefixed with its length. Different lists of parts therefore never give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


class Chain:
    """Tokens of a prompt and its completion, divided into blocks. Each key is computed once, on demand.

    `salt` separates tenants, `adapter` names a LoRA, and `media` lists the items behind placeholder tokens. Keys and
    matches depend on all three. `labels` contains the token bytes of all full blocks and possibly of later tokens.
    """

    __slots__ = (
        "_keys",
        "_tail",
        "adapter",
        "extras",
        "label_bytes",
        "labels",
        "media",
        "namespace",
        "num_tokens",
        "salt",
    )

    def __init__(
        self,
        namespace: Namespace,
        tokens: TokenIds = (),
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        media: Sequence[MediaItem] = (),
    ) -> None:
        self.namespace = namespace
        self.salt = salt
        self.adapter = adapter
        self.label_bytes = namespace.block_tokens * TOKEN_BYTES
        self.media = tuple(media)
        self.extras = media_extras(media, namespace.block_tokens) if media else {}
        self.labels = token_bytes(tokens)
        self.num_tokens = len(self.labels) // TOKEN_BYTES
        """Number of tokens, including the tokens of a partly filled last block."""
        self._tail = bytearray()
        self._keys: list[bytes] = []

    @classmethod
    def of_node(cls, namespace: Namespace, node: Node) -> Chain:
        """Return the chain of all blocks from the root to the end of a node."""
        nodes = list(node.upwards())[::-1]
        salt, adapter = node.domain
        chain = cls(namespace, as_ids(b"".join(bytes(part.labels) for part in nodes)), salt=salt, adapter=adapter)
        chain.extras = {block: extra for part in nodes for block, extra in (part.extras or {}).items()}
        return chain

    def append(self, tokens: TokenIds) -> None:
        """Append tokens. `labels` is copied only if the tokens complete a block."""
        self._tail += token_bytes(tokens)
        self.num_tokens += len(tokens)
        if len(self.labels) % self.label_bytes + len(self._tail) >= self.label_bytes:
            self.labels += self._tail
            self._tail.clear()

    @property
    def num_blocks(self) -> int:
        """Number of full blocks."""
        return len(self.labels) // self.label_bytes

    @property
    def tokens(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """All token ids."""
        return as_ids(self.labels + self._tail)

    def token_range(self, first: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return the token ids [first, stop)."""
        known, low, high = len(self.labels), first * TOKEN_BYTES, stop * TOKEN_BYTES
        return as_ids(self.labels[low:high] + bytes(self._tail[max(0, low - known) : max(0, high - known)]))

    @property
    def last_token(self) -> int:
        return int.from_bytes((self._tail or self.labels)[-TOKEN_BYTES:], "little")

    def label(self, block: int, stop: int | None = None) -> bytes:
        """Return the token bytes of one block, or of blocks [block, stop)."""
        width = self.label_bytes
        return self.labels[block * width : (block + 1 if stop is None else stop) * width]

    def tail(self, block: int, max_tokens: int) -> bytes:
        """Return the token bytes of at most `max_tokens` leading tokens of a block. The block may be partly filled."""
        first = block * self.label_bytes
        stop = first + min(max_tokens * TOKEN_BYTES, self.label_bytes)
        tail = self.labels[first:stop]
        return tail + self._tail[: stop - first - len(tail)] if self._tail else tail

    def key_at(self, block: int) -> bytes:
        """Return `Node.key` for a node that begins with this block: the token bytes and the extras of the block."""
        label = self.label(block)
        return label + self.extras.get(block, b"") if self.extras else label

    def label_view(self, block: int, stop: int) -> memoryview:
        """Return the token bytes of blocks [block, stop).

        The result is a view of `labels` if these bytes are at least three quarters of `labels`. Otherwise it is a copy,
        which does not keep the rest of `labels` alive.
        """
        width = self.label_bytes
        if 4 * (stop - block) * width >= 3 * len(self.labels):
            return memoryview(self.labels)[block * width : stop * width]
        return memoryview(self.labels[block * width : stop * width])

    @property
    def num_keys(self) -> int:
        """Number of leading blocks whose keys have been computed."""
        return len(self._keys)

    def keys(self, stop: int | None = None) -> bytes:
        """Return the concatenated keys of full blocks [0, stop), 32 bytes per key."""
        return b"".join(self.key_list(0, self.num_blocks if stop is None else stop))

    def key_list(self, first: int, stop: int) -> list[bytes]:
        """Return the keys of full blocks [first, stop) as a list."""
        if stop > self.num_blocks:
            raise RangeError(f"cannot compute the keys of {stop} blocks; the chain has {self.num_blocks} full blocks")
        known = len(self._keys)
        if known < stop:
            parent = self._keys[-1] if known else self.namespace.root_key(self.salt, self.adapter)
            self._keys += chain_keys(parent, self.label(known, stop), self.label_bytes, self.extras, known)
        return self._keys[first:stop]

    def take_keys(self, node: Node) -> None:
        """Copy missing keys from a node on the path of this chain and from its ancestors, if the node has keys."""
        stop = min(node.stop, self.num_blocks)
        if len(self._keys) < stop and node.keys:
            keys = b"".join([part.keys for part in node.upwards()][::-1])
            self._keys += split_keys(keys[len(self._keys) * KEY_BYTES : stop * KEY_BYTES])
