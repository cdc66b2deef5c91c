"""Compare the offsets and sizes of layouts with plain sums."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.errors import ArgumentError, RangeError
from kvtier.layout import SLOT_ALIGNMENT, CacheGroup, KVLayout, LayerSpec, TensorSpec

LLAMA_8B = CacheGroup.attention("main", 32, 8, 128, "bf16", 16)
DEEPSEEK = CacheGroup.mla("main", 61, 576, "bf16", 16)


def test_block_sizes_of_known_models_are_correct():
    assert LLAMA_8B.block_bytes == 2 << 20
    assert DEEPSEEK.block_bytes == 61 * 576 * 2 * 16
    assert CacheGroup.attention("main", 28, 8, 128, "bf16", 16).block_bytes == 28 * 2 * (32 << 10)
    assert KVLayout(16, (LLAMA_8B,)).token_bytes == 131_072


def test_layer_and_block_sizes_are_sums_of_tensor_sizes():
    scale = TensorSpec("key_scale", dt.f32, (16, 8))
    group = CacheGroup.attention("main", 3, 8, 128, "fp8_e4m3", 16, extra=[scale])
    assert [each.name for each in group.layers[0].tensors] == ["key", "value", "key_scale"]
    assert group.layers[0].nbytes == 2 * 16 * 8 * 128 + 16 * 8 * 4
    assert group.tensor_span(1, "key_scale").offset == group.layers[0].nbytes + 2 * 16 * 8 * 128
    assert group.span(range(1, 3)).nbytes == 2 * group.layers[0].nbytes


def test_draft_layers_can_be_added_to_group():
    draft = CacheGroup.attention("draft", 1, 4, 64, "bf16", 16)
    window = CacheGroup.attention("window", 8, 8, 128, "bf16", 16, window_tokens=1024)
    layout = KVLayout(16, (LLAMA_8B.with_layers(draft.layers), window))
    assert layout.group("main").num_layers == 33
    assert layout.group("main").block_bytes == LLAMA_8B.block_bytes + draft.block_bytes
    assert layout.group("window").window_tokens == 1024
    with pytest.raises(ArgumentError, match="main, window"):
        layout.group("draft")


def test_packed_tensor_size_rounds_up():
    assert TensorSpec("key", dt.u4, (3, 5)).nbytes == 8


@given(
    sizes=st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=3), min_size=1, max_size=9),
)
def test_tensors_fill_block_without_gaps(sizes):
    layers = [LayerSpec(tuple(TensorSpec(f"t{k}", dt.u8, (n,)) for k, n in enumerate(each))) for each in sizes]
    group = CacheGroup("g", tuple(layers))
    at = 0
    for layer, spec, span in group.tensors():
        assert (span.offset, span.nbytes) == (at, sizes[layer][int(spec.name[1:])])
        assert group.tensor_span(layer, spec.name) == span
        at += span.nbytes
    assert at == group.block_bytes == sum(map(sum, sizes))
    assert group.slot_bytes % SLOT_ALIGNMENT == 0
    assert 0 <= group.slot_bytes - group.block_bytes < SLOT_ALIGNMENT
    for start in range(len(layers)):
        for stop in range(start + 1, len(layers) + 1):
            span = group.span(range(start, stop))
            assert span.offset == sum(map(sum, sizes[:start]))
            assert span.nbytes == sum(map(sum, sizes[start:stop]))


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=70),
    piece_bytes=st.integers(1, 20_000),
    min_groups=st.integers(1, 8),
)
def test_layer_groups_cover_layers_in_order(sizes, piece_bytes, min_groups):
    group = CacheGroup("g", tuple(LayerSpec((TensorSpec("t", dt.u8, (n,)),)) for n in sizes))
    runs = group.layer_groups(None, piece_bytes, min_groups)
    assert [layer for run in runs for layer in run] == list(range(len(sizes)))
    assert all(runs)
    num_groups = min(len(sizes), max(min_groups, group.block_bytes // piece_bytes))
    assert len(runs) <= num_groups
    first = group.span(runs[0]).nbytes
    # the first run has at most block_bytes / num_groups bytes, unless it has only one layer or is the only run
    assert first * num_groups <= group.block_bytes or len(runs[0]) == 1 or len(runs) == 1


def test_layer_groups_of_equal_layers_differ_by_at_most_one():
    assert LLAMA_8B.layer_groups(None, 512 << 10, 4) == [range(8), range(8, 16), range(16, 24), range(24, 32)]
    assert [len(run) for run in DEEPSEEK.layer_groups(None, 512 << 10, 4)] == [15, 15, 15, 16]
    assert LLAMA_8B.layer_groups(range(4, 6), 1 << 30, 4) == [range(4, 5), range(5, 6)]


@pytest.mark.parametrize("layers", [range(0), range(5, 3), range(-1, 2), range(33), range(0, 8, 2)])
def test_span_of_invalid_layers_raises(layers):
    with pytest.raises(RangeError, match="32"):
        LLAMA_8B.span(layers)


def test_invalid_layout_raises():
    with pytest.raises(ArgumentError, match="positive"):
        TensorSpec("key", dt.u8, (0, 4))
    with pytest.raises(ArgumentError, match="different names"):
        LayerSpec((TensorSpec("key", dt.u8, (4,)),) * 2)
    with pytest.raises(ArgumentError, match="no layers"):
        CacheGroup("g", ())
    with pytest.raises(ArgumentError, match="different names"):
        KVLayout(16, (LLAMA_8B, LLAMA_8B))
    with pytest.raises(ArgumentError, match="no tensor"):
        LLAMA_8B.tensor_span(3, "scale")


def test_layout_description_is_json_and_differs_by_layout():
    one, two = KVLayout(16, (LLAMA_8B,)), KVLayout(16, (CacheGroup.attention("main", 32, 8, 128, "f16", 16),))
    assert json.loads(json.dumps(one.describe())) == one.describe()
    assert one.describe() == KVLayout(16, (LLAMA_8B,)).describe() != two.describe()
