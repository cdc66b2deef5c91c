"""Lane: one direction of the link. Decides the order and the streams of transfers, and limits the bytes in flight.

A transfer consists of slices (blocks that are submitted together). Urgent transfers have a separate stream and do not
wait for bulk transfers. While an urgent transfer is in flight, no bulk slice is submitted. At most max_urgent_bytes of
urgent copies and max_in_flight_bytes of bulk copies are in flight. An urgent transfer or a single slice may exceed its
limit if no other copy of its kind (urgent or bulk) is in flight.

If these rules allow a whole transfer now, and no queued transfer must go first, `submit` submits all slices at once.
Otherwise, the whole transfer is queued, and the lane's own thread submits the slices one by one:

    queue    [ urgent transfers, oldest first | bulk transfers, oldest first ]
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from kvtier.memory import Event, Placement, Stream, cuda
from kvtier.memory.copy_paths import CopyContext, Pieces
from kvtier.transfer.block_view import Direction
from kvtier.transfer.handle import TransferHandle
from kvtier.transfer.staging import Mover, StagingRing
from kvtier.transfer.strategy import TransferConfig

_URGENT = -1  # stream priority: lower numbers run first


class Lane:
    """Executes the transfers of one direction. Thread-safe."""

    def __init__(self, direction: Direction, placement: Placement, config: TransferConfig, mover: Mover) -> None:
        self.direction = direction
        self._placement = placement
        self._config = config
        self._mover = mover
        self._ring = StagingRing(direction, placement, config, mover)
        self._streams = {urgent: Stream(placement, priority=_URGENT if urgent else 0) for urgent in (True, False)}
        self._changed = threading.Condition()
        self._queue: list[TransferHandle] = []
        self._in_flight: dict[bool, deque[tuple[int, Event]]] = {True: deque(), False: deque()}  # by `urgent`
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, transfer: TransferHandle) -> None:
        """Submit all slices if `_can_start` allows it. Otherwise queue the transfer."""
        with self._changed:
            if self._can_start(transfer):
                while (index := transfer.claim()) is not None:
                    self._start(transfer, index)
                return
            position = next((k for k, each in enumerate(self._queue) if transfer.urgent and not each.urgent), None)
            self._queue.insert(len(self._queue) if position is None else position, transfer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._pump, name=f"kvtier-{self.direction}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Finish all transfers and release streams and staging memory."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for stream in self._streams.values():
            stream.synchronize() if self._placement.is_device else stream.close()
        self._ring.close()

    def drop_staging(self) -> None:
        """Free the staging memory, which the next staged slice allocates again. No transfer may be in flight."""
        with self._changed:
            self._ring.close()

    # ---- the thread for queued transfers ----

    def _pump(self) -> None:
        while True:
            with self._changed:
                queued = self._next_queued()
                if queued is None:
                    return
                transfer, wanted = queued
                blocker = self._blocker(transfer.urgent, wanted)
                if blocker is None:
                    index = transfer.claim()
                    if index is not None:
                        self._start(transfer, index)
                    continue
            with contextlib.suppress(Exception):  # reported by the transfers that failed
                # Wait without the lock, because an urgent transfer may arrive. Wait without polling, because the thread
                # of the inference engine needs the GIL, and the slices in flight keep the link busy anyway.
                blocker.settle(polling=False)

    def _next_queued(self) -> tuple[TransferHandle, int] | None:
        """Wait for a slice to submit. Return its transfer and its size, or None after close() if the queue is empty."""
        while True:
            while self._queue:
                wanted = self._queue[0].next_bytes
                if wanted is not None:
                    return self._queue[0], wanted
                self._queue.pop(0)
            if self._closed:
                return None
            self._changed.wait()

    # ---- submitting; the lock is held ----

    def _blocker(self, urgent: bool, wanted: int) -> Event | None:
        """Return the next event that `wanted` bytes must wait for, or None if they can be submitted now.

        Bulk copies wait for all urgent copies, because copy engines have no priorities. A bulk stream that always has a
        copy ready would keep the copy engine busy, and an urgent load would wait for all bulk copies (18.5 ms instead
        of 1.9 ms; H200, 2026-11-15).
        """
        self._retire(True)
        self._retire(False)
        if not urgent and self._in_flight[True]:
            return self._in_flight[True][-1][1]
        in_flight = self._in_flight[urgent]
        used = sum(nbytes for nbytes, _ in in_flight)
        limit = self._config.max_urgent_bytes if urgent else self._config.max_in_flight_bytes
        return in_flight[0][1] if used and used + wanted > limit else None

    def _can_start(self, transfer: TransferHandle) -> bool:
        """True if no queued transfer must go first, and all slices may start now (see the top of this file)."""
        if any(each.urgent or not transfer.urgent for each in self._queue):
            return False
        nbytes = transfer.compiled.nbytes
        fits = transfer.urgent or nbytes <= self._config.max_in_flight_bytes
        return fits and self._blocker(transfer.urgent, nbytes) is None

    def _retire(self, urgent: bool) -> None:
        in_flight = self._in_flight[urgent]
        while in_flight and _is_reached(in_flight[0][1]):
            in_flight.popleft()

    def _start(self, transfer: TransferHandle, index: int) -> None:
        """Submit one slice. Errors are recorded in the transfer, not raised."""
        stream = self._streams[transfer.urgent]
        compiled = transfer.compiled
        start = self._start_on_device if self._placement.is_device else self._start_on_host
        try:
            end, error = start(transfer, index, stream)
        except Exception as raised:  # the GPU or the stream is lost, so no event can be recorded
            end, error = Event(), raised
        compiled.host.used_by(stream, end)
        self._in_flight[transfer.urgent].append((compiled.slices[index].nbytes, end))
        transfer.submitted(index, end, error)

    def _start_on_device(
        self, transfer: TransferHandle, index: int, stream: Stream
    ) -> tuple[Event, BaseException | None]:
        compiled = transfer.compiled
        part, choice, host = compiled.slices[index], compiled.choice, compiled.host.placement
        with cuda.current_context(self._placement):
            try:
                if transfer.begin is None:
                    if transfer.after is not None:
                        stream.wait(transfer.after)
                    transfer.begin = stream.record(Event(timing=True))
                if choice.strategy == "staged":
                    return self._ring.run(part, host, choice.path, stream, transfer.after), None
                self._mover(choice.path, self._context(host, stream), Pieces(part.tables[0]))
                return stream.record(Event(timing=True, blocking=True)), None
            except Exception as error:  # a part of the slice may be in flight
                return stream.record(Event(timing=True, blocking=True)), error

    def _start_on_host(
        self, transfer: TransferHandle, index: int, stream: Stream
    ) -> tuple[Event, BaseException | None]:
        compiled = transfer.compiled
        part, path = compiled.slices[index], compiled.choice.path
        context = self._context(compiled.host.placement, None)
        after = transfer.after
        if transfer.begin is None:
            transfer.begin = stream.record(Event(timing=True))

        def task() -> None:
            try:
                if after is not None:
                    after.synchronize()  # raises if the computation of the blocks failed
                self._mover(path, context, Pieces(part.tables[0]))
            except Exception as error:
                transfer.failed(index, error)

        stream.enqueue(task)
        return stream.record(Event(timing=True)), None

    def _context(self, host: Placement, stream: Stream | None) -> CopyContext:
        sides = (self._placement, host) if self.direction is Direction.D2H else (host, self._placement)
        return CopyContext(*sides, stream)


def _is_reached(event: Event) -> bool:
    """True if the work before this event has ended, or the GPU is lost."""
    try:
        return event.query()
    except Exception:
        return True
