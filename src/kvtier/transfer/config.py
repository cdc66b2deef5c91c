"""What can be set about transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvtier.errors import ArgumentError

Strategy = Literal["direct", "kernel", "staged"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How a TransferManager moves blocks. The constants were tuned on an H200 behind PCIe 5.0 x16, 2026-11-15."""

    strategy: Strategy | None = None
    """Force one (see strategy.py); None: the cheapest by the machine's calibration."""
    slice_bytes: int = 64 << 20
    """Bulk transfers are submitted in slices of about this size: 1.2 ms of the link."""
    max_in_flight_bytes: int = 192 << 20
    """Bulk bytes given to the device and not done, per direction: enough for the link never to run dry, and what an
    urgent transfer waits for at most (3.5 ms)."""
    max_urgent_bytes: int = 8 << 30
    """Urgent bytes, likewise. Beyond it they are queued, ahead of bulk."""
    group_piece_bytes: int = 512 << 10
    """Layers of a layer-wise load travel in groups of at least so many bytes per block: DMA at 96 % of the link."""
    min_layer_groups: int = 4
    """The model waits for one such share of the load before it can start."""
    chunk_bytes: int = 64 << 20
    """One slot of the staging ring: two of them outlast a gather kernel's wait for a busy GPU, and each costs the host
    a launch and a batch call (0.1 ms)."""
    num_chunks: int = 3
    gather_blocks: int = 264
    """Blocks of threads of the kernel that gathers into staging: two per multiprocessor."""
    checksum_threads: int = 4

    def __post_init__(self) -> None:
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ArgumentError(f"unknown strategy {self.strategy!r}; choose one of {', '.join(STRATEGIES)}")
        for name in ("slice_bytes", "max_in_flight_bytes", "max_urgent_bytes", "chunk_bytes", "num_chunks"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be positive, got {getattr(self, name)}")
