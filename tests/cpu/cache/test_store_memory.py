"""Host memory is registered with a store before the first write, and unregistered before the memory is freed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kvtier.errors import StoreError
from kvtier.messages import Plan, Route, TransferRequest, slot_bytes
from kvtier.storage import MemoryStore, Results, ShardStores, Write
from kvtier.storage.checksum import address_of
from kvtier.worker.controller import CacheController, layout_of

KEY = bytes(range(32))


class RecordingStore(MemoryStore):
    """Records calls of `register`, `unregister` and `close`. `register` waits until `may_register` is set.

    `is_registered` has one entry per written object: True if the object was in registered memory.
    """

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.calls: list[tuple[str, int, int]] = []
        self.memory: dict[int, memoryview] = {}
        self.is_registered: list[bool] = []
        self.may_register = threading.Event()
        self.may_register.set()

    def register(self, memory: memoryview) -> None:
        self.may_register.wait(30)
        memory[-1] = memory[-1]  # fails if the memory is not mapped
        self.memory[address_of(memory)] = memory
        self.calls.append(("register", address_of(memory), len(memory)))

    def unregister(self, memory: memoryview) -> None:
        memory[-1] = memory[-1]  # fails if the memory is not mapped
        del self.memory[address_of(memory)]
        self.calls.append(("unregister", address_of(memory), len(memory)))

    def write(self, writes, *, timeout_s=None) -> Results:
        self.is_registered += [self._contains(write) for write in writes]
        return super().write(writes, timeout_s=timeout_s)

    def close(self) -> None:
        self.calls.append(("close", 0, 0))
        super().close()

    def _contains(self, write: Write) -> bool:
        begin = address_of(write.payload)
        return any(at <= begin and begin + len(write.payload) <= at + len(m) for at, m in self.memory.items())


class RefusingStore(RecordingStore):
    """A store that refuses to register memory."""

    def register(self, memory: memoryview) -> None:
        raise StoreError(f"{len(memory)} bytes could not be registered")

    unregister = register


def caches_of(num_blocks: int) -> list[torch.Tensor]:
    return [torch.rand(num_blocks, layers, 2, 2, 1, 2) for layers in (1, 3)]


def controller_of(caches: list[torch.Tensor], store: MemoryStore | ShardStores) -> CacheController:
    return CacheController(layout_of(caches, 2), caches, 5, stores={"far": store})


def keep_and_fetch(controller: CacheController, caches: list[torch.Tensor]) -> None:
    """Copy device block 1 to host slot 2, to the store, to host slot 3, and to device block 0. Check the copy."""

    def slots(slot: int) -> bytes:
        return slot_bytes(np.array([slot], np.int32))

    steps = [
        TransferRequest(1, Route.DEVICE_TO_HOST, "device", "host", slots(1), slots(2)),
        TransferRequest(2, Route.HOST_TO_STORE, "host", "far", slots(2), b"", KEY),
        TransferRequest(3, Route.STORE_TO_HOST, "far", "host", b"", slots(3), KEY),
        TransferRequest(4, Route.HOST_TO_DEVICE, "host", "device", slots(3), slots(0)),
    ]
    for cache in caches:
        cache[0] = 0
    for transfer in steps:
        controller.submit(Plan(transfer.id, 0, (transfer,)))
        outcomes = []
        while not outcomes:
            controller.wait(1.0)
            outcomes = [outcome for report in controller.poll() for outcome in report.results]
        assert [outcome.ok for outcome in outcomes] == [True], outcomes
    assert all(torch.equal(cache[0], cache[1]) for cache in caches)


def calls_for_hosts(controller: CacheController, method: str) -> list[tuple[str, int, int]]:
    return [(method, host.pointer, len(host.view())) for host in controller._hosts]


@pytest.mark.parametrize("is_sharded", [False, True], ids=["single store", "sharded store"])
def test_host_memory_stays_registered_until_it_is_freed(is_sharded):
    store, caches = RecordingStore(), caches_of(4)
    controller = controller_of(caches, ShardStores((store,)) if is_sharded else store)
    keep_and_fetch(controller, caches)
    expected = calls_for_hosts(controller, "register")
    assert store.calls == expected
    expected += calls_for_hosts(controller, "unregister")
    controller.resize_host(9, caches)
    expected += calls_for_hosts(controller, "register")
    keep_and_fetch(controller, caches)
    assert store.calls == expected
    assert store.is_registered == [True] * 4  # each of the two calls of keep_and_fetch wrote one object per cache group
    expected += calls_for_hosts(controller, "unregister")
    controller.close()
    controller.close()
    assert store.calls == [*expected, ("close", 0, 0), ("close", 0, 0)]


def test_transfers_work_if_store_refuses_registration():
    store, caches = RefusingStore(), caches_of(4)
    controller = controller_of(caches, store)
    keep_and_fetch(controller, caches)
    controller.resize_host(9, caches)
    keep_and_fetch(controller, caches)
    assert store.is_registered == [False] * 4
    controller.close()
    assert store.calls == [("close", 0, 0)]


def test_slow_registration_does_not_delay_store_reads():
    store, caches = RecordingStore(), caches_of(4)
    store.may_register.clear()
    controller = controller_of(caches, store)
    absent = TransferRequest(1, Route.STORE_TO_HOST, "far", "host", b"", slot_bytes(np.array([3], np.int32)), KEY)
    controller.submit(Plan(1, 0, (absent,)))
    while controller.is_busy:
        controller.wait(1.0)
        controller.poll()
    assert store.calls == []
    expected = [*calls_for_hosts(controller, "register"), *calls_for_hosts(controller, "unregister")]
    timer = threading.Timer(0.2, store.may_register.set)
    timer.start()
    controller.resize_host(9, caches)
    assert store.calls[:4] == expected
    controller.close()
    timer.join()
    assert not store.memory
