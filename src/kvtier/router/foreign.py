"""ForeignKeys: converts the KV events of other engines, such as vLLM, to kvtier's block hashes.

An event contains the tokens of the stored blocks, the engine's hashes of these blocks and the engine's hash of their
parent. A dict maps the engine's hashes to kvtier's keys. The key of a block is computed from the parent's key and the
block's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.errors import ArgumentError
from kvtier.index.chain import Namespace, chain_keys, token_bytes
from kvtier.router.feed import EventBatch, event_hashes


@dataclass(slots=True)
class _ForeignBlock:
    key: bytes
    media: set[str] = field(default_factory=set)


class ForeignKeys:
    """Blocks of one replica. A block whose parent is unknown is skipped, which costs a cache hit but is no error."""

    def __init__(self, namespace: Namespace) -> None:
        """`namespace` is the namespace of the routed prompts. Its block size must be the engine's block size."""
        self._namespace = namespace
        self._blocks: dict[int, _ForeignBlock] = {}
        self.num_skipped = 0
        """Number of stored blocks that could not be converted. An invalid event counts as one block."""

    def __len__(self) -> int:
        return len(self._blocks)

    def convert(self, batch: EventBatch) -> EventBatch:
        """Return the batch with kvtier's keys in place of the engine's hashes. Omit blocks that cannot be converted."""
        return replace(batch, events=tuple(self._converted(batch.events)))

    def _converted(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        for event in events:
            kind = event.get("type") if isinstance(event, Mapping) else None
            if kind == "AllBlocksCleared":
                self._blocks.clear()
                yield event
            elif kind in ("BlockStored", "BlockRemoved"):
                if event.get("group_idx"):  # vLLM's group 0 covers all tokens, so other groups add nothing
                    continue
                try:
                    keys = self._stored(event) if kind == "BlockStored" else self._removed(event)
                except (KeyError, TypeError, ValueError, ArgumentError):
                    self.num_skipped += 1
                    continue
                if keys:
                    yield {**event, "block_hashes": keys}
            else:
                yield event

    def _stored(self, event: Mapping[str, Any]) -> list[bytes]:
        hashes = event_hashes(event["block_hashes"]).tolist()
        medium = str(event.get("medium") or "GPU")
        if not event["token_ids"]:  # a copy in another medium is reported without tokens
            known = [self._blocks[each] for each in hashes if each in self._blocks]
            self.num_skipped += len(hashes) - len(known)
        else:
            known = self._computed(event, hashes)
        for block in known:
            block.media.add(medium)
        return [block.key for block in known]

    def _computed(self, event: Mapping[str, Any], hashes: Sequence[int]) -> list[_ForeignBlock]:
        size = self._namespace.block_tokens
        if event["block_size"] != size or len(event["token_ids"]) != len(hashes) * size:
            self.num_skipped += len(hashes)
            return []
        parent = event["parent_block_hash"]
        if parent is None:
            above = self._namespace.root_key(_salt(event), str(event.get("lora_name") or "").encode())
        else:
            (number,) = event_hashes([parent]).tolist()
            if number not in self._blocks:
                self.num_skipped += len(hashes)
                return []
            above = self._blocks[number].key
        keys = chain_keys(above, token_bytes(event["token_ids"]), 4 * size, {}, 0)
        return [self._blocks.setdefault(each, _ForeignBlock(key)) for each, key in zip(hashes, keys, strict=True)]

    def _removed(self, event: Mapping[str, Any]) -> list[bytes]:
        medium, keys = str(event.get("medium") or "GPU"), []
        for each in event_hashes(event["block_hashes"]).tolist():
            block = self._blocks.get(each)
            if block is None:
                continue
            keys.append(block.key)
            block.media.discard(medium)
            if not block.media:
                del self._blocks[each]
        return keys


def _salt(event: Mapping[str, Any]) -> bytes:
    """Return a zero byte and the salt of the prompt, or b"" if the prompt has no salt.

    The `extra_keys` of a prompt's first block can contain the name of the adapter and the salt. Raise ArgumentError for
    blocks with images or embeddings, because these blocks have other extra keys too.
    """
    first = (event.get("extra_keys") or [None])[0] or ()
    texts = [each for each in first if each != event.get("lora_name")]
    if not all(isinstance(each, str) for each in texts) or len(texts) > 1:
        raise ArgumentError("a block with images or embeddings has extra keys that cannot be converted")
    return f"\0{texts[0]}".encode() if texts else b""
