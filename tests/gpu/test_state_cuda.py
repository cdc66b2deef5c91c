"""State on a GPU: the memory of a warp in flight is not reused."""

import pytest
import torch

from kvtier.memory import BatchCopy, Placement, Stream, context
from kvtier.state import Permutation, State

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
GPU = Placement("cuda", 0)


def warp_after_sleep(state, batch, new, stream, cycles):
    with context(stream=stream), torch.cuda.stream(stream.native):
        torch.cuda._sleep(cycles)
        state.warp(Permutation([1], 0), batch, new=new)
        batch.run()


def test_memory_of_dropped_state_is_not_reused_during_warp():
    size = 3 << 20
    stream, new = Stream(GPU), torch.ones((1, size), dtype=torch.uint8, device=GPU.torch)
    # Warm up: the first copy on a machine measures the paths, and the first copy in a process compiles kernels.
    warp_after_sleep(State((1, size), "u8", GPU), BatchCopy(), new, stream, 1000)
    torch.cuda.synchronize()
    state, batch = State((1, size), "u8", GPU), BatchCopy()
    used = {state.front.data_ptr(), state.back.data_ptr()}
    torch.cuda.synchronize()
    warp_after_sleep(state, batch, new, stream, 200_000_000)  # about 0.1 s
    del state, batch
    others = [torch.empty(size, dtype=torch.uint8, device=GPU.torch) for _ in range(2)]
    assert not stream.query()
    assert used.isdisjoint(other.data_ptr() for other in others)
    stream.synchronize()
