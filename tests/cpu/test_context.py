"""The current stream and allocators: nested contexts, threads, asyncio tasks, and explicit arguments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvtier.errors import ArgumentError
from kvtier.memory import (
    CPU,
    PINNED,
    Allocator,
    BatchCopy,
    Buffer,
    Placement,
    Stream,
    context,
    copy,
    current_allocator,
    current_stream,
    default_allocator,
    empty_like,
)
from kvtier.memory.context import choose_stream
from support import held_back, new_stream

GPU = Placement("cuda", 0)


def new_allocator(placement: Placement = CPU) -> Allocator:
    """Return a new allocator that gets its memory from torch."""
    live: dict[int, torch.Tensor] = {}

    def allocate(nbytes: int) -> int:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=placement.torch, pin_memory=placement == PINNED)
        live[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def deallocate(address: int, nbytes: int) -> None:
        assert live.pop(address).nbytes == nbytes

    return Allocator(placement, allocate, deallocate)


def current() -> tuple[Stream | None, Allocator]:
    return current_stream(CPU), current_allocator(CPU)


DEFAULTS = (None, default_allocator(CPU))


def in_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


# ---- current values ----


def test_defaults_are_current_outside_context():
    assert current() == DEFAULTS


def test_context_sets_and_restores_stream_and_allocator():
    allocator = new_allocator()
    with new_stream() as stream:
        with context(stream=stream, allocator=allocator):
            assert current() == (stream, allocator)
        assert current() == DEFAULTS


def test_nested_contexts_restore_outer_values():
    first, second = new_allocator(), new_allocator()
    with new_stream() as outer, new_stream() as inner:
        with context(stream=outer, allocator=first):
            with context(stream=inner, allocator=second):
                assert current() == (inner, second)
            assert current() == (outer, first)
            with context(stream=inner):
                assert current() == (inner, first)
            assert current() == (outer, first)
        assert current() == DEFAULTS


def test_context_keeps_values_that_are_not_given():
    allocator = new_allocator()
    with new_stream() as stream, context(stream=stream, allocator=allocator):
        with context():
            assert current() == (stream, allocator)
        with context(stream=None, allocator=None):
            assert current() == (stream, allocator)
        with context(allocator=[]):
            assert current() == (stream, allocator)
        with new_stream() as other, context(stream=other):
            assert current() == (other, allocator)
        with context(allocator=new_allocator()):
            assert current()[0] is stream


def test_context_accepts_current_values_again():
    allocator = new_allocator()
    with new_stream() as stream, context(stream=stream, allocator=allocator):
        with context(stream=stream, allocator=allocator):
            assert current() == (stream, allocator)
        assert current() == (stream, allocator)


def test_context_exited_by_exception_restores_values():
    outer = new_allocator()
    with context(allocator=outer):
        with (
            pytest.raises(ValueError, match="inside"),
            new_stream() as stream,
            context(stream=stream, allocator=new_allocator()),
        ):
            raise ValueError("inside")
        assert current() == (None, outer)
    assert current() == DEFAULTS


def test_context_exited_by_return_restores_values():
    def return_inside(stream: Stream) -> Stream | None:
        with context(stream=stream):
            return current_stream(CPU)

    with new_stream() as stream:
        assert return_inside(stream) is stream
    assert current() == DEFAULTS


# ---- allocators ----


def test_context_holds_one_allocator_per_placement():
    host, pinned, device = new_allocator(CPU), new_allocator(PINNED), new_allocator(GPU)
    with context(allocator=[host, pinned, device]):
        assert current_allocator(CPU) is host
        assert current_allocator(PINNED) is pinned
        assert current_allocator(GPU) is device


def test_context_accepts_any_iterable_of_allocators():
    host, pinned = new_allocator(CPU), new_allocator(PINNED)
    with context(allocator=(allocator for allocator in (host, pinned))):
        assert current_allocator(CPU) is host
        assert current_allocator(PINNED) is pinned


def test_context_allocator_leaves_other_placements_unchanged():
    host, pinned, inner = new_allocator(CPU), new_allocator(PINNED), new_allocator(CPU)
    with context(allocator=pinned):
        assert current_allocator(CPU) is default_allocator(CPU)
        with context(allocator=host):
            assert current_allocator(PINNED) is pinned
            with context(allocator=inner):
                assert current_allocator(CPU) is inner
                assert current_allocator(PINNED) is pinned
            assert current_allocator(CPU) is host


def test_context_holds_one_allocator_per_gpu():
    first, second = new_allocator(Placement("cuda", 0)), new_allocator(Placement("cuda", 1))
    with context(allocator=[first, second]):
        assert current_allocator(Placement("cuda", 0)) is first
        assert current_allocator(Placement("cuda", 1)) is second


def test_buffer_and_empty_like_use_context_allocator(placement):
    allocator = new_allocator(placement)
    with context(allocator=allocator):
        buffer = Buffer(8, "f32", placement)
        twin = empty_like(buffer)
        assert allocator.stats.num_live == 2
        assert allocator.stats.allocated_bytes == buffer.nbytes + twin.nbytes == 64
    Buffer(8, "f32", placement)
    assert allocator.stats.num_allocations == 2


def test_explicit_allocator_overrides_context():
    named, in_context = new_allocator(), new_allocator()
    with context(allocator=in_context):
        buffer = Buffer(8, "u8", allocator=named)
    assert buffer.placement == CPU
    assert named.stats.num_allocations == 1
    assert in_context.stats.num_allocations == 0


# ---- streams ----


def test_copies_run_on_context_stream():
    with new_stream() as stream, held_back(stream):
        target = Buffer(4, "u8")
        target.fill(0)
        with context(stream=stream):
            copy(Buffer.wrap(bytes([1, 2, 3, 4])), target)
            with BatchCopy() as batch:
                batch(Buffer.wrap(bytes([9])), 1, target)
        assert target.tolist() == [0, 0, 0, 0]  # this read does not wait for the stream, which is still blocked
    assert target.tolist() == [9, 2, 3, 4]  # closing the stream ran its tasks


def test_work_after_context_runs_immediately():
    with new_stream() as stream, held_back(stream):
        with context(stream=stream):
            pass
        target = Buffer(4, "u8")
        target.fill(7)
        assert target.tolist() == [7, 7, 7, 7]


def test_element_read_waits_for_context_stream():
    target = Buffer(4, "u8")
    target.fill(0)
    with new_stream() as stream, context(stream=stream):
        with held_back(stream):
            target.fill(5)
        assert target.tolist() == [5, 5, 5, 5]
        target.fill(6)
        assert target[3] == 6


def test_explicit_stream_overrides_context():
    target = Buffer(4, "u8")
    with new_stream() as blocked, new_stream() as free, held_back(blocked), context(stream=blocked):
        target.fill(8, free)
        free.synchronize()
        assert target.numpy().tolist() == [8, 8, 8, 8]


def test_current_stream_refuses_host_stream_for_gpu_memory():
    with new_stream() as stream, context(stream=stream):
        with pytest.raises(ArgumentError, match=r"work on cuda:0 memory .* a stream on cpu; .*Stream\('cuda:0'\)"):
            current_stream(GPU)
        assert current_stream(CPU) is stream
        assert current_stream(PINNED) is stream


@pytest.mark.parametrize("host", [CPU, PINNED], ids=str)
@pytest.mark.parametrize("to_gpu", [True, False], ids=["to the GPU", "from the GPU"])
def test_choose_stream_refuses_host_stream_for_gpu_memory(host, to_gpu):
    with new_stream() as stream, pytest.raises(ArgumentError, match=r"work on cuda:0 memory.* a stream on cpu"):
        choose_stream(stream, *((host, GPU) if to_gpu else (GPU, host)))


def test_choose_stream_accepts_host_stream_for_host_memory():
    with new_stream() as stream:
        assert choose_stream(stream, CPU) is stream
        assert choose_stream(stream, CPU, PINNED) is stream


def test_gpu_work_on_host_stream_raises_in_every_call(placement):
    if not placement.is_device:
        pytest.skip("needs GPU memory")
    buffer, host = Buffer(4, "u8", placement), Buffer(4, "u8")
    with new_stream() as stream:
        for misuse in (lambda: buffer.fill(1, stream), lambda: copy(host, 4, buffer, stream)):
            with pytest.raises(ArgumentError, match="cannot run on a stream on cpu"):
                misuse()
        with context(stream=stream):
            for misuse in (lambda: buffer.fill(1), lambda: copy(host, buffer), lambda: buffer[0]):
                with pytest.raises(ArgumentError, match="cannot run on a stream on cpu"):
                    misuse()


# ---- threads and tasks ----


def test_new_thread_starts_with_defaults():
    with new_stream() as stream, context(stream=stream, allocator=new_allocator()):
        assert in_new_thread(current) == DEFAULTS


def test_host_stream_tasks_start_with_defaults():
    seen: list[object] = []
    with new_stream() as stream, context(stream=stream, allocator=new_allocator()):
        stream.enqueue(lambda: seen.append(current()))
        stream.synchronize()
    assert seen == [DEFAULTS]


def test_threads_have_separate_contexts():
    inside, checked = threading.Event(), threading.Event()
    seen: list[object] = []

    def hold_context() -> None:
        with new_stream() as stream, context(stream=stream, allocator=new_allocator()):
            inside.set()
            checked.wait()
            seen.append(current()[0] is stream)

    thread = threading.Thread(target=hold_context)
    thread.start()
    inside.wait()
    before = current()
    with context(allocator=new_allocator()):
        checked.set()
        thread.join()
    assert before == DEFAULTS
    assert seen == [True]


def test_interleaved_asyncio_tasks_have_separate_contexts():
    async def hold_context(stream: Stream, allocator: Allocator, turn: asyncio.Barrier) -> None:
        with context(stream=stream, allocator=allocator):
            await turn.wait()  # all tasks are inside their `with` blocks
            assert current() == (stream, allocator)
            await turn.wait()
        await turn.wait()
        assert current() == DEFAULTS

    async def main() -> None:
        with new_stream() as first, new_stream() as second:
            turn = asyncio.Barrier(3)
            tasks = [hold_context(stream, new_allocator(), turn) for stream in (first, second)]
            running = [asyncio.create_task(task) for task in tasks]
            for _ in range(3):
                await turn.wait()
                assert current() == DEFAULTS
            await asyncio.gather(*running)

    asyncio.run(main())


def test_asyncio_task_inherits_context_at_creation():
    async def read_current() -> object:
        return current()

    async def main() -> None:
        allocator = new_allocator()
        with new_stream() as stream:
            with context(stream=stream, allocator=allocator):
                task = asyncio.create_task(read_current())
                called = asyncio.create_task(asyncio.to_thread(current))
            assert current() == DEFAULTS
            assert await task == (stream, allocator)
            assert await called == (stream, allocator)

    asyncio.run(main())


def test_cancelled_asyncio_task_does_not_leak_context():
    async def hold_context(inside: asyncio.Event) -> None:
        with context(allocator=new_allocator()):
            inside.set()
            await asyncio.Event().wait()

    async def main() -> None:
        inside = asyncio.Event()
        task = asyncio.create_task(hold_context(inside))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert current() == DEFAULTS

    asyncio.run(main())
