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
def test_text_and_placement_say_the_same(text):
    assert str(Placement.parse(text)) == text


def test_parsing_gives_the_named_placements():
    assert Placement.parse("cpu") == CPU == Placement("cpu")
    assert Placement.parse("pinned") == PINNED == Placement("pinned")
    assert Placement.parse("cuda:3") == Placement("cuda", 3)


def test_a_placement_parses_to_itself(placement):
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
def test_torch_devices_are_placements(device, expected):
    assert Placement.parse(device) == expected


def test_cuda_without_an_index_is_the_current_gpu():
    assert Placement.parse("cuda") == Placement("cuda", torch.cuda.current_device() if has_gpu else 0)


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", "cpu:1", "CPU", " cpu", "mps", torch.device("meta")]
)
def test_an_unknown_placement_is_an_error_that_names_it_and_the_known_ones(text):
    with pytest.raises(ArgumentError, match="'cpu', 'pinned' or 'cuda:<index>'") as caught:
        Placement.parse(text)
    assert repr(str(text)) in str(caught.value)


def test_placements_are_values():
    assert len({CPU, Placement.parse("cpu"), PINNED, Placement("cuda", 0), Placement("cuda", 1)}) == 4
    with pytest.raises(AttributeError):
        CPU.kind = "cuda"


def test_only_gpu_memory_is_on_a_device():
    assert Placement("cuda", 0).is_device
    assert not CPU.is_device
    assert not PINNED.is_device


def test_the_torch_device_is_the_one_whose_tensors_live_there():
    assert CPU.torch == PINNED.torch == torch.device("cpu")
    assert Placement("cuda", 1).torch == torch.device("cuda", 1)


def test_what_the_machine_has_can_be_required_and_used(placement):
    assert placement.require() is placement
    buffer = Buffer(4, "u8", placement)
    assert buffer.placement == placement
    assert buffer.torch().device == placement.torch
    assert buffer.torch().is_pinned() == (placement == PINNED)


def test_plain_host_memory_is_always_there():
    assert CPU.require() is CPU


@needs_no_gpu
@pytest.mark.parametrize("text", ["pinned", "cuda:0", "cuda"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda text: Placement.parse(text).require(),
        lambda text: Buffer(4, "u8", text),
        lambda text: Stream(text),
    ],
    ids=["require", "Buffer", "Stream"],
)
def test_memory_that_needs_a_gpu_is_an_error_that_says_what_is_missing(ask, text):
    with pytest.raises(UnavailableError, match="needs an NVIDIA GPU and a CUDA build of torch") as caught:
        ask(text)
    assert torch.__version__ in str(caught.value)
    assert str(Placement.parse(text)) in str(caught.value)
    assert "best_host()" in str(caught.value)


@needs_gpu
def test_a_gpu_too_many_is_an_error_that_says_how_many_there_are():
    count = torch.cuda.device_count()
    with pytest.raises(UnavailableError, match=rf"cuda:{count} was asked for, but this machine has {count} GPU"):
        Placement("cuda", count).require()


def test_an_address_in_memory_the_machine_does_not_have_is_an_error():
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UnavailableError, match=missing):
        Buffer.from_pointer(4096, 4, "u8", missing)


def test_the_best_host_memory_is_pinned_exactly_where_a_gpu_can_read_it():
    best = best_host()
    assert best == (PINNED if has_gpu else CPU)
    assert Buffer(4, "u8", best).placement == best
