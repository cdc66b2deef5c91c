"""Helpers for tests of transfers: layouts, caches with known bytes, expected bytes in numpy, and waiting threads."""

import threading
from concurrent.futures import Future

import numpy as np
import torch
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.layout import CacheGroup, KVLayout, LayerSpec, TensorSpec
from kvtier.memory import CPU, Placement
from kvtier.memory.copy_paths import run_path
from kvtier.transfer import DeviceCache, Direction, HostMemory, TransferConfig, TransferHandle, TransferManager

SMALL = CacheGroup.attention("main", 4, 2, 8, "bf16", 4)
FORMS = ["block-first", "layer-first", "pairs", "interleaved"]


@st.composite
def groups(draw, name="main"):
    """Draw an attention or MLA cache group of some element type, with or without scales, indexers and draft layers."""
    tokens = draw(st.sampled_from([1, 4, 16]))
    element = draw(st.sampled_from([dt.u8, dt.f16, dt.bf16, dt.f32, dt.fp8_e4m3, dt.u4]))
    extra = [
        TensorSpec(role, dt.f32, (draw(st.integers(1, 3)), tokens))
        for role in draw(st.lists(st.sampled_from(["key_scale", "value_scale", "indexer"]), unique=True, max_size=2))
    ]
    layers = draw(st.integers(1, 6))
    if draw(st.booleans()):
        group = CacheGroup.attention(name, layers, draw(st.integers(1, 4)), 8, element, tokens, extra=extra)
    else:
        group = CacheGroup.mla(name, layers, draw(st.sampled_from([6, 18, 64])), element, tokens, extra=extra)
    if draw(st.booleans()):
        draft = LayerSpec((TensorSpec("key", dt.u8, (tokens, 5)), TensorSpec("value", dt.f16, (tokens, 3))))
        group = group.with_layers([draft] * draw(st.integers(1, 2)))
    return group


def layout_of(*each):
    return KVLayout(16, tuple(each))


def filled_cache(group, num_blocks, form, placement, seed):
    """Return a cache filled with random bytes, and a dictionary from (layer, role) to a tensor view [block, byte]."""
    random = torch.Generator().manual_seed(seed)
    device = Placement.parse(placement).torch

    def made(*shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random).to(device)

    views = {}
    if form == "block-first":
        whole = made(num_blocks, group.block_bytes)
        for layer, spec, span in group.tensors():
            views[layer, spec.name] = whole[:, span.offset : span.offset + span.nbytes]
        return DeviceCache.block_first(group, whole), views
    for index, layer in enumerate(group.layers):
        sizes = [each.nbytes for each in layer.tensors]
        if form == "pairs":  # each block contains all tensors of the layer
            wide = made(num_blocks, sum(sizes))
            parts = torch.split(wide, sizes, dim=1)
        elif form == "interleaved":  # the blocks are every second row of a larger tensor
            parts = [made(num_blocks, 2, size)[:, 1] for size in sizes]
        else:
            parts = [made(num_blocks, size) for size in sizes]
        views.update({(index, each.name): part for each, part in zip(layer.tensors, parts, strict=True)})
    layers = [{each.name: views[i, each.name] for each in layer.tensors} for i, layer in enumerate(group.layers)]
    return DeviceCache.layer_first(group, layers), views


def device_bytes(group, views):
    """Return the bytes of the device blocks in the host layout, as [block, byte]."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return np.concatenate([views[layer, spec.name].cpu().numpy() for layer, spec, _ in group.tensors()], axis=1)


def host_bytes(host):
    """Return the bytes of the ready host blocks as [slot, byte]."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return np.stack([host.block(slot).numpy().copy() for slot in range(host.num_ready)])


def ready_host(group, num_slots, placement, seed=0, **options):
    """Return host memory filled with random bytes."""
    host = HostMemory(group, num_slots, placement, **options)
    host.wait_ready(timeout=60)
    random = np.random.default_rng(seed)
    for slot in range(num_slots):
        host.block(slot).numpy()[:] = random.integers(0, 256, group.block_bytes, dtype=np.uint8)
    return host


class WatchedCondition(threading.Condition):
    """A condition that reports when a thread has begun to wait on it, so that a test can notify the thread later."""

    def __init__(self):
        super().__init__()
        self._begun = threading.Semaphore(0)

    def wait(self, timeout=None):
        self._begun.release()  # this thread holds the lock, so no notification can come before the wait
        return super().wait(timeout)

    def start_waiter(self, function):
        """Start a function in a thread. Return its future after the thread has begun to wait or has ended."""
        future = run_in_thread(function)
        future.add_done_callback(lambda _: self._begun.release())
        self._begun.acquire()
        return future


def run_in_thread(function):
    """Run a function in a new thread and return the future of its result."""
    future = Future()

    def work():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class SteppedMover:
    """Executes copies for a TransferManager and records their host slots. Each copy waits for a permit of the test."""

    def __init__(self):
        self.permits, self.host, self.slots, self.jobs = threading.Semaphore(0), None, [], []

    def __call__(self, path, job, pieces):
        self.permits.acquire()
        source, target, _ = pieces.table
        on_host = source if 0 <= source[0] - self.host.pointer < self.host.num_slots * SMALL.slot_bytes else target
        self.jobs.append(job)
        done = run_path(path, job, pieces)
        self.slots.append(sorted({(int(each) - self.host.pointer) // SMALL.slot_bytes for each in on_host}))
        return done

    def open(self):
        self.permits.release(1000)


def stepped(num_blocks=24, form="block-first", around=None, **config):
    """Return a TransferManager on the CPU, its SteppedMover, and the views of its cache.

    By default, transfers are cut into slices of one block. If `around` is given, the manager calls `around` instead of
    the SteppedMover, and `around` must call the SteppedMover.
    """
    mover = SteppedMover()
    options = TransferConfig(
        **{"slice_bytes": SMALL.block_bytes, "max_in_flight_bytes": 2 * SMALL.block_bytes, **config}
    )
    manager = TransferManager(layout_of(SMALL), CPU, options, mover=around or mover)
    cache, views = filled_cache(SMALL, num_blocks, form, CPU, 0)
    mover.host = ready_host(SMALL, num_blocks, CPU, 1)
    manager.register(cache, mover.host)
    return manager, mover, views


def in_flight_bytes(manager: TransferManager, direction: str, *, urgent: bool) -> int:
    lane = manager._lanes[Direction(direction)]
    with lane._changed:
        lane._retire(urgent)
        return sum(nbytes for nbytes, _ in lane._in_flight[urgent])


def num_layers_done(load: TransferHandle) -> int:
    return sum(len(group) for group in load.layers.groups if load.layers.is_done(group.start))


def arrival_ms(load: TransferHandle, layer: int) -> float:
    """Wait for a layer. Return the milliseconds from the first copy of the load to the arrival of the layer.

    Return 0.0 if the load has no blocks to copy.
    """
    load.layers.wait(layer)
    event = load.layers._events[load.layers._group_of(layer)]
    return 0.0 if load.begin is None else load.begin.elapsed(event)
