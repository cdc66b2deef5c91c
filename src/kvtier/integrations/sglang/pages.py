"""HostPool: the pages of one of SGLang's host pools as pieces of memory, and the namespace of these pages.

    layout of the pool                pieces of a page
    layer_first                       k of all layers | v of all layers    2 per layer
    page_first, page_first_direct     k | v                                2
    page layouts with MLA             latent                               1
    any, without page addresses       a contiguous (flat) copy             1

SGLang's page hashes cover only the tokens. The namespace covers everything else that determines the bytes of a page:
model, revision, dtype, layout, sizes and ranks. For example, page_first and page_first_direct have pages of the same
size with a different order of bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvtier.errors import ArgumentError
from kvtier.index import Namespace
from kvtier.integrations.sglang.config import RankIdentity
from kvtier.storage import Scattered

Views = Sequence[memoryview]
_FEW = 4
"""Up to this number of pieces per page, a list of views is faster than arrays of offsets."""

_ATTRIBUTES = (
    *("layout", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "kv_cache_dim"),
    *("size_per_token", "dcp_size", "dcp_rank", "temporal_dtype", "conv_dtype", "indexer_dtype"),
)
KV = "kv"
_SHARDED_WITH_MLA = ("mamba",)
"""Pools that differ between tensor-parallel ranks even with MLA. With MLA, all other pools are equal in all ranks."""


class HostPool:
    """A host pool that SGLang has registered. This object keeps the pool's memory alive."""

    def __init__(self, pool: Any, name: str, rank: RankIdentity, revision: str) -> None:
        inner = getattr(getattr(pool, "anchor_entry", None), "host_pool", pool)  # the KV pool if `pool` is a group
        self.pool, self.name = pool, name
        self.page_size: int = getattr(pool, "page_size", 1) or 1
        self.is_logical = name == KV and hasattr(inner, "kv_buffer") and inner.kv_buffer is None
        """True if the pool has no memory of its own, because other pools hold the data of its pages."""
        dtype = str(getattr(inner, "dtype", ""))
        shown = {each: str(getattr(inner, each)) for each in _ATTRIBUTES if hasattr(inner, each)}
        is_sharded = not rank.is_replicated or name in _SHARDED_WITH_MLA
        layout = f"sglang {name} {type(inner).__name__} {sorted(shown.items())} {rank.describe(is_sharded=is_sharded)}"
        self.namespace = Namespace(
            rank.model, revision, dtype, hashlib.sha256(layout.encode()).hexdigest(), self.page_size
        )
        self.memory = _buffer_of(pool)
        """The whole KV buffer, for stores that register memory. None if the buffer is not one contiguous tensor."""
        self._start = pool.kv_buffer.data_ptr() if self.memory is not None else 0
        self._num_layers = getattr(inner, "layer_num", 0)
        self._layout = getattr(inner, "layout", "")

    def pages(self, indices: torch.Tensor, num_pages: int) -> list[Views]:
        """Return the memory of each page. Raise ArgumentError if there are not `page_size` indices for each page."""
        if indices is None or indices.numel() != num_pages * self.page_size:
            given = 0 if indices is None else indices.numel()
            raise ArgumentError(
                f"{num_pages} pages of pool {self.name} need {num_pages * self.page_size} host indices, got {given}"
            )
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        if not num_pages:
            return []
        starts = np.array(addresses, np.int64).reshape(num_pages, -1) - self._start
        nbytes = np.array(sizes, np.int64).reshape(starts.shape)
        count = starts.shape[1]
        if (
            self._layout == "layer_first" and count == 2 * self._num_layers
        ):  # all keys, then all values, as in a flat page
            order = np.arange(count).reshape(-1, 2).T.ravel()
            starts, nbytes = starts[:, order], nbytes[:, order]
        if (
            count > _FEW
            and self.memory is not None
            and starts.min() >= 0
            and (starts + nbytes).max() <= len(self.memory)
        ):
            return [Scattered(self.memory, *each) for each in zip(starts, nbytes, strict=True)]
        pairs = [zip(*each, strict=True) for each in zip(starts.tolist(), nbytes.tolist(), strict=True)]
        return [[self._view(self._start + start, size) for start, size in each] for each in pairs]

    @property
    def has_addresses(self) -> bool:
        """True if the pool supports page addresses for its layout."""
        try:
            self.pool.get_page_buffer_meta(torch.empty(0, dtype=torch.int64))
        except (AttributeError, NotImplementedError, ValueError):
            return False
        return True

    def flat_pages(self, indices: torch.Tensor, num_pages: int) -> list[torch.Tensor]:
        """Return copies of pages, for pools without addresses."""
        return [self.pool.get_data_page(index, flat=True) for index in self._firsts(indices, num_pages)]

    def empty_pages(self, num_pages: int) -> list[torch.Tensor]:
        return [self.pool.get_dummy_flat_data_page() for _ in range(num_pages)]

    def fill_page(self, indices: torch.Tensor, page: int, data: torch.Tensor) -> None:
        self.pool.set_from_flat_data_page(int(indices[page * self.page_size]), data)

    def _firsts(self, indices: torch.Tensor, num_pages: int) -> list[int]:
        if indices is None or indices.numel() != num_pages * self.page_size:
            raise ArgumentError(f"{num_pages} pages of pool {self.name} need {num_pages * self.page_size} host indices")
        return [int(index) for index in indices[:: self.page_size]]

    def _view(self, address: int, nbytes: int) -> memoryview:
        """Return the memory at an address. Slicing the buffer takes a tenth of the time of a new view."""
        first = address - self._start
        if self.memory is not None and first >= 0 and first + nbytes <= len(self.memory):
            return self.memory[first : first + nbytes]
        return _memory(address, nbytes)


def _buffer_of(pool: Any) -> memoryview | None:
    buffer = getattr(pool, "kv_buffer", None)
    if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous():
        return None
    return _memory(buffer.data_ptr(), buffer.numel() * buffer.element_size())


def tensor_views(tensors: Sequence[torch.Tensor]) -> list[Views]:
    """Return the memory of contiguous host tensors. Raise ArgumentError for other tensors."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ArgumentError(f"a page needs contiguous host memory, got {tensor.device}, strides {tensor.stride()}")
    return [[_memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())] for tensor in tensors]


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
