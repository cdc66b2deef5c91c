"""Builds the Chain of a vLLM request, with everything that vLLM's own block hashes depend on."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.fingerprint import canonical, files_digest, model_files
from kvtier.index import Chain, Namespace

ExtraKeys = Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
"""vLLM's generate_block_hash_extra_keys(request, first token, end token, first media item)."""

_MAX_ADAPTERS = 4096  # maximum number of adapters whose identity is cached


class ChainBuilder:
    """Makes the chain of a request. Requests share blocks only if vLLM would also share them."""

    def __init__(self, namespace: Namespace, extra_keys: ExtraKeys) -> None:
        self.namespace = namespace
        self._extra_keys = extra_keys
        self._nonce = secrets.token_bytes(16)
        self._adapters: dict[tuple[str, str], tuple[object, bytes]] = {}

    def build(self, request: Any) -> Chain:
        chain = Chain(
            self.namespace,
            list(request.all_token_ids),
            salt=(request.cache_salt or "").encode(),
            adapter=self._adapter(request.lora_request) if request.lora_request is not None else b"",
        )
        if request.mm_features or request.prompt_embeds is not None:
            chain.extras = self._extras(request)
        return chain

    def _extras(self, request: Any) -> dict[int, bytes]:
        """Return a digest for each prompt block that contains media or prompt embeddings, by block number."""
        block_tokens, extras, item = self.namespace.block_tokens, {}, 0
        for block in range(request.num_prompt_tokens // block_tokens + 1):
            first = block * block_tokens
            keys, item = self._extra_keys(request, first, first + block_tokens, item)
            own = [key for key in keys or () if not (isinstance(key, tuple) and key[0] in ("lora", "cache_salt"))]
            if own:
                extras[block] = hashlib.sha256(canonical(own)).digest()
        return extras

    def _adapter(self, lora: Any) -> bytes:
        """Return the identity of a LoRA adapter: its name and the content of its files.

        If an adapter has no local files, its content is unknown, and its blocks are shared only within this process.
        """
        key, folder = (lora.lora_name, lora.lora_path), Path(lora.lora_path)
        state = _state_of(folder)
        known = self._adapters.get(key)
        if known is None or known[0] != state:
            content = files_digest(folder) if state else hashlib.sha256(self._nonce + canonical([*key])).digest()
            if len(self._adapters) >= _MAX_ADAPTERS:
                self._adapters.pop(next(iter(self._adapters)))
            self._adapters[key] = known = state, lora.lora_name.encode() + b"\0" + content
        return known[1]


def _state_of(folder: Path) -> object:
    """Return a value that changes if a file of the folder is replaced. The value is empty if there are no files."""
    try:
        stats = [(path.name, os.stat(path)) for path in model_files(folder)]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
