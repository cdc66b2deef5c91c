"""Cache tensors of vLLM as a CacheGroup: order of axes, shared tensors, kernel blocks and unsupported layouts."""

from __future__ import annotations

import pytest
import torch

from kvtier.errors import ArgumentError
from kvtier.integrations.vllm.layouts import device_cache_of
from vllm_views import cache_views

SIZES = {"L": 3, "B": 6, "H": 4, "N": 8, "C": 2}
"""L layers, B blocks, H heads, N tokens of a block, C float16 elements per token and head (one of K, one of V)."""


def cache_of(layout, sizes=SIZES, num_blocks=6, **options):
    views = cache_views(layout, sizes, torch.float16, "cpu")
    return device_cache_of(views, list(views), num_blocks, **{"has_heads": True, **options})


@pytest.mark.parametrize(
    ("layout", "shape", "head_axis", "num_pieces"),
    [
        ("LBHNC", (4, 8, 4), 0, 3),
        ("LBNHC", (8, 4, 4), 1, 3),
        ("BLHNC", (4, 8, 4), 0, 1),
        ("BLNHC", (8, 4, 4), 1, 1),
    ],
)
def test_layout_keeps_the_order_of_bytes_in_a_page(layout, shape, head_axis, num_pieces):
    cache, pages = cache_of(layout)
    spec = cache.group.layers[0].tensors[0]
    assert (spec.shape, spec.head_axis) == (shape, head_axis)
    assert len(cache.part(range(3))) == num_pieces
    assert [tuple(page.shape) for page in pages] == [(6, *shape)] * 3


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_layout_of_one_head_has_the_same_head_axis(layout):
    """A rank with one head and an engine with all heads must use the same head axis for a block."""
    one, _ = cache_of(layout, {**SIZES, "H": 1})
    all_heads, _ = cache_of(layout)
    assert one.group.layers[0].tensors[0].head_axis == all_heads.group.layers[0].tensors[0].head_axis


def test_layout_without_heads_has_no_head_axis():
    cache, _ = cache_of("LBNHC", {**SIZES, "H": 1}, has_heads=False)
    assert cache.group.layers[0].tensors[0].head_axis is None


def test_layout_with_kernel_blocks_joins_them_to_blocks():
    cache, pages = cache_of("LBHNC", num_blocks=3)
    assert cache.num_blocks == 3
    assert cache.group.layers[0].tensors[0].shape == (2, 4, 8, 4)
    assert pages[0].shape == (3, 2, 4, 8, 4)


def test_layers_that_share_a_tensor_count_once():
    views = cache_views("LBHNC", SIZES, torch.float16, "cpu")
    views["shared"] = views["layer.0"]
    cache, _ = device_cache_of(views, list(views), 6, has_heads=True)
    assert cache.group.num_layers == 3


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layout_with_one_piece_per_head_raises(layout):
    with pytest.raises(ArgumentError, match="not contiguous"):
        cache_of(layout)


def test_layout_of_unknown_shape_raises():
    with pytest.raises(ArgumentError, match="expected a cache tensor"):
        device_cache_of({"a": torch.zeros(6, 4)}, ["a"], 6, has_heads=True)
    with pytest.raises(ArgumentError, match="expected a cache tensor"):
        cache_of("LBHNC", num_blocks=4)
