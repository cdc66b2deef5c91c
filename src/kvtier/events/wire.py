"""Conversion of events to the maps of vLLM's event format."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtier.events import EventConfig
from kvtier.index import BlocksRemoved, Event, IndexCleared
from kvtier.messages import KEY_BYTES

_TOKEN_BYTES = 4
_MEDIA = {"device": "GPU", "host": "CPU"}  # every other tier is a store
_STORAGE = "STORAGE"


def as_map(event: Event, config: EventConfig) -> dict[str, object]:
    """Return an event in vLLM's format."""
    if isinstance(event, IndexCleared):
        return {"type": "AllBlocksCleared"}
    hashes = list(_hashes(event.keys, config))
    place: dict[str, object] = {
        "medium": _MEDIA.get(event.tier, _STORAGE),
        "group_idx": 0,  # one index serves all cache groups
        "locality": "REMOTE" if event.tier in config.shared_tiers else "LOCAL",
    }
    if event.tier not in _MEDIA:
        place["ownership"] = event.tier
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": hashes, **place}
    tokens = np.frombuffer(event.token_bytes, "<i4").tolist() if config.token_ids else []
    adapter = _text(event.adapter.partition(b"\0")[0]) or None
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.is_first else next(_hashes(event.parent, config)),
        "token_ids": tokens,
        "block_size": len(event.token_bytes) // _TOKEN_BYTES // len(hashes),
        "lora_id": None,
        "lora_name": adapter,
        "extra_keys": _extra_keys(len(hashes), adapter, event.salt if event.is_first else b""),
        **place,
    }


def _extra_keys(num_blocks: int, adapter: str | None, salt: bytes) -> list[list[str] | None] | None:
    """Return a list of extra keys for each block: the adapter, if any, and for the first block also the salt, if any.

    The entry of a block without extra keys is None. If all entries are None, the result is None. The salt is the
    request's `cache_salt`. With tenants, it is the tenant's name, a NUL and the `cache_salt`.
    """
    shared = [adapter] if adapter is not None else []
    first = [*shared, _text(salt.removeprefix(b"\0"))] if salt else shared
    return [first or None, *([shared or None] * (num_blocks - 1))] if first else None


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _hashes(keys: bytes, config: EventConfig) -> Iterator[int | bytes]:
    for at in range(0, len(keys), KEY_BYTES):
        key = keys[at : at + KEY_BYTES]
        yield int.from_bytes(key[-8:], "big") if config.int_hashes else key
