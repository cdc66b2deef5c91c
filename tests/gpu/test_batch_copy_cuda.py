"""BatchCopy on a GPU: paths, directions, graph capture, the legacy default stream, failures and lifetimes."""

import gc
import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import StateError, UnavailableError
from kvtier.memory import CPU, PINNED, BatchCopy, Buffer, CostTable, Placement, Stream, calibrate, context, copy, cuda
from kvtier.memory.copy_paths import CopyContext, why_not
from kvtier.memory.gather import gather_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
GPU = Placement("cuda", 0)
PLACES = [CPU, PINNED, GPU]
PATHS = ["driver", "gather", "loop", None]


def filled(size, placement, seed):
    values = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    buffer = Buffer(size, "u8", placement)
    copy(Buffer.wrap(values), buffer)
    torch.cuda.synchronize()
    return buffer, values


def contents(buffer):
    torch.cuda.synchronize()
    host = Buffer(buffer.size, "u8")
    copy(buffer, host)
    torch.cuda.synchronize()
    return host.numpy().copy()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dst_place", PLACES, ids=str)
@pytest.mark.parametrize("src_place", PLACES, ids=str)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_every_path_and_direction_copies_the_same_bytes(src_place, dst_place, path, data):
    size = data.draw(st.sampled_from([64, 1000, 300_000]))
    src, src_values = filled(size, src_place, 1)
    dst, dst_values = filled(size, dst_place, 2)
    count = data.draw(st.integers(1, 700))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    uniform = data.draw(st.booleans())
    lengths = np.full(count, random.integers(1, 64)) if uniform else random.integers(0, 64, count)
    src_at, dst_at = (random.integers(0, size - lengths + 1) for _ in range(2))
    if data.draw(st.booleans()):  # with 16-byte alignment, the gather kernel uses its widest loads
        lengths, src_at, dst_at = (array // 16 * 16 for array in (lengths, src_at, dst_at))
    expected = dst_values.copy()
    for x, y, n in zip(src_at, dst_at, lengths, strict=True):
        expected[y : y + n] = src_values[x : x + n]
    with context(stream=Stream(GPU)), BatchCopy(path=path) as batch:
        batch.pieces(src, src_at, lengths, dst, dst_at)
    assert np.array_equal(contents(dst), expected)
    assert batch.result.num_calls == count


@pytest.mark.parametrize("path", PATHS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_dependent_pieces_in_one_gpu_buffer_run_in_order(path, seed):
    random = np.random.default_rng(seed)
    size = int(random.integers(40, 3000))
    buffer, expected = filled(size, GPU, seed)
    count = int(random.integers(1, 60))
    lengths = random.integers(0, min(size, 200), count)
    src_at, dst_at = (random.integers(0, size - lengths + 1) for _ in range(2))
    for x, y, n in zip(src_at, dst_at, lengths, strict=True):
        expected[y : y + n] = expected[x : x + n].copy()
    with BatchCopy(path=path) as batch:
        batch.pieces(buffer, src_at, lengths, buffer, dst_at)
    assert np.array_equal(contents(buffer), expected)


# Maximum number of pieces per launch:   small gather kernel   large gather kernel
#     pieces of equal size                               507                 4,090
#     pieces of different sizes                          170                 1,364
@pytest.mark.parametrize("count", [1, 168, 171, 507, 508, 1365, 4090, 4091, 9000])
@pytest.mark.parametrize("uniform", [True, False])
def test_gather_kernel_accepts_any_number_of_pieces(count, uniform):
    random = np.random.default_rng(count)
    src, src_values = filled(count * 48, GPU, 1)
    dst, expected = filled(count * 48, PINNED, 2)
    sizes = np.full(count, 48) if uniform else random.integers(1, 49, count)
    src_at, dst_at = (random.permutation(count) * 48 for _ in range(2))
    for x, y, n in zip(src_at, dst_at, sizes, strict=True):
        expected[y : y + n] = src_values[x : x + n]
    with BatchCopy(path="gather") as batch:
        batch.pieces(src, src_at, sizes, dst, dst_at)
    assert batch.result.path == "gather"
    assert np.array_equal(contents(dst), expected)


def test_gather_copies_rows_more_than_4_gib_apart():
    # For pieces of equal size, the kernel gets 32-bit offsets. The unit of the offsets is the largest power of 2, at
    # most 16 bytes, that divides all offsets. Here, the unit is 1 byte, so the second offset does not fit into 32 bits.
    far = Buffer(5 << 30, "u8", GPU)
    far.slice(0, 8).fill(1)
    far.slice((5 << 30) - 7, 7).fill(2)
    out, _ = filled(14, GPU, 0)
    with BatchCopy(path="gather") as batch:
        batch.pieces(far, [0, (5 << 30) - 7], 7, out, [0, 7])
    assert contents(out).tolist() == [1] * 7 + [2] * 7


@pytest.mark.parametrize("path", ["driver", "gather", "loop", None])
def test_copies_on_legacy_default_stream_run_in_order(path):
    src, dst = Buffer(1 << 24, "u8", GPU), Buffer(1 << 24, "u8", GPU)
    blocks = np.arange(0, 1 << 24, 1 << 16)
    assert torch.cuda.current_stream().cuda_stream == 0
    for value in range(5):
        src.torch().fill_(value)
        with BatchCopy(path=path) as batch:
            batch.pieces(src, blocks, 1 << 16, dst, blocks[::-1].copy())
        assert int(dst.torch().min()) == int(dst.torch().max()) == value
    assert path is None or batch.result.path == path


@pytest.mark.parametrize("forced", [None, "driver", "gather", "loop"])
def test_captured_batch_copy_is_replayed_with_new_data(forced):
    src, dst = Buffer(1 << 16, "u8", GPU), Buffer(1 << 16, "u8", GPU)
    at = np.random.default_rng(0).permutation(64) * 1024
    graph, stream = torch.cuda.CUDAGraph(), Stream(GPU)
    batch = BatchCopy(path=forced)
    with context(stream=stream), torch.cuda.graph(graph, stream=stream.native):
        batch.pieces(src, at, 1024, dst, at)
        result = batch.run()
    assert result.path in ("gather", "loop")
    assert forced != "driver" or "cannot be captured" in result.reason
    for value in (3, 4):
        src.torch().fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert dst.torch().eq(value).all()


def test_capture_of_host_copy_raises():
    a, b, c = Buffer(64, "u8"), Buffer(64, "u8"), Buffer(64, "u8", GPU)
    graph, stream = torch.cuda.CUDAGraph(), Stream(GPU)
    with context(stream=stream), torch.cuda.graph(graph, stream=stream.native):
        with pytest.raises(StateError, match="captured"), BatchCopy() as batch:
            batch(a, 64, b)
        c.torch().zero_()


FAILING = """
import sys
import numpy as np
from kvtier.errors import CopyError
from kvtier.memory import BatchCopy, Buffer, Stream, context, cuda

src, dst = Buffer(64 << 20, "u8", "cuda:0"), Buffer(256 << 20, "u8", "pinned")
at = np.array([0, 4096, 1024])
sizes = np.array([512, 65 << 20, 512])  # the second piece is larger than the source
batch = BatchCopy(path=sys.argv[1])
batch.pointers(src.data() + at, sizes, dst.data() + (128 << 20) + at)
try:
    with context(stream=Stream("cuda:0")):
        batch.run()
except CopyError as error:
    assert error.index == 1, error.index
    assert f"entry 1: copying {65 << 20} bytes from {src.data() + 4096:#x}" in str(error), error
    assert len(batch) == 0
else:
    raise SystemExit("no error")
"""


def test_every_path_works_in_a_fresh_thread():
    src, values = filled(4096, GPU, 1)
    stream, failures = Stream(GPU), []

    def work():
        try:
            assert cuda.placement_of(src.data()) == GPU
            for path in PATHS:
                dst = Buffer(4096, "u8", PINNED)
                with context(stream=stream), BatchCopy(path=path) as batch:
                    batch.pieces(src, np.arange(0, 4096, 64), 64, dst, np.arange(0, 4096, 64))
                stream.synchronize()
                assert np.array_equal(dst.numpy(), values), path
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []


FIRST_IN_CAPTURE = """
import numpy as np, torch
from kvtier.memory import BatchCopy, Buffer, Stream, context

src, dst = Buffer(4096, "u8", "cuda:0"), Buffer(4096, "u8", "cuda:0")
graph, stream = torch.cuda.CUDAGraph(), Stream("cuda:0")
batch = BatchCopy(path="gather")
with context(stream=stream), torch.cuda.graph(graph, stream=stream.native):
    batch.pieces(src, np.arange(0, 4096, 64), 64, dst, np.arange(0, 4096, 64))
    batch.run()
src.fill(5)
graph.replay()
torch.cuda.synchronize()
assert batch.result.path == "gather", batch.result.reason
assert dst.tolist() == [5] * 4096
"""

WITHOUT_BINDINGS = """
import sys
sys.modules["cuda"] = sys.modules["cuda.bindings"] = None
import numpy as np
from kvtier.memory import BatchCopy, Buffer, Stream, context

src, dst = Buffer(4096, "u8", "cuda:0"), Buffer(4096, "u8", "pinned")
src.fill(3)
for path in ("driver", "gather", "loop", None):
    dst.fill(0)
    with BatchCopy(path=path) as batch:
        batch.pieces(src, np.arange(0, 4096, 64), 64, dst, np.arange(0, 4096, 64)[::-1].copy())
        batch.pieces(src, [0, 10], 20, src, [5, 15])
    assert "loop" in batch.result.path, batch.result.path
    assert path == "loop" or "cuda-bindings is not installed" in batch.result.reason, batch.result.reason
    assert dst.tolist() == [3] * 4096
"""


@pytest.mark.parametrize(
    "script", [FIRST_IN_CAPTURE, WITHOUT_BINDINGS], ids=["first use during capture", "without cuda-bindings"]
)
def test_batch_copy_works_in_a_fresh_process(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_zero_size_copy_can_be_captured():
    graph, stream = torch.cuda.CUDAGraph(), Stream(GPU)
    src, dst = Buffer(4, "u8", GPU), Buffer(4, "u8", GPU)
    with context(stream=stream), torch.cuda.graph(graph, stream=stream.native):
        src.torch().zero_()
        with BatchCopy() as batch:
            batch(src, 0, dst)
    assert batch.result.num_calls == 1


@pytest.mark.parametrize("path", ["driver", "loop"])
def test_failed_copy_reports_index_and_address_and_size(path):
    done = subprocess.run([sys.executable, "-c", FAILING, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", [12080, 13000])
def test_batch_call_copies_with_both_driver_signatures(version):
    call = cuda.BatchCall.of_version(version)
    assert call.reports_failure == (version == 12080)
    cuda._self_test(call, GPU)


@pytest.mark.parametrize("path", PATHS)
def test_adjacent_pieces_across_allocations_are_copied(path):
    size = 2 << 20
    taken = sorted(int(cuda.unwrap(cuda.driver().cuMemAlloc(size))) for _ in range(64))
    try:
        first = next(a for a, b in itertools.pairwise(taken) if b - a == size)
        out, _ = filled(2 * size, PINNED, 0)
        torch.cuda.synchronize()
        Buffer.from_pointer(first, size, "u8", GPU).fill(1)
        Buffer.from_pointer(first + size, size, "u8", GPU).fill(2)
        with BatchCopy(path=path) as batch:
            batch.pointers([first + size, first], size, [out.data() + size, out.data()])
        assert batch.result.num_entries == 1
        assert path != "driver" or ("refused" in batch.result.reason and batch.result.path == "loop")
        torch.cuda.synchronize()
        assert contents(out).tolist() == [1] * size + [2] * size
    finally:
        for pointer in taken:
            cuda.unwrap((*cuda.driver().cuMemFree(pointer), None))


def test_forced_gather_of_pageable_memory_uses_another_path():
    job = CopyContext(CPU, GPU, Stream(GPU))
    assert "not pinned" in why_not("gather", job)
    src, values = filled(4096, CPU, 0)
    dst = Buffer(4096, "u8", GPU)
    with BatchCopy(path="gather") as batch:
        batch(src, 4096, dst)
    assert "gather was forced, but" in batch.result.reason
    assert np.array_equal(contents(dst), values)


def test_placement_of_address_comes_from_the_driver():
    for place in PLACES:
        buffer = Buffer(4096, "u8", place)
        assert cuda.placement_of(buffer.data()) == place
    # Memory of this size does not come from torch's pool. kvtier's allocator maps it and registers it with CUDA.
    large = Buffer(64 << 20, "u8", PINNED)
    assert cuda.placement_of(large.data()) == PINNED
    assert large.torch().is_pinned()


@pytest.mark.parametrize("place", [PINNED, GPU], ids=str)
def test_memory_of_pending_copy_is_not_reused(place):
    stream = Stream(GPU)
    for attempt in range(5):
        src, values = filled(8 << 20, place, attempt)
        dst = Buffer(8 << 20, "u8", GPU if place == PINNED else PINNED)
        with torch.cuda.stream(stream.native):
            torch.cuda._sleep(50_000_000)
        with context(stream=stream), BatchCopy() as batch:
            batch(src, src.size, dst)
        del src
        gc.collect()
        again = Buffer(8 << 20, "u8", place)  # would get the memory of `src` if that memory were free
        again.fill(99)
        torch.cuda.current_stream().synchronize()
        stream.synchronize()
        assert np.array_equal(contents(dst), values)


def test_batch_copy_runs_in_stream_order():
    stream = Stream(GPU)
    src, dst = Buffer(1 << 20, "u8", GPU), Buffer(1 << 20, "u8", PINNED)
    with torch.cuda.stream(stream.native):
        torch.cuda._sleep(100_000_000)
        src.torch().fill_(5)
    with context(stream=stream), BatchCopy() as batch:
        batch(src, src.size, dst)
    assert not stream.query()
    stream.synchronize()
    assert (dst.numpy() == 5).all()


def test_host_copy_on_cuda_stream_waits_for_device_copy():
    stream = Stream(GPU)
    device, pinned, plain = Buffer(1 << 20, "u8", GPU), Buffer(1 << 20, "u8", PINNED), Buffer(1 << 20, "u8")
    with torch.cuda.stream(stream.native):
        torch.cuda._sleep(50_000_000)
        device.torch().fill_(6)
    with context(stream=stream), BatchCopy() as batch:
        batch(device, device.size, pinned)
        batch(pinned, pinned.size, plain)
    assert batch.result.num_waves == 2
    assert (plain.numpy() == 6).all()


def test_calibrate_saves_measured_costs(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    table = calibrate(GPU)
    (file,) = tmp_path.glob("costs-*.json")
    assert CostTable.from_json(file.read_text()).costs == table.costs
    assert {"cuda>cuda", "cuda>pinned", "pinned>cuda", "cuda>cpu", "cpu>cuda"} == set(table.costs)
    assert set(table.costs["cuda>cuda"]) == {"gather", "driver", "loop"}


def test_gather_kernels_are_compiled_once():
    assert gather_kernels(GPU) is gather_kernels(GPU)


def test_buffer_on_missing_gpu_raises_with_name():
    with pytest.raises(UnavailableError, match=r"cuda:9.*1 GPU|cuda:9.*GPU\(s\)"):
        Buffer(1, "u8", "cuda:9")
