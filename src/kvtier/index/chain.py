"""Chain: a request's tokens as blocks, prompt and answer alike, with what else decides whether KV may be shared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.errors import RangeError
from kvtier.index.keys import KEY_BYTES, MediaItem, Namespace, chain_keys, media_extras
from kvtier.index.node import Node, upwards
from kvtier.index.tokens import TOKEN_BYTES, TokenIds, as_ids, token_bytes


class Chain:
    """Tokens cut into blocks. Grows by append; keys are computed when asked for, and only once per block.

    `salt` keeps tenants apart, `adapter` names a LoRA, `media` what stands behind placeholder tokens. All three are
    part of every key and of every match. `labels` are the ids as bytes, at least those of full blocks; only the chain
    changes them.
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
        """So far, those of a last block that is not full included."""
        self._tail = bytearray()
        self._keys: list[bytes] = []

    @classmethod
    def of_node(cls, namespace: Namespace, node: Node) -> Chain:
        """The chain from the root to the end of a node."""
        nodes = list(upwards(node))[::-1]
        salt, adapter = node.domain
        chain = cls(namespace, as_ids(b"".join(bytes(each.labels) for each in nodes)), salt=salt, adapter=adapter)
        chain.extras = {block: extra for each in nodes for block, extra in (each.extras or {}).items()}
        return chain

    def append(self, tokens: TokenIds) -> None:
        """More tokens at the end. A token costs nothing until it fills a block."""
        self._tail += token_bytes(tokens)
        self.num_tokens += len(tokens)
        if len(self.labels) % self.label_bytes + len(self._tail) >= self.label_bytes:
            self.labels += self._tail
            self._tail.clear()

    @property
    def num_blocks(self) -> int:
        """Full blocks."""
        return len(self.labels) // self.label_bytes

    @property
    def tokens(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """A copy of the ids."""
        return as_ids(self.labels + self._tail)

    def token_range(self, first: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """A copy of the ids [first, stop), without touching the others."""
        known, low, high = len(self.labels), first * TOKEN_BYTES, stop * TOKEN_BYTES
        return as_ids(self.labels[low:high] + bytes(self._tail[max(0, low - known) : max(0, high - known)]))

    @property
    def last_token(self) -> int:
        """The newest id."""
        return int.from_bytes((self._tail or self.labels)[-TOKEN_BYTES:], "little")

    def label(self, block: int, stop: int | None = None) -> bytes:
        """The bytes of one block, or of blocks [block, stop)."""
        width = self.label_bytes
        return self.labels[block * width : (block + 1 if stop is None else stop) * width]

    def tail(self, block: int, max_tokens: int) -> bytes:
        """The bytes from a block on, of at most so many tokens and at most a block, those of a last one included."""
        first = block * self.label_bytes
        stop = first + min(max_tokens * TOKEN_BYTES, self.label_bytes)
        found = self.labels[first:stop]
        return found + self._tail[: stop - first - len(found)] if self._tail else found

    def key_at(self, block: int) -> bytes:
        """What a node that begins with this block is found under: its bytes and its extras."""
        label = self.label(block)
        return label + self.extras.get(block, b"") if self.extras else label

    def label_view(self, block: int, stop: int) -> memoryview:
        """The same for keeping: a copy, unless most of the chain is wanted; then it is kept whole and not copied."""
        width = self.label_bytes
        if 4 * (stop - block) * width >= 3 * len(self.labels):
            return memoryview(self.labels)[block * width : stop * width]
        return memoryview(self.labels[block * width : stop * width])

    @property
    def num_keys(self) -> int:
        """Leading blocks whose keys are known."""
        return len(self._keys)

    def keys(self, stop: int | None = None) -> bytes:
        """The keys of full blocks [0, stop) as one string of 32 bytes each, computed where they are not known yet."""
        return b"".join(self.key_list(0, self.num_blocks if stop is None else stop))

    def key_list(self, first: int, stop: int) -> list[bytes]:
        """The keys of full blocks [first, stop), each by itself."""
        if stop > self.num_blocks:
            raise RangeError(f"keys of {stop} blocks were asked for, the chain has {self.num_blocks} full ones")
        known = len(self._keys)
        if known < stop:
            parent = self._keys[-1] if known else self.namespace.root_key(self.salt, self.adapter)
            self._keys += chain_keys(parent, self.label(known, stop), self.label_bytes, self.extras, known)
        return self._keys[first:stop]

    def take_keys(self, node: Node) -> None:
        """Those of a path that is this chain's, as far as both go: what the tree has is not hashed again."""
        stop = min(node.stop, self.num_blocks)
        if len(self._keys) < stop and node.keys:
            keys = b"".join([each.keys for each in upwards(node)][::-1])
            self._keys += [keys[at : at + KEY_BYTES] for at in range(len(self._keys) * KEY_BYTES, stop * KEY_BYTES, 32)]
