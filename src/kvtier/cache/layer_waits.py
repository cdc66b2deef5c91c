"""LayerWaits: lets a model start while its cached blocks are still being loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvtier.errors import TransferError
from kvtier.memory import Placement, current_stream
from kvtier.transfer import Status, Transfer


class LayerWaits:
    """For one step: `before_layer` holds the model until that layer's blocks are there; `arrived` tells at the end.

    A layer that fails to arrive is computed with whatever is there, and `arrived` is False: the step's result is wrong
    and must not be used.
    """

    def __init__(self, loads: Sequence[Sequence[Transfer]], device: Placement, *, failed: bool = False) -> None:
        """`loads`: for each load a copy per cache group; `failed` if another could not even be started."""
        self._loads = loads
        self._failed = failed
        self._device = device

    def before_layer(self, layer: int, group: int = 0) -> None:
        """On CUDA the current stream waits, and not the host."""
        stream = current_stream(self._device)
        for copies in self._loads:
            with contextlib.suppress(TransferError):  # late ones too; `arrived` will tell
                copies[group].layers.wait(layer, stream)

    def arrived(self) -> bool:
        """Wait until all of it is over; whether every block is there."""
        arrived = [copy.settle().status is Status.DONE for copies in self._loads for copy in copies]
        return all(arrived) and not self._failed
