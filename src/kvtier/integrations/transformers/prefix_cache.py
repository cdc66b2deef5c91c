"""PrefixCache: saves the KV of prompts of a transformers model, and fills caches with saved KV."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.cache.allocation import CacheStats
from kvtier.errors import ArgumentError, ClosedError
from kvtier.index import Chain
from kvtier.integrations.transformers.caches import PrefixDynamicCache, PrefixKV, PrefixStaticCache, row_states
from kvtier.integrations.transformers.identity import (
    adapter_layers,
    adapter_of,
    base_model_of,
    layout_of_model,
    model_state,
    namespace_of_model,
    remove_row_adapters,
)
from kvtier.integrations.transformers.tiers import PrefixMatch, PrefixTiers, Tensors
from kvtier.integrations.transformers.tokens import Ids, RecordedRow, RecordedRows
from kvtier.storage.open import parse_bytes

CLOSE_SECONDS = 60.0
"""Longest wait for writes to the store in `close`, and by default in `flush`."""

_PER_ROW = (
    "adapter_names and adapters with invocation tokens (aLoRA) change the KV of only a part of the input; "
    "use `set_adapter` with an adapter that changes the KV of the whole input"
)


class PrefixCache:
    """Keeps the KV of prompts in host memory and in a store, so that a repeated prefix is not computed again.

        prefix = PrefixCache(model, "disk:./kv?bytes=20GiB")
        output = prefix.generate(**inputs, max_new_tokens=64)
        output = model.generate(**inputs, past_key_values=prefix.begin(**inputs), max_new_tokens=64)

    `store` is a store URL (docs/stores.md), or a list of URLs with the nearest store first. Blocks are saved while
    the model computes. The methods are thread-safe, but a model can run only one `generate` at a time.
    """

    def __init__(
        self,
        model: Any,
        store: str | Sequence[str] = (),
        *,
        host_bytes: int | str = "512MiB",
        block_tokens: int = 32,
        staging_bytes: int | str = "64MiB",
        wait_seconds: float = 10.0,
        secret_file: str = "",
    ) -> None:
        """`host_bytes` limits the memory for blocks, and therefore the length of a prefix. A request waits at most
        `wait_seconds` for the store. The file `secret_file` contains the key for the token digests in stored blocks.
        """
        if block_tokens < 1:
            raise ArgumentError(f"a block needs at least one token, got block_tokens={block_tokens}")
        self._model = model
        self._base = base = base_model_of(model)
        self._lock = threading.RLock()
        layout = layout_of_model(base, block_tokens)
        self._layout = layout
        self._state, self._dtype = model_state(base), base.dtype
        self._tiers = PrefixTiers(
            namespace_of_model(base, layout),
            layout,
            base.device,
            [store] if isinstance(store, str) else store,
            host_bytes=_nbytes(host_bytes),
            staging_bytes=_nbytes(staging_bytes),
            wait_seconds=wait_seconds,
            secret=Path(secret_file).read_bytes().strip() if secret_file else b"",
        )
        self._recorded: weakref.WeakKeyDictionary[PrefixKV, RecordedRows] = weakref.WeakKeyDictionary()
        own = weakref.WeakMethod(self._before_forward), weakref.WeakMethod(self._after_forward)
        self._adapter_layers: list[torch.nn.Module] = []
        self._hooks = (
            base.register_forward_pre_hook(lambda *given: _call(own[0], *given), with_kwargs=True),
            base.register_forward_hook(lambda *given: _call(own[1], *given), with_kwargs=True),
        )
        self._finalizer = weakref.finalize(self, _finish, self._tiers, self._hooks)

    # ---- requests --------------------------------------------------------------------------------------------------

    def begin(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        num_return_sequences: int = 1,
        max_length: int | None = None,
        salt: str = "",
        **others: Any,
    ) -> PrefixKV:
        """Return a cache that is filled with the longest cached prefix of these prompts.

        The last token of a prompt is never in the cache. In a batch, all rows are filled up to the leftmost column at
        which a row's cached prefix ends. With `max_length`, return a StaticCache of this length, otherwise a
        DynamicCache. Prompts with different salts do not share blocks.
        """
        ids, padding = self._prompts(input_ids, attention_mask, others)
        if num_return_sequences < 1:
            raise ArgumentError(f"num_return_sequences must be at least 1, got {num_return_sequences}")
        if max_length is not None and max_length < ids.shape[1]:
            raise ArgumentError(
                f"a StaticCache of {max_length=} has no room for the prompt of {ids.shape[1]} tokens; max_length must "
                f"include the new tokens too"
            )
        with self._lock:
            self._check_model()
            adapter = adapter_of(self._base)
            self._adapter_layers = [layer for _, layer in adapter_layers(self._base)] if adapter else []
            chains = [
                Chain(self._tiers.namespace, row[pads:], salt=salt.encode(), adapter=adapter)
                for row, pads in zip(ids, padding, strict=True)
            ]
            states, num_columns = self._load(chains, padding, ids.shape[1] - 1)
            if num_return_sequences > 1:
                states = [tensor.repeat_interleave(num_return_sequences, dim=0) for tensor in states]
                ids = np.repeat(ids, num_return_sequences, axis=0)
                padding = [pads for pads in padding for _ in range(num_return_sequences)]
                chains = [chain for chain in chains for _ in range(num_return_sequences)]
            config = self._base.config
            cache = PrefixDynamicCache(config) if max_length is None else PrefixStaticCache(config, max_length)
            for layer in range(len(states) // 2):
                cache.update(states[2 * layer], states[2 * layer + 1], layer)
            cache.hit_tokens = tuple(max(0, num_columns - pads) for pads in padding)
            self._recorded[cache] = self._record(chains, padding, ids, num_columns)
            return cache

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: str = "",
        **options: Any,
    ) -> Any:
        """Call `model.generate` with a cache from `begin`. Apart from `salt`, arguments and results are the same."""
        if input_ids is None:
            input_ids = options.pop("inputs", None)
        config = options.get("generation_config") or self._base.generation_config

        def setting(name: str) -> Any:
            return options.get(name, getattr(config, name, None))

        if (setting("num_beams") or 1) > 1:
            raise ArgumentError(f"num_beams={setting('num_beams')}: beams cannot share a cache; use num_beams=1")
        for name in ("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_model"):
            if setting(name) is not None:
                raise ArgumentError(f"{name} is set: transformers then computes a cached prefix twice; leave it out")
        if setting("use_cache") is False:
            raise ArgumentError("use_cache=False: transformers then computes every token again; leave it out")
        if "past_key_values" in options:
            raise ArgumentError("`generate` makes the cache; leave out past_key_values")
        kind = setting("cache_implementation")
        if kind not in (None, "hybrid"):  # older Gemma models have "hybrid", which transformers ignores
            raise ArgumentError(
                f"cache_implementation is {kind!r}, but `generate` makes the cache; leave it out, or set it to None in "
                f"the generation_config of the model"
            )
        others = {name: options.pop(name) for name in ("inputs_embeds", "token_type_ids") if name in options}
        rows = setting("num_return_sequences") or 1
        cache = self.begin(input_ids, attention_mask, num_return_sequences=rows, salt=salt, **others)
        assert input_ids is not None
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self._model.generate(input_ids=input_ids, attention_mask=mask, past_key_values=cache, **options)

    @property
    def stats(self) -> CacheStats:
        """Statistics of the cache, including the blocks and hits of host memory and of the store."""
        with self._lock:
            return self._tiers.stats

    def flush(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Wait until all blocks are written to the store. Return False after the timeout."""
        with self._lock:
            return self._tiers.flush(timeout)

    def close(self) -> None:
        """Write blocks to the store (up to CLOSE_SECONDS) and free the memory. Caches in use stay valid. Idempotent."""
        with self._lock:
            self._recorded.clear()
            self._finalizer()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- begin -----------------------------------------------------------------------------------------------------

    def _prompts(self, ids: torch.Tensor | None, mask: torch.Tensor | None, others: Any) -> tuple[Ids, list[int]]:
        """Return the ids [row, column] and the padding of each row."""
        types = others.pop("token_type_ids", None)
        if types is not None and bool(types.any()):
            raise ArgumentError("the keys of blocks do not cover token_type_ids other than 0; leave them out")
        if others or ids is None:
            raise ArgumentError(
                f"{', '.join(sorted(others))} cannot identify a block; only input_ids can"
                if others
                else "input_ids are missing; call `begin(**inputs)` with the output of a tokenizer"
            )
        for name, given in (("input_ids", ids), ("attention_mask", mask)):
            if given is not None and not isinstance(given, torch.Tensor):
                raise ArgumentError(
                    f"{name} must be a tensor, got {type(given).__name__}; call the tokenizer with "
                    f'return_tensors="pt" and pass its output as **inputs'
                )
        if ids.ndim != 2 or not ids.numel():
            raise ArgumentError(f"input_ids need the shape [rows, tokens] with at least one token, got {[*ids.shape]}")
        tokens: Ids = ids.cpu().numpy()
        if mask is None:
            pad = self._base.generation_config.pad_token_id
            if pad is not None and (tokens == pad).any():
                raise ArgumentError(f"input_ids contain the padding token {pad}: pass attention_mask")
            return tokens, [0] * len(tokens)
        if mask.shape != ids.shape:
            raise ArgumentError(f"attention_mask needs the shape of input_ids, {[*ids.shape]}, got {[*mask.shape]}")
        used = (mask != 0).cpu().numpy()
        padding = (~used).sum(axis=1)
        if (used != (np.arange(tokens.shape[1]) >= padding[:, None])).any():
            raise ArgumentError("only left padding is possible: the zeros of attention_mask must come before the ones")
        if not used[:, -1].all():
            raise ArgumentError("a row of attention_mask is empty; every prompt needs at least one token")
        return tokens, padding.tolist()

    def _check_model(self) -> None:
        """Raise an error if the cache is closed, or if the KV would be random or have another dtype.

        If the model has changed, use a new namespace.
        """
        if not self._finalizer.alive:
            raise ClosedError("this PrefixCache is closed")
        if self._base.training:
            raise ArgumentError("the model is in training mode, where its KV is random: call model.eval() first")
        if torch.is_autocast_enabled(self._base.device.type):
            raise ArgumentError("autocast changes the type of the KV: load the model with the dtype that you need")
        if self._base.dtype != self._dtype:
            raise ArgumentError(
                f"the model was converted from {self._dtype} to {self._base.dtype}; close this PrefixCache and create "
                f"another one"
            )
        state = model_state(self._base)
        if state != self._state:
            self._state = state
            self._recorded.clear()  # caches in use have KV of the old model
            self._tiers.use_namespace(namespace_of_model(self._base, self._layout))

    def _load(self, chains: Sequence[Chain], padding: Sequence[int], limit: int) -> tuple[list[torch.Tensor], int]:
        """Load the leading columns of all rows. Return the states [row, head, column, size] and the number of columns.

        The states are the keys and the values of layer 0, then those of layer 1, and so on. Without a hit, the list is
        empty.
        """
        states: list[torch.Tensor] = []
        for row, (chain, pads) in enumerate(zip(chains, padding, strict=True)):
            match, num_used = self._tiers.match(chain), 0
            if limit > pads and match.num_blocks:
                if not states:
                    states = self._new_states(len(chains), limit)
                wanted = -(-(limit - pads) // chain.namespace.block_tokens)
                num_used = self._load_row(states, row, pads, match, min(wanted, match.num_blocks))
            self._tiers.release(match, num_used)
            limit = min(limit, pads + num_used * chain.namespace.block_tokens)
        if limit <= min(padding):
            return [], 0
        return [tensor[:, :, :limit] for tensor in states], limit

    def _load_row(self, states: list[torch.Tensor], row: int, pads: int, match: PrefixMatch, stop: int) -> int:
        """Load the blocks [0, stop) of a row. Return the number of blocks that arrived."""
        block_tokens, done = self._layout.block_tokens, 0
        for first, done, tensors in self._tiers.load(match, stop):
            for target, (_, _, blocks) in zip(states, tensors, strict=True):
                column = pads + first * block_tokens
                columns = target[row, :, column : column + (done - first) * block_tokens]
                columns.copy_(blocks.transpose(0, 1).flatten(1, 2)[:, : columns.shape[1]])
        return done

    def _new_states(self, num_rows: int, num_columns: int) -> list[torch.Tensor]:
        shapes = [(views.shape[1], views.shape[3], views.dtype) for _, _, views in self._tiers.staging(1)]
        device = self._base.device
        return [
            torch.zeros((num_rows, heads, num_columns, size), dtype=kind, device=device) for heads, size, kind in shapes
        ]

    def _record(self, chains: Sequence[Chain], padding: Sequence[int], ids: Ids, num_columns: int) -> RecordedRows:
        rows = []
        for chain, pads in zip(chains, padding, strict=True):
            known = Chain(
                chain.namespace,
                chain.token_range(0, max(0, num_columns - pads)),
                salt=chain.salt,
                adapter=chain.adapter,
            )
            rows.append(RecordedRow(known, pads, known.num_blocks))
        return RecordedRows(ids, padding, rows, num_columns)

    # ---- forward passes --------------------------------------------------------------------------------------------

    def _before_forward(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Check that the input continues the cache."""
        cache = kwargs.get("past_key_values")
        recorded = self._recorded.get(cache) if isinstance(cache, PrefixKV) else None
        if recorded is None or not isinstance(cache, PrefixKV):
            return
        if remove_row_adapters(self._adapter_layers):
            raise ArgumentError(_PER_ROW)
        past = int(cache.get_seq_length())
        if past < recorded.num_columns and cache.recent.is_valid:
            recorded.crop(past)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(cache, PrefixStaticCache) and ids is not None and past + ids.shape[1] > cache.max_length:
            raise ArgumentError(
                f"the StaticCache has room for {cache.max_length} tokens, but the model computes {ids.shape[1]} after "
                f"the first {past}; pass a larger max_length to `begin`"
            )
        can_record = recorded.check(past, ids, kwargs.get("position_ids"), kwargs.get("attention_mask"))
        if not (can_record and cache.recent.is_valid):
            self._stop(cache)

    def _after_forward(self, args: Any, kwargs: dict[str, Any], _: Any) -> None:
        """Record the tokens that the model has computed, and save full blocks."""
        cache = kwargs.get("past_key_values")
        recorded = self._recorded.get(cache) if isinstance(cache, PrefixKV) else None
        if recorded is None or not isinstance(cache, PrefixKV):
            return
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        recorded.add(ids, kwargs.get("position_ids"))
        if recorded.has_full_block:
            with self._lock, torch.no_grad():
                if recorded.record() and not torch.is_autocast_enabled(self._base.device.type):
                    self._save(cache, recorded)
                else:
                    self._stop(cache)

    def _save(self, cache: PrefixKV, recorded: RecordedRows) -> None:
        block_tokens = self._layout.block_tokens
        for number, row in enumerate(recorded.rows):

            def fill(first: int, stop: int, tensors: Tensors, number: int = number, row: RecordedRow = row) -> None:
                columns = row.padding + first * block_tokens, row.padding + stop * block_tokens
                for layer, role, blocks in tensors:
                    states = row_states(cache, layer, number, *columns)[role == "value"]
                    blocks.copy_(states.unflatten(1, (stop - first, block_tokens)).transpose(0, 1))

            if row.chain.num_blocks > row.num_saved and not row.point.is_over:
                self._tiers.save(row.chain, row.point, row.num_saved, row.chain.num_blocks, fill)
            row.num_saved = row.chain.num_blocks
        if cache.recent.layers:
            cache.recent.drop_before(min(row.padding + row.num_saved * block_tokens for row in recorded.rows))

    def _stop(self, cache: PrefixKV) -> None:
        """Stop saving the blocks of a cache."""
        cache.recent.stop()
        self._recorded.pop(cache, None)


# On GPUs, `generate` compiles the decode steps of static caches. The hooks are excluded from compilation.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(method: weakref.WeakMethod[Any], _: torch.nn.Module, *given: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*given)


def _finish(tiers: PrefixTiers, hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
    tiers.close(CLOSE_SECONDS)


def _nbytes(value: int | str) -> int:
    try:
        return parse_bytes(value) if isinstance(value, str) else int(value)
    except ValueError:
        raise ArgumentError(f"a size must be a number of bytes, or a text such as 16GiB, got {value!r}") from None
