"""IndexContents: the blocks of an index, rebuilt from its events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvtier.index import BlocksRemoved, BlocksStored, Event, IndexCleared
from kvtier.messages import KEY_BYTES


class _Block(NamedTuple):
    parent: bytes
    token_bytes: bytes
    is_first: bool
    salt: bytes
    adapter: bytes


class IndexContents:
    """The blocks of each tier, according to the events applied so far."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[bytes, _Block]] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, IndexCleared):
            self._tiers.clear()
            return
        blocks = self._tiers.setdefault(event.tier, {})
        if isinstance(event, BlocksRemoved):
            for at in range(0, len(event.keys), KEY_BYTES):
                blocks.pop(event.keys[at : at + KEY_BYTES], None)
            return
        keys, above, is_first = event.keys, event.parent, event.is_first
        width = len(event.token_bytes) * KEY_BYTES // len(keys)
        for number in range(len(keys) // KEY_BYTES):
            key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            tokens = event.token_bytes[number * width : (number + 1) * width]
            blocks[key] = _Block(above, tokens, is_first, event.salt, event.adapter)
            above, is_first = key, False

    def events(self) -> Iterator[Event]:
        """Yield events that reproduce the blocks: first IndexCleared, then each block after its parent."""
        yield IndexCleared()
        written: set[bytes] = set()
        for blocks in self._tiers.values():
            for key in blocks:
                path: list[bytes] = []
                step: bytes | None = key
                while step is not None and step not in written:
                    path.append(step)
                    step = self._parent(step)
                written.update(path)
                for each in reversed(path):
                    yield from self._stored(each)

    def _parent(self, key: bytes) -> bytes | None:
        """Return the key of a block's parent, or None if no tier contains the parent."""
        block = next(blocks[key] for blocks in self._tiers.values() if key in blocks)
        return block.parent if any(block.parent in blocks for blocks in self._tiers.values()) else None

    def _stored(self, key: bytes) -> Iterator[Event]:
        for tier, blocks in self._tiers.items():
            if (block := blocks.get(key)) is not None:
                yield BlocksStored(tier, block.parent, key, *block[1:])
