"""HostMemory grows in the background and can be freed at any time. The NUMA node is read from nvidia-smi or sysfs."""

import ctypes
import gc
import os
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtier.errors import ArgumentError, ClosedError, OutOfMemoryError, RangeError, TransferTimeoutError
from kvtier.layout import CacheGroup
from kvtier.memory import CPU, PINNED, Placement, cuda, host_pages
from kvtier.memory.host_pages import MappedMemory
from kvtier.transfer import GrowthState, HostMemory
from support import new_stream
from transfer_support import WatchedCondition

GROUP = CacheGroup.mla("main", 3, 100, "u8", 16)  # a block has 4,800 bytes, so a slot has two pages
DEVICES = [CPU, *([Placement("cuda", 0)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES, ids=str)
def device(request):
    return request.param


def test_host_memory_slots_store_independent_bytes(device):
    host = HostMemory(GROUP, 11, device, piece_bytes=3 * GROUP.slot_bytes)
    assert host.wait_ready(timeout=60) == host.num_ready == 11
    assert (host.growth, host.piece_slots) == (GrowthState.READY, 3)
    assert host.placement == (PINNED if device.is_device else CPU)
    for slot in range(11):
        host.block(slot).fill(slot)
    assert [set(host.block(slot).tolist()) for slot in range(11)] == [{slot} for slot in range(11)]
    if device.is_device:
        assert cuda.placement_of(host.block(10).data()) == PINNED


def test_host_memory_slots_are_contiguous_and_page_aligned():
    host = HostMemory(GROUP, 4, background=False)
    starts = [host.block(slot).data() for slot in range(4)]
    assert starts[0] % 4096 == 0
    assert np.diff(starts).tolist() == [8192] * 3
    assert host.block(0).nbytes == 4800


class StuckMemory(MappedMemory):
    """Memory whose `touch` waits for a permit of the semaphore `gate`, and then raises if `refuses` is set."""

    def touch(self, offset, nbytes):
        self.reached.set()
        self.gate.acquire()
        if self.refuses:
            raise OutOfMemoryError("the system is full")
        super().touch(offset, nbytes)


@pytest.fixture
def stuck(monkeypatch):
    StuckMemory.gate, StuckMemory.reached, StuckMemory.refuses = threading.Semaphore(0), threading.Event(), False
    monkeypatch.setattr("kvtier.transfer.host_memory.MappedMemory", StuckMemory)
    return StuckMemory


def test_host_memory_is_usable_while_it_grows(stuck):
    host = HostMemory(GROUP, 5, piece_bytes=2 * GROUP.slot_bytes)
    assert (host.num_ready, host.growth) == (0, GrowthState.GROWING)
    with pytest.raises(TransferTimeoutError, match="0 of 2"):
        host.wait_ready(2, timeout=0)
    stuck.gate.release()
    assert host.wait_ready(2, timeout=60) == 2
    host.block(1).fill(9)
    with pytest.raises(RangeError, match=r"0..1, the usable slots of 5"):
        host.block(2)
    assert host.block_view().num_blocks == 2
    stuck.gate.release(2)
    assert host.wait_ready(timeout=60) == 5
    assert host.block(1).at(4799) == 9


def test_lazy_host_memory_is_usable_at_once(stuck):
    """Lazy memory is not touched. A touch would not return, because the gate gives no permit."""
    host = HostMemory(GROUP, 5, piece_bytes=2 * GROUP.slot_bytes, lazy=True)
    assert (host.num_ready, host.growth) == (5, GrowthState.READY)
    assert not stuck.reached.is_set()
    host.block(4).fill(9)
    assert host.block(4).at(4799) == 9


def test_host_memory_keeps_slots_when_growth_fails(stuck):
    host = HostMemory(GROUP, 4, piece_bytes=2 * GROUP.slot_bytes)
    stuck.gate.release()
    host.wait_ready(2, timeout=60)
    stuck.refuses = True
    stuck.gate.release()
    assert host.wait_ready(timeout=60) == 2
    assert (host.growth, host.trouble) == (GrowthState.STOPPED, "the system is full")
    with pytest.raises(OutOfMemoryError, match="2 of 3 host slots were allocated: the system is full"):
        host.wait_ready(3)
    host.block(1).fill(1)


def test_host_memory_free_stops_growth(stuck):
    host = HostMemory(GROUP, 4, piece_bytes=GROUP.slot_bytes)
    stuck.reached.wait(60)
    host.free()
    stuck.gate.release(9)
    assert host.growth is GrowthState.FREED
    with pytest.raises(ClosedError, match="freed"):
        host.block_view()


def test_host_memory_growth_stops_when_last_reference_is_dropped(stuck):
    host = HostMemory(GROUP, 4, piece_bytes=GROUP.slot_bytes)
    seen = weakref.ref(host)
    stuck.reached.wait(60)
    del host
    stuck.gate.release(9)
    for thread in threading.enumerate():
        if thread.name == "kvtier-pin-main":
            thread.join(60)
    gc.collect()
    assert seen() is None


def test_host_memory_free_invalidates_all_but_held_blocks(device):
    host = HostMemory(GROUP, 2, device)
    host.wait_ready(timeout=60)
    held = host.block(0)
    held.fill(3)
    host.free()
    host.free()
    for use in (host.block_view, lambda: host.block(0), host.keep):
        with pytest.raises(ClosedError, match="freed"):
            use()
    assert host.num_ready == 0
    assert set(held.tolist()) == {3}  # a held block keeps the memory alive


def test_host_memory_is_released_when_last_block_is_dropped():
    host = HostMemory(GROUP, 2, background=False)
    memory = weakref.ref(host._memory)
    held = host.block(1)
    del host
    gc.collect()
    assert memory() is not None
    del held
    gc.collect()
    assert memory() is None


def test_host_memory_does_not_change_cpu_affinity_of_caller(device):
    before = os.sched_getaffinity(0)
    host = HostMemory(GROUP, 2, device, background=False)
    assert host.num_ready == 2
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("arguments", [{"num_slots": 0}, {"num_slots": 1, "piece_bytes": 0}])
def test_host_memory_with_zero_slots_or_piece_bytes_raises(arguments):
    with pytest.raises(ArgumentError, match="must be positive"):
        HostMemory(GROUP, **arguments)


def test_host_memory_block_view_needs_layer_and_name():
    host = HostMemory(GROUP, 2, background=False)
    with pytest.raises(ArgumentError, match="both"):
        host.block_view(0)


def test_host_memory_piece_has_between_one_and_all_slots():
    host = HostMemory(GROUP, 1, piece_bytes=1, background=False)
    assert (host.piece_slots, host.num_ready, host.growth) == (1, 1, GrowthState.READY)
    assert HostMemory(GROUP, 3, piece_bytes=1, background=False).piece_slots == 1
    assert HostMemory(GROUP, 3, piece_bytes=1 << 30, background=False).piece_slots == 3


def test_host_memory_slots_and_view_contain_the_blocks():
    host = HostMemory(GROUP, 3, background=False)
    for slot in range(3):
        host.block(slot).fill(slot + 1)
    assert host.slots().shape == (3, host.slot_bytes)
    assert host.slots()[:, 0].tolist() == [1, 2, 3]
    assert len(host.view()) == 3 * host.slot_bytes
    assert [host.view()[slot * host.slot_bytes] for slot in range(3)] == [1, 2, 3]
    for slot in (-1, 3):
        with pytest.raises(RangeError, match=f"slot {slot} is outside 0..2"):
            host.block(slot)
    with pytest.raises(ArgumentError, match="both"):
        host.block_view(name="latent")
    host.free()
    for use in (host.slots, host.view):
        with pytest.raises(ClosedError, match="freed"):
            use()
    with new_stream() as stream:
        host.used_by(stream, stream.record())  # has no effect after free()


@pytest.fixture
def watched(monkeypatch):
    """Give host memory a condition that reports waiting threads, and a clock that only the test advances."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    names = SimpleNamespace(Condition=WatchedCondition, Thread=threading.Thread)
    monkeypatch.setattr("kvtier.transfer.host_memory.threading", names)
    monkeypatch.setattr("kvtier.transfer.host_memory.time", clock)
    return clock


@pytest.mark.parametrize("end", ["grown", "out of memory", "freed", "timeout"])
def test_wait_ready_returns_or_raises_in_every_case(stuck, watched, end):
    host = HostMemory(GROUP, 4, piece_bytes=2 * GROUP.slot_bytes)
    stuck.refuses = end == "out of memory"
    waiters = [host._changed.start_waiter(lambda each=each: host.wait_ready(each, 1.0)) for each in (2, None)]
    if end == "freed":
        host.free()
    elif end == "timeout":
        watched.now += 1.0
        with host._changed:
            host._changed.notify_all()
    else:
        stuck.gate.release()
    if end == "grown":
        assert waiters[0].result(120) == 2
        assert not waiters[1].done()
        stuck.gate.release()
        assert waiters[1].result(120) == 4
    elif end == "timeout":
        for waiter in waiters:
            with pytest.raises(TransferTimeoutError, match="0 of"):
                waiter.result(120)
    else:
        with pytest.raises(OutOfMemoryError, match="0 of 2"):
            waiters[0].result(120)
        assert waiters[1].result(120) == 0
    stuck.gate.release(9)


def test_growth_failure_after_free_keeps_freed_state(stuck):
    host = HostMemory(GROUP, 4, piece_bytes=GROUP.slot_bytes)
    grower = next(each for each in threading.enumerate() if each.name == "kvtier-pin-main" and each.daemon)
    stuck.reached.wait(60)
    host.free()
    stuck.refuses = True
    stuck.gate.release(9)
    grower.join(60)
    assert (host.growth, host.trouble, host.num_ready) == (GrowthState.FREED, "", 0)


def test_host_memory_touches_pieces_in_order(monkeypatch):
    touched = []
    monkeypatch.setattr(MappedMemory, "touch", lambda _memory, offset, nbytes: touched.append((offset, nbytes)))
    host = HostMemory(GROUP, 5, piece_bytes=2 * GROUP.slot_bytes, background=False)
    size = host.slot_bytes
    assert touched == [(0, 2 * size), (2 * size, 2 * size), (4 * size, size)]


# ---- NUMA ----


@pytest.mark.parametrize(
    ("output", "node"),
    [
        ("NUMA IDs of closest CPU: 1\n", 1),
        ("NUMA IDs of closest CPU: 0-1\n", 0),
        ("NUMA IDs of closest CPU: 2,3\n", 2),
        ("NUMA IDs of closest CPU: N/A\n", None),
        ("", None),
    ],
)
def test_node_of_gpu_reads_nvidia_smi_first(output, node, tmp_path):
    assert host_pages.node_of_gpu("0000:1b:00.0", lambda _address: output, tmp_path)[0] == node


def test_node_of_gpu_falls_back_to_sysfs(tmp_path):
    for address, node in (("0000:1b:00.0", "0\n"), ("0000:9c:00.0", "1\n"), ("0000:ff:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(node)
    assert host_pages.node_of_gpu("0000:9c:00.0", lambda _address: "", tmp_path) == (1, "sysfs")
    assert host_pages.node_of_gpu("0000:ff:00.0", lambda _address: "", tmp_path)[0] is None
    assert host_pages.node_of_gpu("0000:00:00.0", lambda _address: "", tmp_path)[0] is None


def test_mapped_memory_touch_makes_all_pages_resident():
    num_pages, first, stop = (40 << 20) // 4096, 3, (37 << 20) // 4096
    memory = MappedMemory(num_pages * 4096)
    resident = (ctypes.c_ubyte * num_pages)()

    def num_resident():
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.pointer), ctypes.c_size_t(memory.nbytes), resident) == 0
        return sum(each & 1 for each in resident[first:stop])

    assert num_resident() == 0
    memory.touch(first * 4096, (stop - first) * 4096)
    assert num_resident() == stop - first


def test_mapped_memory_bind_returns_the_reason_for_a_failure():
    memory = MappedMemory(1 << 20)
    assert memory.bind(0) is None or "refused" in memory.bind(0)
    assert "refused" in memory.bind(63)  # there is no NUMA node 63
    memory.touch(0, 1 << 20)
    assert int(memory.tensor.sum()) == 0
