"""One direction of the link: who goes next, on which stream, and how much at a time.

urgent   submitted whole by the caller itself, on a stream of its own; never behind bulk in a queue
bulk     on another stream, at most max_in_flight_bytes at once, and none while something urgent is under way: at once
         by the caller if it fits and nothing is ahead of it, else by the lane's thread, a slice at a time

queue   [ urgent beyond its bound, oldest first | bulk, oldest first ]
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from kvtier.memory import Event, Placement, Stream, cuda
from kvtier.memory.copy_paths import CopyContext, Pieces
from kvtier.transfer.handle import TransferHandle
from kvtier.transfer.plane import Direction
from kvtier.transfer.staging import Mover, StagingRing
from kvtier.transfer.strategy import TransferConfig

_URGENT = -1  # stream priority: lower numbers go first


class Lane:
    """Carries out the transfers of one direction. Thread-safe."""

    def __init__(self, direction: Direction, placement: Placement, config: TransferConfig, mover: Mover) -> None:
        self.direction = direction
        self._placement = placement
        self._config = config
        self._mover = mover
        self._ring = StagingRing(direction, placement, config, mover)
        self._streams = {urgent: Stream(placement, priority=_URGENT if urgent else 0) for urgent in (True, False)}
        self._changed = threading.Condition()
        self._queue: list[TransferHandle] = []
        self._in_flight: dict[bool, deque[tuple[int, Event]]] = {True: deque(), False: deque()}
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, transfer: TransferHandle) -> None:
        """Start it now if nothing is in its way and it is within the bound, else queue it."""
        with self._changed:
            if self._can_start(transfer):
                while (index := transfer.claim()) is not None:
                    self._start(transfer, index)
                return
            behind = next((k for k, each in enumerate(self._queue) if transfer.urgent and not each.urgent), None)
            self._queue.insert(len(self._queue) if behind is None else behind, transfer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._pump, name=f"kvtier-{self.direction}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def in_flight_bytes(self, *, urgent: bool) -> int:
        """Bytes given to the device and not done."""
        with self._changed:
            self._retire(urgent)
            return sum(nbytes for nbytes, _ in self._in_flight[urgent])

    def close(self) -> None:
        """Finish everything, and give streams and staging memory up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for stream in self._streams.values():
            stream.synchronize() if self._placement.is_device else stream.close()
        self._ring.close()

    def drop_staging(self) -> None:
        """Give the staging memory back; the next staged slice makes it anew. Nothing may be under way."""
        with self._changed:
            self._ring.close()

    # ---- the thread for what is queued ----

    def _pump(self) -> None:
        while True:
            with self._changed:
                found = self._next_queued()
                if found is None:
                    return
                transfer, wanted = found
                in_the_way = self._in_the_way(transfer.urgent, wanted)
                if in_the_way is None:
                    index = transfer.claim()
                    if index is not None:
                        self._start(transfer, index)
                    continue
            with contextlib.suppress(Exception):  # told by the transfers it hits
                # without the lock: what comes meanwhile may be more urgent than what waits here; and patiently: the
                # engine's thread needs the interpreter, and there are more slices on the link
                in_the_way.settle(patient=True)

    def _next_queued(self) -> tuple[TransferHandle, int] | None:
        """Wait for a transfer with a slice left to submit. Return it and the bytes of the slice; None if closed."""
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

    def _in_the_way(self, urgent: bool, wanted: int) -> Event | None:
        """What a slice of so many bytes must wait for; None: it can go now.

        Bulk waits for everything urgent, since copy engines know no priorities: a stream that always has a copy ready
        keeps the engine, and an urgent load took as long as all of the bulk (18.5 ms, alone 1.9; H200, 2026-11-15).
        """
        self._retire(True)
        self._retire(False)
        if not urgent and self._in_flight[True]:
            return self._in_flight[True][-1][1]
        line = self._in_flight[urgent]
        used = sum(nbytes for nbytes, _ in line)
        limit = self._config.max_urgent_bytes if urgent else self._config.max_in_flight_bytes
        return line[0][1] if used and used + wanted > limit else None

    def _can_start(self, transfer: TransferHandle) -> bool:
        """Whether all of it can be submitted right now, ahead of nobody it should be behind."""
        if any(each.urgent or not transfer.urgent for each in self._queue):
            return False
        nbytes = transfer.compiled.nbytes
        fits = transfer.urgent or nbytes <= self._config.max_in_flight_bytes
        return fits and self._in_the_way(transfer.urgent, nbytes) is None

    def _retire(self, urgent: bool) -> None:
        line = self._in_flight[urgent]
        while line and _is_reached(line[0][1]):
            line.popleft()

    def _start(self, transfer: TransferHandle, index: int) -> None:
        """Give one slice to the streams. Whatever goes wrong is the slice's, not the caller's."""
        stream = self._streams[transfer.urgent]
        compiled = transfer.compiled
        start = self._start_on_device if self._placement.is_device else self._start_on_host
        try:
            end, error = start(transfer, index, stream)
        except Exception as raised:  # nothing can be recorded any more: the GPU or the stream is lost
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
                    transfer.layers.begin(transfer.begin)
                if choice.strategy == "staged":
                    return self._ring.run(part, host, choice.path, stream, transfer.after), None
                self._mover(choice.path, self._job(host, stream), Pieces(part.tables.copies))
                return stream.record(Event(timing=True, blocking=True)), None
            except Exception as error:  # part of it may be under way
                return stream.record(Event(timing=True, blocking=True)), error

    def _start_on_host(
        self, transfer: TransferHandle, index: int, stream: Stream
    ) -> tuple[Event, BaseException | None]:
        compiled = transfer.compiled
        part, path, job = compiled.slices[index], compiled.choice.path, self._job(compiled.host.placement, None)
        after = transfer.after
        if transfer.begin is None:
            transfer.begin = stream.record(Event(timing=True))
            transfer.layers.begin(transfer.begin)

        def task() -> None:
            try:
                if after is not None:
                    after.synchronize()  # raises if the compute that was to write the blocks failed
                self._mover(path, job, Pieces(part.tables.copies))
            except Exception as error:
                transfer.failed(index, error)

        stream.enqueue(task)
        return stream.record(Event(timing=True)), None

    def _job(self, host: Placement, stream: Stream | None) -> CopyContext:
        sides = (self._placement, host) if self.direction is Direction.D2H else (host, self._placement)
        return CopyContext(*sides, stream)


def _is_reached(event: Event) -> bool:
    """Whether nothing more is to come before this event; a lost GPU does nothing more."""
    try:
        return event.query()
    except Exception:
        return True
