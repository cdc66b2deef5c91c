"""LayerWaits: allows a forward pass to start while cached blocks are still being loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import LayerSwapTimeoutError, TransferError
from kvtier.memory import Placement, Stream, current_stream
from kvtier.transfer import TransferHandle, TransferStatus
from kvtier.transfer.layers import DEFAULT_TIMEOUT


class LayerWaits:
    """Waits for the blocks that a step loads.

    `before_layer` waits for the blocks of one layer, `arrived` for all blocks. If a layer fails to load, the step
    computes with invalid blocks, and `arrived` returns False. The caller must then discard the result of the step.
    """

    def __init__(
        self,
        loads: Sequence[Sequence[TransferHandle]],
        device: Placement,
        *,
        failed: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """`loads[i]` contains the copies of load i, one per cache group. `failed` is True if a load has already failed.

        A wait for a layer that exceeds `timeout` seconds is repeated.
        """
        self._loads, self._device, self._failed, self._timeout = loads, device, failed, timeout

    def before_layer(self, layer: int, group: int = 0) -> None:
        """Wait for the blocks of a layer. On CUDA, the stream waits. The host waits only for the submission."""
        stream = current_stream(self._device)
        for copies in self._loads:
            self._wait(copies[group], layer, stream)

    def _wait(self, copy: TransferHandle, layer: int, stream: Stream | None) -> None:
        """Wait until the layer has arrived or its load has failed. After a timeout, wait again.

        A wait can time out because the process was suspended. If the wait ended then, the layer would be computed
        without its blocks, and the step would count as valid if the blocks arrive later.
        """
        while True:
            try:
                copy.layers.wait(layer, stream, self._timeout)
            except LayerSwapTimeoutError:
                continue
            except TransferError:  # `arrived` will return False
                pass
            return

    def arrived(self) -> bool:
        """Wait until all loads have ended. Return True if every block arrived."""
        arrived = [copy.settle().status is TransferStatus.DONE for copies in self._loads for copy in copies]
        return all(arrived) and not self._failed
