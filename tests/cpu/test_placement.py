"""Placement: names, conversion from torch devices, and errors on machines without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ArgumentError, UnavailableError
from kvtier.memory import CPU, PINNED, Buffer, Placement, Stream, best_host

has_gpu = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not has_gpu, reason="needs an NVIDIA GPU")
needs_no_gpu = pytest.mark.skipif(has_gpu, reason="this machine has an NVIDIA GPU")


@given(st.one_of(st.sampled_from(["cpu", "pinned"]), st.integers(0, 1000).map("cuda:{}".format)))
def test_placement_parse_and_str_round_trip(text):
    assert str(Placement.parse(text)) == text


def test_placement_parse_returns_named_placement():
    assert Placement.parse("cpu") == CPU == Placement("cpu")
    assert Placement.parse("pinned") == PINNED == Placement("pinned")
    assert Placement.parse("cuda:3") == Placement("cuda", 3)


def test_placement_parse_of_placement_returns_it(placement):
    assert Placement.parse(placement) is placement


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (torch.device("cpu"), CPU),
        (torch.device("cpu", 0), CPU),
        (torch.device("cuda", 2), Placement("cuda", 2)),
    ],
    ids=str,
)
def test_placement_parse_accepts_torch_device(device, expected):
    assert Placement.parse(device) == expected


def test_placement_parse_cuda_is_current_gpu():
    assert Placement.parse("cuda") == Placement("cuda", torch.cuda.current_device() if has_gpu else 0)


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", "cpu:1", "CPU", " cpu", "mps", torch.device("meta")]
)
def test_placement_parse_unknown_name_raises_with_known_names(text):
    with pytest.raises(ArgumentError, match="'cpu', 'pinned' or 'cuda:<index>'") as caught:
        Placement.parse(text)
    assert repr(str(text)) in str(caught.value)


def test_placements_are_hashable_and_immutable():
    assert len({CPU, Placement.parse("cpu"), PINNED, Placement("cuda", 0), Placement("cuda", 1)}) == 4
    with pytest.raises(AttributeError):
        CPU.kind = "cuda"


def test_placement_is_device_is_true_only_for_gpu():
    assert Placement("cuda", 0).is_device
    assert not CPU.is_device
    assert not PINNED.is_device


def test_placement_torch_returns_torch_device():
    assert CPU.torch == PINNED.torch == torch.device("cpu")
    assert Placement("cuda", 1).torch == torch.device("cuda", 1)


def test_available_placement_is_usable(placement):
    assert placement.require() is placement
    buffer = Buffer(4, "u8", placement)
    assert buffer.placement == placement
    assert buffer.torch().device == placement.torch
    assert buffer.torch().is_pinned() == (placement == PINNED)


def test_cpu_placement_is_always_available():
    assert CPU.require() is CPU


@needs_no_gpu
@pytest.mark.parametrize("text", ["pinned", "cuda:0", "cuda"])
@pytest.mark.parametrize(
    "use",
    [
        lambda text: Placement.parse(text).require(),
        lambda text: Buffer(4, "u8", text),
        lambda text: Stream(text),
    ],
    ids=["require", "Buffer", "Stream"],
)
def test_gpu_placement_without_gpu_raises_with_reason(use, text):
    with pytest.raises(UnavailableError, match="needs an NVIDIA GPU and a CUDA build of torch") as caught:
        use(text)
    assert torch.__version__ in str(caught.value)
    assert str(Placement.parse(text)) in str(caught.value)
    assert "best_host()" in str(caught.value)


@needs_gpu
def test_gpu_index_too_large_raises_with_gpu_count():
    count = torch.cuda.device_count()
    with pytest.raises(UnavailableError, match=rf"cuda:{count} does not exist: this machine has {count} GPU"):
        Placement("cuda", count).require()


def test_buffer_from_pointer_on_missing_gpu_raises():
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UnavailableError, match=missing):
        Buffer.from_pointer(4096, 4, "u8", missing)


def test_best_host_is_pinned_only_with_gpu():
    best = best_host()
    assert best == (PINNED if has_gpu else CPU)
    assert Buffer(4, "u8", best).placement == best
