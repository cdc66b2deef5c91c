"""Block keys: the names blocks have outside this process, and how they chain.

    root    = SHA-256( "kvtier block key 1\0" | namespace | salt | adapter )
    key[0]  = SHA-256( root     | tokens of block 0 | extras of block 0 )
    key[i]  = SHA-256( key[i-1] | tokens of block i | extras of block i )

Tokens are little-endian int32, so their part has one length for a given namespace and what follows it can only be the
extras; nothing is pickled and nothing depends on the process, so two machines agree. Equal keys mean equal prefixes.
docs/keys.md has test vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from kvtier.errors import ArgumentError, RangeError

KEY_BYTES = 32
_DOMAIN = b"kvtier block key 1\0"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must agree for one engine's KV to be another's: a change of any field is another cache."""

    model: str
    revision: str = ""
    """Of the weights: a commit, or a digest of the files."""
    dtype: str = ""
    """Of the stored KV, scales included."""
    layout: str = ""
    """Layers, heads, head size, order: a KVLayout's fingerprint."""
    block_tokens: int = 16
    fingerprint: bytes = field(init=False, repr=False, compare=False)
    """32 bytes over every field above, with its name."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise RangeError(f"a block needs at least one token, got block_tokens={self.block_tokens}")
        parts = [item for each in fields(self) if each.init for item in (each.name, str(getattr(self, each.name)))]
        fingerprint = hashlib.sha256(_framed(part.encode() for part in parts)).digest()
        object.__setattr__(self, "fingerprint", fingerprint)  # once: every request's keys begin with it

    def root_key(self, salt: bytes = b"", adapter: bytes = b"") -> bytes:
        """The key above block 0 for one tenant's salt and one LoRA adapter."""
        return hashlib.sha256(_DOMAIN + self.fingerprint + _framed((salt, adapter))).digest()


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, a clip, a sound: tokens [start, start + num_tokens) stand for something the ids do not tell."""

    start: int
    num_tokens: int
    digest: bytes
    """Of the content; equal content, equal digest."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1:
            raise RangeError(f"a media item needs start >= 0 and num_tokens >= 1, got {self.start}, {self.num_tokens}")
        if not self.digest:
            raise ArgumentError("a media item needs the digest of its content, got b''")

    @property
    def stop(self) -> int:
        """One past the last token it stands for."""
        return self.start + self.num_tokens


def media_extras(items: Sequence[MediaItem], block_tokens: int) -> dict[int, bytes]:
    """Block number -> extras, for the blocks an item overlaps.

    Intervals are half-open: an item that ends where a block begins is not in it.

        block        [0      )[1      )[2      )
        item             [########)                 in blocks 0 and 1

    Where in the block the item begins is part of the extras: the same picture one token later is another block.
    """
    extras: dict[int, list[bytes]] = {}
    for item in sorted(items, key=lambda item: (item.start, item.num_tokens, item.digest)):
        for block in range(item.start // block_tokens, -(-item.stop // block_tokens)):
            place = f"{item.start - block * block_tokens},{item.num_tokens}".encode()
            extras.setdefault(block, []).extend((place, item.digest))
    return {block: _framed(parts) for block, parts in extras.items()}


def chain_keys(
    parent: bytes, labels: bytes | bytearray | memoryview, label_bytes: int, extras: Mapping[int, bytes], first: int
) -> list[bytes]:
    """Keys of the blocks whose token bytes are `labels`, below `parent`; `first` numbers the first.

    The loop is all there is to a bare hashlib chain: nothing per block but the digest.
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
    """Each part behind its length, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
