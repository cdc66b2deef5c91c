"""The host tier's memory: slots for blocks of one group, pinned in the background.

             HostMemory(...)          piece by piece, by a thread of its own
slots  0 ........ num_ready ........ num_slots      num_ready only grows
       usable   |  not yet         |
state  GROWING ──(last piece)──> READY          free() from any state ──> FREED
            └──(system refuses)──> STOPPED      keeps what it has; `trouble` says why
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum, auto

import torch

from kvtier.errors import (
    ArgumentError,
    ClosedError,
    KvtierError,
    OutOfMemoryError,
    RangeError,
    TransferTimeoutError,
)
from kvtier.layout import CacheGroup
from kvtier.memory import CPU, PINNED, Buffer, Event, Placement, Stream, host_pages
from kvtier.memory.host_pages import MappedMemory
from kvtier.memory.region import MemoryRef
from kvtier.transfer.plane import BlockView, SlotAddresses

# Touching 1 GiB takes 0.8 s and pinning it 0.06 s (H200, 2026-11-15): the first slots are there after 0.2 s.
PIECE_BYTES = 256 << 20


class GrowthState(Enum):
    """Whether more slots are to come."""

    GROWING = auto()
    READY = auto()
    STOPPED = auto()
    FREED = auto()


class HostMemory:
    """`num_slots` slots for blocks of `group`, contiguous and block-first, near the GPU `device` (or plain, on "cpu").

    It is usable at once: slots below `num_ready` are there, the others follow. It outlives the device cache: a sleeping
    engine frees its tensors, and its blocks are still here when it wakes. `free()` gives the memory back.
    """

    def __init__(
        self,
        group: CacheGroup,
        num_slots: int,
        device: Placement | str = CPU,
        *,
        piece_bytes: int = PIECE_BYTES,
        huge_pages: bool = True,
        background: bool = True,
    ) -> None:
        if num_slots < 1 or piece_bytes < 1:
            raise ArgumentError(f"host memory needs slots, got {num_slots} in pieces of {piece_bytes} bytes")
        self.group = group
        self.slot_bytes = group.slot_bytes
        self.num_slots = num_slots
        self.piece_slots = max(1, min(num_slots, piece_bytes // self.slot_bytes))
        """Slots registered together; no copy spans two such pieces."""
        self.device = Placement.parse(device).require()
        self.placement: Placement = PINNED if self.device.is_device else CPU
        self.trouble = ""
        """What did not go as it should: why it stopped growing, why it is not on the GPU's NUMA node."""
        self._memory = MappedMemory(num_slots * self.slot_bytes, huge_pages=huge_pages)
        self.addresses = SlotAddresses(self._memory.pointer, self.slot_bytes, self.piece_slots)
        """Where the slots are, ready or not, and until they are freed."""
        self._holding: MemoryRef | None = self._hold()
        self._changed = threading.Condition()
        self._growth = GrowthState.GROWING
        self._num_ready = 0
        if background:
            grow = _weak_method(self)
            threading.Thread(target=grow, name=f"kvtier-pin-{group.name}", daemon=True).start()
        else:
            while self._grow_piece():
                pass

    def _hold(self) -> MemoryRef:
        memory = self._memory
        # the last one who uses it, be that a copy in flight, frees it
        return MemoryRef(memory.pointer, memory.nbytes, self.placement, memory.tensor, release=memory.free)

    @property
    def num_ready(self) -> int:
        """Slots that can be used: 0 to num_ready - 1."""
        return self._num_ready

    @property
    def growth(self) -> GrowthState:
        """Whether more are to come."""
        return self._growth

    def wait_ready(self, num_slots: int | None = None, timeout: float | None = None) -> int:
        """Wait until so many slots (None: all that there will be) are usable; returns how many are.

        TransferTimeoutError when it takes longer than `timeout` seconds, OutOfMemoryError if there will not be as many.
        """
        wanted = self.num_slots if num_slots is None else num_slots
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._num_ready < wanted and self._growth is GrowthState.GROWING:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TransferTimeoutError(
                        f"{self._num_ready} of {wanted} host slots are ready after {timeout} seconds"
                    )
                self._changed.wait(left)
            if num_slots is not None and self._num_ready < num_slots:
                raise OutOfMemoryError(f"{self._num_ready} of {num_slots} host slots could be had: {self.trouble}")
            return self._num_ready

    # ---- the slots ----

    def plane(self, layer: int | None = None, name: str | None = None) -> BlockView:
        """The usable slots, as whole blocks, or as one tensor of one layer of them: what the swap operators take."""
        holding = self._open()
        if (layer is None) != (name is None):
            raise ArgumentError("a plane of one tensor needs both its layer and its name")
        span = self.group.span() if layer is None or name is None else self.group.tensor_span(layer, name)
        return BlockView(
            holding.pointer + span.offset, self.slot_bytes, span.nbytes, self._num_ready, holding, self.piece_slots
        )

    def block(self, slot: int) -> Buffer:
        """The bytes of one block, for whoever stores or checks it."""
        holding = self._open()
        if not 0 <= slot < self._num_ready:
            raise RangeError(f"slot {slot} is outside 0..{self._num_ready - 1}, those of {self.num_slots} ready so far")
        pointer = holding.pointer + slot * self.slot_bytes
        return Buffer.from_pointer(pointer, self.group.block_bytes, "u8", self.placement, owner=holding)

    def slots(self) -> torch.Tensor:
        """The usable slots as bytes, [slot, byte]; it must not outlive this memory."""
        self._open()
        return self._memory.tensor[: self._num_ready * self.slot_bytes].view(self._num_ready, self.slot_bytes)

    def view(self) -> memoryview:
        """The bytes of all slots, ready or not: for who prepares them. `free` gives the pages back all the same."""
        self._open()
        return self._memory.tensor.numpy().data[: self._memory.nbytes]

    @property
    def extent(self) -> tuple[int, int]:
        """The address range of all slots, ready or not."""
        return self._memory.pointer, self._memory.pointer + self._memory.nbytes

    def used_by(self, stream: Stream, event: Event) -> None:
        """Work on `stream` up to `event` uses these slots: free() waits for it."""
        if self._holding is not None:
            self._holding.used_by(stream, event)

    def keep(self) -> MemoryRef:
        """What keeps the memory alive; an error once freed."""
        return self._open()

    def free(self) -> None:
        """Give the memory back, once copies in flight are done with it. Using it then is an error; twice is fine."""
        with self._changed:
            holding, self._holding = self._holding, None
            self._growth, self._num_ready = GrowthState.FREED, 0
            self._changed.notify_all()
        if holding is not None:
            holding.wait()

    def _open(self) -> MemoryRef:
        holding = self._holding
        if holding is None:
            raise ClosedError(f"the host memory of group {self.group.name!r} was freed")
        return holding

    # ---- growing ----

    def _grow_piece(self) -> bool:
        """Make the next piece usable. False if there is none left, or none to be had."""
        holding = self._holding  # kept while the piece is made, also from free()
        if holding is None or self._growth is not GrowthState.GROWING:
            return False
        first = self._num_ready
        count = min(self.piece_slots, self.num_slots - first)
        try:
            if first == 0:
                self._bind()
            self._make_present(first * self.slot_bytes, count * self.slot_bytes)
        except (KvtierError, RuntimeError, MemoryError) as error:
            self._end(GrowthState.STOPPED, str(error))
            return False
        with self._changed:
            if self._growth is not GrowthState.GROWING:
                return False
            self._num_ready = first + count
            if self._num_ready == self.num_slots:
                self._growth = GrowthState.READY
            self._changed.notify_all()
        return self._growth is GrowthState.GROWING

    def _bind(self) -> None:
        if self.device.is_device:
            node, source = host_pages.node_of_gpu(host_pages.pci_address(self.device))
            self.trouble = source if node is None else self._memory.bind(node) or ""

    def _make_present(self, offset: int, nbytes: int) -> None:
        self._memory.touch(offset, nbytes)
        if self.device.is_device:
            self._memory.pin(offset, nbytes, self.device)

    def _end(self, growth: GrowthState, trouble: str) -> None:
        with self._changed:
            if self._growth is GrowthState.GROWING:
                self._growth, self.trouble = growth, trouble
            self._changed.notify_all()


def _weak_method(memory: HostMemory) -> Callable[[], None]:
    """A loop that grows the memory as long as somebody else refers to it."""
    watched = weakref.ref(memory)

    def grow() -> None:
        while True:
            alive = watched()
            if alive is None or not alive._grow_piece():
                return
            del alive

    return grow
