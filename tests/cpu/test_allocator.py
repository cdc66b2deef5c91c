"""Allocators: default and custom allocation functions, the lifetime of memory, statistics, and errors."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import ArgumentError, KvtierError, OutOfMemoryError, RangeError, UnavailableError
from kvtier.memory import CPU, PINNED, Allocator, BatchCopy, Buffer, Placement, Stream, context, copy, default_allocator
from kvtier.memory.region import MemoryRef
from support import held_back, new_stream

MIB = 1 << 20
TIMEOUT_S = 10  # reached only if a thread hangs

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an NVIDIA GPU")


class Pool:
    """Provides an allocator that gets its memory from torch. Records all allocations and deallocations."""

    def __init__(self, placement: Placement = CPU) -> None:
        self.placement = placement
        self.live: dict[int, torch.Tensor] = {}
        self.requested: list[int] = []
        self.returned: list[bytes] = []
        """The contents of each memory block when it was freed."""
        self.allocator = Allocator(placement, self._allocate, self._deallocate)

    def _allocate(self, nbytes: int) -> int:
        pinned = self.placement == PINNED
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.placement.torch, pin_memory=pinned)
        self.live[tensor.data_ptr()] = tensor
        self.requested.append(nbytes)
        return tensor.data_ptr()

    def _deallocate(self, address: int, nbytes: int) -> None:
        tensor = self.live.pop(address)
        assert tensor.nbytes == nbytes
        self.returned.append(tensor.cpu().numpy().tobytes())

    @property
    def num_returned(self) -> int:
        return len(self.returned)


def allocator_returning(result: object) -> Allocator:
    """Return an allocator whose allocate function returns `result`, or raises `result` if it is an exception."""

    def allocate(_nbytes: int) -> object:
        if isinstance(result, Exception):
            raise result
        return result

    def deallocate(address: int, nbytes: int) -> None:
        raise AssertionError(f"{nbytes} bytes at {address:#x} were never allocated")

    return Allocator("cpu", allocate, deallocate)


def counters(allocator: Allocator) -> tuple[int, int, int, int]:
    stats = allocator.stats
    return stats.allocated_bytes, stats.peak_bytes, stats.num_live, stats.num_allocations


# ---- default allocators ----


def test_default_allocator_is_shared_and_counts_buffers(placement):
    gc.collect()  # collect the garbage of other tests now: a later collection would change the counters
    allocator = default_allocator(placement)
    assert default_allocator(placement) is allocator
    assert allocator.placement == placement
    allocated, _, live, count = counters(allocator)
    buffer = Buffer(1000, "f32", placement)
    assert counters(allocator)[0] == allocated + 4000
    assert counters(allocator)[2:] == (live + 1, count + 1)
    assert allocator.stats.peak_bytes >= allocated + 4000
    del buffer
    assert counters(allocator)[0] == allocated
    assert counters(allocator)[2:] == (live, count + 1)


@pytest.mark.parametrize(
    "nbytes", [1, 4096, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 12345, 32 * MIB, 32 * MIB + 1], ids="{:,}".format
)
def test_allocator_memory_of_any_size_is_writable(placement, nbytes):
    held = default_allocator(placement).allocate(nbytes)
    assert held.nbytes == nbytes
    assert held.placement == placement
    tensor = held.tensor()
    assert tensor.nbytes == nbytes
    assert tensor.data_ptr() == held.pointer
    assert tensor.device == placement.torch
    assert tensor.is_pinned() == (placement == PINNED)
    tensor.fill_(0)
    tensor[-1] = 7
    tensor[0] = tensor[0] + 8
    assert int(tensor.sum(dtype=torch.int64)) == 15


def test_large_allocation_is_aligned_and_kept_alive_by_slice(placement):
    buffer = Buffer(MIB, "f64", placement)
    assert buffer.data() % 64 == 0
    tail = buffer.slice(MIB - 2)
    tail.fill(2.5)
    del buffer
    gc.collect()
    assert tail.tolist() == [2.5, 2.5]


def test_large_host_allocation_is_not_shared_with_forked_child():
    """A forked child, such as a data loader worker, must not write into the parent's memory."""
    script = """
        import ctypes, os
        from kvtier.memory import CPU, default_allocator

        held = default_allocator(CPU).allocate(8 << 20)
        ctypes.memset(held.pointer, 1, held.nbytes)
        child = os.fork()
        if child == 0:
            ctypes.memset(held.pointer, 2, held.nbytes)
            os._exit(0)
        os.waitpid(child, 0)
        print(ctypes.string_at(held.pointer, 1)[0])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


@needs_no_gpu
@pytest.mark.parametrize("text", ["pinned", "cuda:0"])
def test_default_allocator_without_gpu_raises(text):
    with pytest.raises(UnavailableError, match=text):
        default_allocator(Placement.parse(text))


# ---- custom allocators ----


def test_custom_allocator_receives_exact_sizes_and_frees_all(placement):
    pool = Pool(placement)
    sizes = [("u8", 1, 1), ("bf16", 3, 6), ("f64", 5, 40), ("u4", 3, 2), ("u2", 5, 2), ("u8", 4097, 4097)]
    buffers = [Buffer(count, name, allocator=pool.allocator) for name, count, _ in sizes]
    assert pool.requested == [nbytes for _, _, nbytes in sizes]
    assert [buffer.data() for buffer in buffers] == list(pool.live)
    assert pool.num_returned == 0
    buffers.clear()
    assert pool.num_returned == len(sizes)
    assert not pool.live


def test_custom_allocator_accepts_placement_as_text():
    assert Allocator("cuda:1", int, print).placement == Placement("cuda", 1)
    with pytest.raises(ArgumentError, match="nowhere"):
        Allocator("nowhere", int, print)


def test_buffer_and_allocator_with_different_placements_raise():
    with pytest.raises(ArgumentError, match="an allocator of cpu memory cannot allocate pinned memory"):
        Buffer(4, "u8", "pinned", allocator=Pool().allocator)


def test_custom_allocator_null_address_raises_out_of_memory():
    allocator = allocator_returning(0)
    with pytest.raises(OutOfMemoryError, match="null address"):
        allocator.allocate(64)
    assert counters(allocator) == (0, 0, 0, 0)


@pytest.mark.parametrize("result", [None, "0x10", 4096.0, b"", np.zeros(1)], ids=lambda value: type(value).__name__)
def test_custom_allocator_non_int_address_raises_with_type(result):
    allocator = allocator_returning(result)
    with pytest.raises(ArgumentError, match=f"as an int, got {type(result).__name__}"):
        allocator.allocate(64)
    assert counters(allocator) == (0, 0, 0, 0)


def test_custom_allocator_negative_address_raises():
    returned: list[int] = []
    allocator = Allocator("cpu", lambda _nbytes: -4096, lambda address, _nbytes: returned.append(address))
    with pytest.raises(KvtierError):
        allocator.allocate(64)
    assert counters(allocator) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "error", [MemoryError("full"), RuntimeError("exhausted")], ids=lambda value: type(value).__name__
)
def test_custom_allocator_memory_error_raises_out_of_memory(error):
    allocator = allocator_returning(error)
    with pytest.raises(OutOfMemoryError, match=str(error)) as caught:
        Buffer(64, "u8", allocator=allocator)
    assert caught.value.__cause__ is error
    assert counters(allocator) == (0, 0, 0, 0)


def test_custom_allocator_other_error_propagates():
    allocator = allocator_returning(KeyError("bug in allocate"))
    with pytest.raises(KeyError, match="bug in allocate"):
        allocator.allocate(64)
    assert counters(allocator) == (0, 0, 0, 0)


def test_custom_allocator_can_free_other_buffers_in_allocate():
    """For example, an allocate function can evict cached buffers to get memory."""
    cached: list[Buffer] = []
    memory = [ctypes.create_string_buffer(64) for _ in range(3)]

    returned: list[int] = []

    def allocate(_nbytes: int) -> int:
        cached.clear()
        return ctypes.addressof(memory[len(returned)])

    allocator = Allocator("cpu", allocate, lambda address, _nbytes: returned.append(address))
    for _ in memory:
        cached.append(Buffer(64, "u8", allocator=allocator))
    assert returned == [ctypes.addressof(block) for block in memory[:2]]
    assert counters(allocator) == (64, 64, 1, 3)


# ---- lifetime ----

OWNERS: dict[str, Callable[[Buffer], object]] = {
    "same buffer": lambda buffer: buffer,
    "slice": lambda buffer: buffer.slice(4, 2),
    "view": lambda buffer: buffer.view("u8"),
    "slice of a view of a slice": lambda buffer: buffer.slice(4).view("u8").slice(3, 1),
    "holding": lambda buffer: buffer.holding,
    "torch": lambda buffer: buffer.torch(),
    "torch slice": lambda buffer: buffer.torch()[2:3],
    "DLPack": torch.from_dlpack,
}
HOST_OWNERS: dict[str, Callable[[Buffer], object]] = {
    "numpy": lambda buffer: buffer.numpy(),
    "numpy slice": lambda buffer: buffer.numpy()[2:3],
    "memoryview": lambda buffer: buffer.memoryview(),
    "array protocol": np.asarray,
    "numpy DLPack": np.from_dlpack,
    "Buffer that wraps the numpy array": lambda buffer: Buffer.wrap(buffer.numpy()),
}


@pytest.mark.parametrize("owner", [*OWNERS, *HOST_OWNERS])
def test_memory_is_freed_once_when_last_reference_is_dropped(placement, owner):
    if placement.is_device and owner in HOST_OWNERS:
        pytest.skip("needs host memory")
    pool = Pool(placement)
    buffer = Buffer(8, "i32", allocator=pool.allocator)
    buffer.fill(5)
    kept = {**OWNERS, **HOST_OWNERS}[owner](buffer)
    del buffer
    assert pool.num_returned == 0
    del kept
    assert pool.num_returned == 1
    assert pool.returned == [np.full(8, 5, np.int32).tobytes()]
    assert counters(pool.allocator) == (0, 32, 0, 1)


@pytest.mark.parametrize("owner", ["torch", "numpy", "memoryview", "array protocol", "DLPack"])
def test_export_keeps_memory_alive_after_buffer_close(owner):
    pool = Pool()
    buffer = Buffer(8, "i32", allocator=pool.allocator)
    kept = {**OWNERS, **HOST_OWNERS}[owner](buffer)
    buffer.close()
    assert pool.num_returned == 0
    del kept, buffer
    assert pool.num_returned == 1


def test_buffer_close_frees_memory_exactly_once():
    pool = Pool()
    buffer = Buffer(8, "i32", allocator=pool.allocator)
    part = buffer.slice(2)
    buffer.torch()
    buffer.close()
    assert pool.num_returned == 1
    part.close()
    buffer.close()
    del part, buffer
    assert pool.num_returned == 1


def test_borrowed_buffer_does_not_keep_memory_alive():
    pool = Pool()
    buffer = Buffer(8, "i32", allocator=pool.allocator)
    borrowed = buffer.borrow()
    del buffer
    assert pool.num_returned == 1
    assert not borrowed


def test_memory_in_reference_cycle_is_freed_by_gc():
    pool = Pool()
    cycle: dict[str, object] = {"buffer": Buffer(8, "i32", allocator=pool.allocator)}
    cycle["itself"] = cycle
    assert pool.num_returned == 0
    del cycle
    gc.collect()
    assert pool.num_returned == 1


def test_allocator_callables_stay_alive_while_memory_is_in_use():
    pool = Pool()
    returned, buffer = pool.returned, Buffer(8, "i32", allocator=pool.allocator)
    del pool
    buffer.fill(1)
    assert buffer.tolist() == [1] * 8
    del buffer
    assert len(returned) == 1


# ---- memory in use by a stream ----


def copy_all(src: Buffer, dst: Buffer, stream: Stream) -> None:
    copy(src, dst, stream=stream)


def copy_in_batch(src: Buffer, dst: Buffer, stream: Stream) -> None:
    with context(stream=stream), BatchCopy() as batch:
        batch(src, src.size, dst)


def copy_in_pieces(src: Buffer, dst: Buffer, stream: Stream) -> None:
    with context(stream=stream), BatchCopy(path="loop") as batch:
        batch.pieces(src, [4, 0], 4, dst, [4, 0])


@pytest.mark.parametrize("enqueue_copy", [copy_all, copy_in_batch, copy_in_pieces])
@pytest.mark.parametrize("how", ["drop", "close"])
def test_memory_of_pending_copy_is_freed_after_completion(enqueue_copy, how):
    sources, targets = Pool(), Pool()
    with new_stream() as stream:
        src, dst = Buffer(8, "u8", allocator=sources.allocator), Buffer(8, "u8", allocator=targets.allocator)
        src.numpy()[:] = range(8)
        dst.fill(0)
        with held_back(stream):
            enqueue_copy(src, dst, stream)
            if how == "close":
                src.close()
                dst.close()
            del src, dst
            assert sources.num_returned == targets.num_returned == 0
            assert not stream.query()
        stream.synchronize()
    # the tasks of the stream held the last references
    assert sources.num_returned == targets.num_returned == 1
    assert targets.returned == [bytes(range(8))]


@pytest.mark.parametrize(
    "write", [lambda buffer, stream: buffer.fill(9, stream), lambda buffer, stream: buffer.view("u4").fill(9, stream)]
)
def test_memory_of_pending_fill_is_freed_after_completion(write):
    pool = Pool()
    with new_stream() as stream:
        with held_back(stream):
            buffer = Buffer(2, "u8", allocator=pool.allocator)
            write(buffer, stream)
            del buffer
            assert pool.num_returned == 0
        stream.synchronize()
    assert pool.num_returned == 1
    assert pool.returned[0] in (bytes([9, 9]), bytes([0x99, 0x99]))


def test_copy_skipped_after_stream_error_frees_its_memory():
    pool = Pool()

    def fail() -> None:
        raise ValueError("before the copy")

    with new_stream() as stream:
        stream.enqueue(fail)
        copy(Buffer(8, "u8", allocator=pool.allocator), Buffer(8, "u8", allocator=pool.allocator), stream=stream)
        with pytest.raises(ValueError, match="before the copy"):
            stream.synchronize()
    assert pool.num_returned == 2


def test_memory_used_by_stream_is_freed_after_event():
    reached: list[bool] = []
    with new_stream() as stream:
        with held_back(stream):
            event = stream.record()
            holdings = [MemoryRef(4096, 8, CPU, release=lambda: reached.append(event.query()))]
            holdings[0].used_by(stream, event)
            dropping = threading.Thread(target=holdings.clear)
            dropping.start()
            assert reached == []
        dropping.join(TIMEOUT_S)
    assert reached == [True]


def test_memory_used_by_failed_stream_is_freed(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", bool)  # ignore the reported error
    pool = Pool()

    def fail() -> None:
        raise ValueError("the copy failed")

    with new_stream() as stream:
        stream.enqueue(fail)
        held = pool.allocator.allocate(8)
        held.used_by(stream, stream.record())
        del held
        assert pool.num_returned == 1
    assert counters(pool.allocator)[2] == 0


# ---- statistics ----


def test_allocator_stats_are_zero_initially():
    assert counters(Pool().allocator) == (0, 0, 0, 0)


def test_allocator_peak_remains_after_free():
    allocator = Pool().allocator
    first = allocator.allocate(100)
    second = allocator.allocate(50)
    assert counters(allocator) == (150, 150, 2, 2)
    del first
    assert counters(allocator) == (50, 150, 1, 2)
    third = allocator.allocate(60)
    assert counters(allocator) == (110, 150, 2, 3)
    del second, third
    assert counters(allocator) == (0, 150, 0, 3)


def test_zero_byte_buffer_does_not_call_allocator_callables(placement):
    pool = Pool(placement)
    buffer = Buffer(0, "f32", allocator=pool.allocator)
    assert buffer  # an open buffer is true, even with zero bytes
    assert buffer.tolist() == []
    assert counters(pool.allocator) == (0, 0, 1, 1)
    del buffer
    assert counters(pool.allocator) == (0, 0, 0, 1)
    assert pool.requested == []
    assert pool.returned == []


def test_zero_byte_allocation_works_on_every_placement(placement):
    held = default_allocator(placement).allocate(0)
    assert held.nbytes == 0
    assert held.tensor().numel() == 0
    assert held.tensor().device == placement.torch


def test_allocate_negative_size_raises(placement):
    allocator = default_allocator(placement)
    before = counters(allocator)
    with pytest.raises(RangeError, match=rf"-1 bytes of {placement} memory"):
        allocator.allocate(-1)
    with pytest.raises(RangeError, match="-7"):
        Buffer(-7, "u8", placement)
    assert counters(allocator) == before


def test_allocator_counters_with_many_threads_are_exact():
    pool = Pool()

    def allocate_and_free() -> None:
        for size in range(1, 200):
            pool.allocator.allocate(size)

    threads = [threading.Thread(target=allocate_and_free) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allocated, peak, live, count = counters(pool.allocator)
    assert (allocated, live, count) == (0, 0, 4 * 199)
    assert 199 <= peak <= 4 * 199
    assert sorted(pool.requested) == sorted(4 * list(range(1, 200)))


def test_allocator_repr_shows_counters():
    pool = Pool()
    held = pool.allocator.allocate(77)
    assert "77" in repr(pool.allocator)
    assert "cpu" in repr(pool.allocator)
    del held


class StatisticsMachine(RuleBasedStateMachine):
    """Allocates, exports and drops buffers at random. Compares the statistics with the sizes of buffers in `held`."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.held: list[tuple[int, list[object]]] = []  # bytes of each allocation and the objects that own it
        self.peak = self.count = 0

    @rule(nbytes=st.one_of(st.just(0), st.integers(1, 5000)))
    def allocate(self, nbytes: int) -> None:
        self.held.append((nbytes, [Buffer(nbytes, "u8", allocator=self.pool.allocator)]))
        self.count += 1
        self.peak = max(self.peak, sum(size for size, _ in self.held))

    @rule(nbytes=st.integers(-5000, -1))
    def allocate_negative_size(self, nbytes: int) -> None:
        with pytest.raises(RangeError, match=f"{nbytes}"):
            self.pool.allocator.allocate(nbytes)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), owner=st.sampled_from(["slice", "view", "torch", "numpy", "memoryview"]))
    def export(self, which: int, owner: str) -> None:
        _, owners = self.held[which % len(self.held)]
        buffers = [item for item in owners if isinstance(item, Buffer)]
        if buffers:
            owners.append({**OWNERS, **HOST_OWNERS, "slice": lambda buffer: buffer.slice(0)}[owner](buffers[0]))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), part=st.integers(0, 99))
    def drop(self, which: int, part: int) -> None:
        position = which % len(self.held)
        owners = self.held[position][1]
        del owners[part % len(owners)]
        if not owners:
            del self.held[position]

    @rule()
    def trim(self) -> None:
        self.pool.allocator.trim()

    @invariant()
    def counters_match_held_buffers(self) -> None:
        stats = self.pool.allocator.stats
        sizes = [size for size, owners in self.held if owners]
        # An export of zero bytes holds no reference to its allocation, so the allocation can be freed while the export
        # still exists.
        assert stats.allocated_bytes == sum(sizes)
        assert stats.num_live <= len(sizes)
        assert stats.num_live >= sum(size > 0 for size in sizes)
        assert (stats.peak_bytes, stats.num_allocations) == (self.peak, self.count)

    @invariant()
    def allocator_holds_exactly_the_live_memory(self) -> None:
        sizes = sorted(size for size, owners in self.held if size and owners)
        assert sorted(tensor.nbytes for tensor in self.pool.live.values()) == sizes
        assert len(self.pool.requested) == len(self.pool.returned) + len(self.pool.live)


TestStatisticsMachine = StatisticsMachine.TestCase
TestStatisticsMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


# ---- out of memory, trim ----


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 63, 1 << 70], ids="{:,}".format)
def test_out_of_memory_error_reports_sizes_and_usage(placement, nbytes):
    allocator = default_allocator(placement)
    kept = allocator.allocate(1234)
    gc.collect()
    before = counters(allocator)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate(nbytes)
    message = str(caught.value)
    assert f"could not allocate {nbytes:,} bytes of {placement} memory" in message
    assert f"holds {before[0]:,} bytes in {before[2]} allocations (peak {before[1]:,})" in message
    assert "the system reports" in message
    assert "unknown" not in message
    assert allocator.stats.num_allocations == before[3]
    assert allocator.allocate(kept.nbytes).nbytes == 1234  # the allocator is still usable


def test_buffer_too_large_raises_out_of_memory(placement):
    with pytest.raises(OutOfMemoryError, match=f"{1 << 52:,} bytes"):
        Buffer(1 << 49, "f64", placement)


def test_out_of_memory_error_of_custom_allocator_reports_usage():
    allocator = allocator_returning(MemoryError("pool is empty"))
    with pytest.raises(
        OutOfMemoryError, match=r"10,000 bytes.*0 bytes in 0 allocations.*unknown amount.*pool is empty"
    ):
        allocator.allocate(10_000)


def test_out_of_memory_error_is_a_memory_error():
    with pytest.raises(MemoryError):
        Buffer(1 << 50, "u8")


def test_trim_leaves_live_memory_intact(placement, make, read):
    allocator = default_allocator(placement)
    values = np.arange(100, dtype=np.uint8)
    buffer = make(placement, values)
    Buffer(3 * MIB, "u8", placement)  # freed immediately, so that there is memory to trim
    allocator.trim()
    np.testing.assert_array_equal(read(buffer), values)
    assert Buffer(10, "u8", placement).nbytes == 10


def test_trim_of_custom_allocator_does_nothing():
    pool = Pool()
    held = pool.allocator.allocate(10)
    pool.allocator.trim()
    assert pool.num_returned == 0
    assert counters(pool.allocator) == (10, 10, 1, 1)
    del held


def test_repeated_allocation_does_not_leak(placement):
    gc.collect()
    allocator = default_allocator(placement)
    before = counters(allocator)
    for extra in range(20):
        large, small = allocator.allocate(4 * MIB + extra), allocator.allocate(1 + extra)
        del large, small
    after = counters(allocator)
    assert (after[0], after[2]) == (before[0], before[2])
