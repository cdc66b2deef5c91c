"""LayerDoneCounter: tracks the arrival of the layers of a load.

Layers are copied in groups. A group has these states:

    PENDING ──(its copies are submitted)──> SUBMITTED ──(its event is reached)──> DONE
       └─(failed, cancelled, late)─> FAILED <─(failed)─┘     `wait` without a stream raises TransferError
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Sequence

from kvtier.errors import LayerSwapTimeoutError, RangeError, TransferError
from kvtier.memory import Event, Stream

DEFAULT_TIMEOUT = 30.0
"""Default timeout in seconds. It is long, because a load may be queued behind other transfers."""


class LayerDoneCounter:
    """Lets each layer of the model start when its blocks have arrived, while later layers still load. Thread-safe.

        for layer in layers:
            counter.wait(layer, stream)      # the stream waits, the host does not
            compute(layer)

    An urgent load is normally submitted before the caller gets the counter, so wait(layer, stream) does not block the
    host. If the load is still queued, wait(layer, stream) blocks the host until the layer is submitted.
    """

    def __init__(self, layer_groups: Sequence[range], changed: threading.Condition | None = None) -> None:
        self.groups = tuple(layer_groups)
        self._starts = [group.start for group in self.groups]
        self._events: list[Event | None] = [None] * len(self.groups)
        self._errors: list[BaseException | None] = [None] * len(self.groups)
        self._changed = changed or threading.Condition()

    def wait(self, layer: int, stream: Stream | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Make later work on `stream` wait until this layer has arrived. Without `stream`, block the caller.

        Raises LayerSwapTimeoutError after `timeout` seconds. If blocks of the layer fail to arrive, a call without
        `stream` raises TransferError. A call with `stream` does not, because it returns before the copies have ended.
        Only the report of the transfer then names the failed blocks.
        """
        group, deadline = self._group_of(layer), time.monotonic() + timeout
        event = self._submitted(group, layer, deadline, timeout)
        if stream is not None:
            if event is not None:
                stream.wait(event)
            return
        if event is not None and not event.synchronize(max(0.0, deadline - time.monotonic())):
            raise LayerSwapTimeoutError(f"layer {layer} was submitted, but has not arrived after {timeout} seconds")
        if self._errors[group] is not None:
            raise TransferError(f"layer {layer} did not arrive: {self._errors[group]}") from self._errors[group]

    def wait_all(self, stream: Stream | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        deadline = time.monotonic() + timeout
        for group in self.groups:
            self.wait(group.start, stream, max(0.0, deadline - time.monotonic()))

    def is_done(self, layer: int) -> bool:
        """True if all blocks of this layer, and of the other layers in its group, have arrived."""
        group = self._group_of(layer)
        event = self._events[group]
        return event is not None and self._errors[group] is None and event.query() and self._errors[group] is None

    def _group_of(self, layer: int) -> int:
        group = bisect.bisect_right(self._starts, layer) - 1
        if group < 0 or layer not in self.groups[group]:
            raise RangeError(f"layer {layer} is not part of this transfer, which has {self.groups}")
        return group

    def _submitted(self, group: int, layer: int, deadline: float, timeout: float) -> Event | None:
        """Wait for the event of the group and return it, or None if the group failed before it was submitted."""
        with self._changed:
            while self._events[group] is None and self._errors[group] is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LayerSwapTimeoutError(f"layer {layer} has not been submitted after {timeout} seconds")
                self._changed.wait(left)
            return self._events[group]

    # ---- called by the transfer ----

    def submitted(self, group: int, event: Event) -> None:
        """Record that all copies of a group are submitted. `event` is reached after the last copy."""
        with self._changed:
            self._events[group] = event
            self._changed.notify_all()

    def failed(self, group: int, error: BaseException) -> None:
        """Record that some blocks of a group will not arrive."""
        with self._changed:
            self._errors[group] = self._errors[group] or error
            self._changed.notify_all()
