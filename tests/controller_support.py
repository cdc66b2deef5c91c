"""Helpers for tests of CacheController with real tensors, host memory and stores."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import torch

from kvtier import dtype as dt
from kvtier.layout import CacheGroup, KVLayout
from kvtier.memory.copy_paths import run_path
from kvtier.messages import Drop, Plan, Probe, Route, StoreLookup, TransferRequest, TransferResult, slot_bytes
from kvtier.storage import DiskStore, MemoryStore
from kvtier.worker.controller import CacheController

LAYOUT = KVLayout(
    4, (CacheGroup.attention("main", 3, 2, 8, dt.f16, 4), CacheGroup.attention("draft-1", 1, 1, 8, dt.f32, 4))
)
NAMESPACE = hashlib.sha256(b"a model").digest()
SECRET = b"of the operator"
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(8)]


def caches_of(num_blocks: int, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (num_blocks, group.block_bytes), dtype=torch.uint8, generator=random)
        for group in LAYOUT.groups
    ]


class Rig:
    """A controller with its device tensors. Creates single transfers and collects reports."""

    def __init__(self, num_device: int = 8, num_host: int = 8, stores=None, **options) -> None:
        self.caches = caches_of(num_device)
        self.controller = CacheController(
            LAYOUT, self.caches, num_host, stores=stores or {}, namespace=NAMESPACE, secret=SECRET, **options
        )
        self.ids = iter(range(1, 1000))
        self.lookups: list[StoreLookup] = []
        self.sizes: list[int] = []  # `num_host_slots` of each report in which it is not 0

    def run(self, *tasks: TransferRequest | Probe | Drop, epoch: int = 0) -> list[TransferResult]:
        """Submit tasks in one plan and wait for their results."""
        kinds = [tuple(task for task in tasks if isinstance(task, kind)) for kind in (TransferRequest, Probe, Drop)]
        self.controller.submit(Plan(1, epoch, *kinds))
        return self.drain(epoch)

    def drain(self, epoch: int = 0) -> list[TransferResult]:
        results = []
        while self.controller.is_busy:
            self.controller.wait(1.0)
            for report in self.controller.poll():
                assert (report.epoch, report.rank) == (epoch, 0)
                results += report.results
                self.lookups += report.lookups
                self.sizes += [report.num_host_slots] if report.num_host_slots else []
        assert len({result.transfer_id for result in results}) == len(results), "a transfer was reported twice"
        return results

    def transfer(self, route: Route, sources, targets, keys=(), store="disk") -> TransferRequest:
        ends = {
            Route.DEVICE_TO_HOST: ("device", "host"),
            Route.HOST_TO_DEVICE: ("host", "device"),
            Route.HOST_TO_STORE: ("host", store),
            Route.STORE_TO_HOST: (store, "host"),
        }[route]
        slots = [slot_bytes(np.array(each, np.int32)) if len(each) else b"" for each in (sources, targets)]
        return TransferRequest(next(self.ids), route, *ends, *slots, b"".join(KEYS[i] for i in keys))

    def save(self, device, host) -> TransferRequest:
        return self.transfer(Route.DEVICE_TO_HOST, device, host)

    def load(self, host, device) -> TransferRequest:
        return self.transfer(Route.HOST_TO_DEVICE, host, device)

    def store(self, host, keys, store="disk") -> TransferRequest:
        return self.transfer(Route.HOST_TO_STORE, host, [], keys, store)

    def fetch(self, keys, host, store="disk") -> TransferRequest:
        return self.transfer(Route.STORE_TO_HOST, [], host, keys, store)

    def device(self, slot: int) -> list[bytes]:
        return [cache[slot].numpy().tobytes() for cache in self.caches]

    def host(self, slot: int) -> list[bytes]:
        return [host.block(slot).numpy().tobytes() for host in self.controller._hosts]

    def fill_host(self, slot: int, value: int) -> None:
        for host in self.controller._hosts:
            host.block(slot).numpy()[:] = value


def disk_at(folder) -> DiskStore:
    return DiskStore(folder / "store", 1 << 24, segment_bytes=1 << 20, min_free_bytes=0, num_threads=2)


def draft_of(key: bytes) -> bytes:
    """Return the key under which a store keeps the group draft-1 of a block."""
    mask = hashlib.sha256(b"group draft-1").digest()
    return bytes(each ^ other for each, other in zip(key, mask, strict=True))


class Hangs(MemoryStore):
    """A store whose reads and writes block until `may_go` is set."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.may_go = threading.Event()
        self.called = threading.Event()

    def read_into(self, reads, *, timeout_s=None):
        self.called.set()
        self.may_go.wait(120)
        return super().read_into(reads, timeout_s=timeout_s)

    def write(self, writes, *, timeout_s=None):
        self.called.set()
        self.may_go.wait(120)
        return super().write(writes, timeout_s=timeout_s)


class Gate:
    """Executes copies. After `close` (or with `is_open=False`), only the next copy blocks, until `open` is called."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.may_go = threading.Event()
        self.reached = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = not is_open

    def close(self) -> None:
        self.may_go.clear()
        self.reached.clear()
        self._is_closed = True

    def open(self) -> None:
        self.may_go.set()

    def __call__(self, *arguments):
        with self._lock:
            is_held, self._is_closed = self._is_closed, False
        if is_held:
            self.reached.set()
            assert self.may_go.wait(60)
        return run_path(*arguments)


class Call:
    """Runs a call in another thread, to check that the call blocks or returns."""

    def __init__(self, call) -> None:
        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def must_wait(self) -> None:
        """Check that the call blocks. On a slow machine the check may miss a call that returns late."""
        self._thread.join(0.1)
        assert self._thread.is_alive(), "the call returned"

    def must_end(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the call still blocks"
