"""Describes vLLM's cache tensors as a CacheGroup and a DeviceCache.

vLLM passes one view per layer with the axes [block, head, token, content]. All views share one allocation. Layouts
differ in the order of the axes in memory (Layer, Block, Head, N for token, Content):

    LBHNC, LBNHC    one run of bytes per layer and block     BLHNC, BLNHC    one run of bytes per block
    LHBNC, BHLNC    one run per head: not supported          MLA             [block, 1, token, latent]

A page is one layer of a block. The code derives the order from the strides of the views. It finds the axis of the
heads, but does not interpret the bytes of a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvtier import dtype as dt
from kvtier.errors import ArgumentError
from kvtier.layout import CacheGroup, LayerSpec, TensorSpec
from kvtier.transfer import DeviceCache


def device_cache_of(
    views: Mapping[str, torch.Tensor], layer_names: Sequence[str], num_blocks: int, *, has_heads: bool
) -> tuple[DeviceCache, list[torch.Tensor]]:
    """Return a cache of the layers `layer_names`, in this order, and the pages of each layer [block, ...].

    Layers that share a tensor count as one layer. `has_heads` is False if every rank stores the same data, as with
    multi-head latent attention (MLA).
    """
    layers: list[torch.Tensor] = []
    specs: list[LayerSpec] = []
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name in layer_names:
        view = views[name]
        identity = view.data_ptr(), view.stride()
        if identity not in seen:
            seen.add(identity)
            page, head_axis = _pages(name, view, num_blocks)
            axis = head_axis if has_heads else None
            specs.append(LayerSpec((TensorSpec("kv", dt.u8, tuple(page.shape[1:]), head_axis=axis),)))
            layers.append(page)
    group = CacheGroup("main", tuple(specs))
    return DeviceCache.layer_first(group, [{"kv": layer} for layer in layers]), layers


def _pages(name: str, view: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, int]:
    """Return the bytes of a layer as [block, ...] with the axes in memory order, and the head axis of a page."""
    if view.ndim != 4 or view.shape[0] % num_blocks:
        raise ArgumentError(
            f"layer {name}: expected a cache tensor [block, head, token, content] with {num_blocks} blocks, or with a "
            f"multiple of {num_blocks} if the attention kernel uses smaller blocks; got shape {tuple(view.shape)}"
        )
    has_kernel_blocks = view.shape[0] != num_blocks  # the attention kernel divides each block into smaller blocks
    split = view.unflatten(0, (num_blocks, -1)) if has_kernel_blocks else view
    head = 2 if has_kernel_blocks else 1  # [block, kernel block, head, token, content] or [block, head, token, content]
    # Sort the axes from the outermost to the innermost. With one head per rank, the head axis and another axis can have
    # the same stride. The head axis must then come second.
    strides = split.stride()
    order = sorted(range(1, split.ndim), key=lambda axis: (-strides[axis], -split.shape[axis]))
    pages = split.permute(0, *order)
    expected = 1
    for size, stride in zip(reversed(pages.shape[1:]), reversed(pages.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            raise ArgumentError(
                f"layer {name}: the bytes of a block are not contiguous (shape {tuple(view.shape)}, strides "
                f"{view.stride()}); use a vLLM layout that keeps a block of one layer together, such as LBNHC"
            )
        expected *= size
    if order[-1] != split.ndim - 1:
        raise ArgumentError(f"layer {name}: the content of a token must be innermost, got strides {view.stride()}")
    return pages.view(torch.uint8), order.index(head)
