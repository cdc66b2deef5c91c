"""LayerWaits: lets a model start while its cached blocks are still being loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import LayerSwapTimeoutError, TransferError
from kvtier.memory import Placement, Stream, current_stream
from kvtier.transfer import TransferHandle, TransferStatus
from kvtier.transfer.layers import DEFAULT_TIMEOUT


class LayerWaits:
    """For one step: `before_layer` holds the model until that layer's blocks are there; `arrived` tells at the end.

    A layer that fails to arrive is computed with whatever is there, and `arrived` is False: the step's result is wrong
    and must not be used.
    """

    def __init__(
        self,
        loads: Sequence[Sequence[TransferHandle]],
        device: Placement,
        *,
        failed: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """`loads`: for each load a copy per cache group; `failed` if another could not even be started. After
        `timeout` seconds a layer is waited for again."""
        self._timeout = timeout
        self._loads = loads
        self._failed = failed
        self._device = device

    def before_layer(self, layer: int, group: int = 0) -> None:
        """On CUDA the current stream waits, and not the host."""
        stream = current_stream(self._device)
        for copies in self._loads:
            self._wait(copies[group], layer, stream)

    def _wait(self, copy: TransferHandle, layer: int, stream: Stream | None) -> None:
        """However long it takes: a layer computed before its blocks came would count as right once they have come, as
        after a process that was stopped for a minute."""
        while True:
            try:
                copy.layers.wait(layer, stream, self._timeout)
            except LayerSwapTimeoutError:
                continue
            except TransferError:  # `arrived` will tell
                pass
            return

    def arrived(self) -> bool:
        """Wait until all of it is over; whether every block is there."""
        arrived = [copy.settle().status is TransferStatus.DONE for copies in self._loads for copy in copies]
        return all(arrived) and not self._failed
