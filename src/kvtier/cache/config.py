"""Configuration of a cache and its tiers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from kvtier.errors import ArgumentError, RangeError


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Configuration of a CacheManager."""

    num_blocks: int
    """Number of blocks in the device tier, or 0 if another engine owns the device blocks."""
    prefix_caching: bool = True
    policy: str = "lru"
    host: HostConfig | None = None
    """The tier in host memory, if any."""
    stores: tuple[StoreConfig, ...] = ()
    """Tiers below the host, from the nearest to the farthest."""
    partial_scan: int = 8
    """A match ends at the first uncached block of a prompt. This block is compared with at most `partial_scan` cached
    blocks that follow the same prefix. The KV of the matching leading tokens is copied instead of computed."""
    free_share: float = 0.0
    """Share of the device blocks to keep free by evicting blocks in advance. Leased blocks are not evicted."""
    always_load: bool = False
    """Load cached blocks even if computing them is expected to be faster."""
    owns_device: bool = True
    """False if another engine owns the device blocks. In this case the host is the first tier, and
    CacheManager.foreign plans copies between the host and the other engine's device memory."""
    secret: bytes = field(default=b"", repr=False)
    """Key for the token digests in stored blocks, at most 64 bytes. All engines that share a store need the same key.
    Without a key, anyone who can read the store can test whether a guessed prompt is in the store."""

    def __post_init__(self) -> None:
        if self.owns_device and self.num_blocks < 1:
            raise RangeError(f"a cache needs at least one block, got num_blocks={self.num_blocks}")
        if not self.owns_device:
            self._check_without_device()
        if self.partial_scan < 0 or not 0 <= self.free_share < 1:
            raise RangeError(
                f"partial_scan must be at least 0, and free_share must be in [0, 1), got {self.partial_scan} and "
                f"{self.free_share}"
            )
        if len(self.secret) > 64:
            raise RangeError(f"a secret has at most 64 bytes, got {len(self.secret)}")
        names = [store.name for store in self.stores]
        if names and self.host is None:
            raise ArgumentError(f"a cache with stores ({', '.join(names)}) needs a host tier for reads from the stores")
        if len({*names}) < len(names):
            raise ArgumentError(f"stores need different names, got {names}")

    def _check_without_device(self) -> None:
        if self.num_blocks or self.host is None or not self.prefix_caching:
            raise ArgumentError(
                f"with owns_device=False, a cache needs num_blocks=0, a host tier and prefix_caching=True, got "
                f"num_blocks={self.num_blocks}, host={self.host}, prefix_caching={self.prefix_caching}"
            )
        if self.host.saving.write is not WritePolicy.THROUGH or self.host.saving.blocks_per_second < math.inf:
            raise ArgumentError(
                f"with owns_device=False, the host tier needs the policy write_through without a rate limit, got "
                f"{self.host.saving.write.value} and {self.host.saving.blocks_per_second:g} blocks per second"
            )


class WritePolicy(Enum):
    """Condition for copying a block to a lower tier."""

    THROUGH = "write_through"
    """Copy a block as soon as it is in the tier above."""
    SELECTIVE = "write_through_selective"
    """Copy a block after it was reused `min_uses` times."""
    BACK = "write_back"
    """Copy blocks when few slots are free in the tier above. Blocks of requests that finished earlier come first."""


@dataclass(frozen=True, slots=True)
class WritebackConfig:
    """Write policy and limits for copies to a lower tier."""

    write: WritePolicy = WritePolicy.THROUGH
    min_uses: int = 1
    max_blocks: int = 256
    """Maximum number of blocks that are being saved at a time. Without this limit, saves would delay loads."""
    low_share: float = 0.25
    """With write_back, blocks are copied while less than this share of the tier above is free."""
    blocks_per_second: float = math.inf
    """Maximum average rate of saves."""

    def __post_init__(self) -> None:
        if self.max_blocks < 1 or self.min_uses < 1 or self.blocks_per_second <= 0:
            raise RangeError(
                f"max_blocks and min_uses must be at least 1, and blocks_per_second must be above 0, got "
                f"{self.max_blocks}, {self.min_uses} and {self.blocks_per_second}"
            )
        if not 0 <= self.low_share <= 1:
            raise RangeError(f"low_share must be in [0, 1], got {self.low_share}")


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Configuration of the host tier."""

    num_blocks: int
    policy: str = "lru"
    saving: WritebackConfig = field(default_factory=WritebackConfig)
    free_share: float = 0.0
    """Share of the host blocks to keep free by evicting blocks in advance. Leased blocks are not evicted."""
    exclusive: bool = True
    """If True, the host first evicts blocks that are also on the device. They are saved again when the device is about
    to evict them. If False, or if another engine owns the device blocks, the device does not affect host evictions."""
    ahead_share: float = 1 / 12
    """Number of blocks that an exclusive host tier saves before the device evicts them, as a share of the device
    blocks. The number is at most a quarter of the host blocks. With a low share, the device evicts some blocks before
    they are saved. With a high share, the copies evict other blocks from the host."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise RangeError(f"a host tier needs at least one block, got num_blocks={self.num_blocks}")
        if not 0 <= self.free_share < 1 or not 0 < self.ahead_share <= 1:
            raise RangeError(
                f"free_share must be in [0, 1), and ahead_share in (0, 1], got {self.free_share} and {self.ahead_share}"
            )


class WaitPolicy(Enum):
    """Limit on the time that a request waits for blocks from a store before it is scheduled."""

    BEST_EFFORT = "best_effort"
    """The request does not wait and uses only the blocks that have already arrived."""
    DEADLINE = "deadline"
    """The request waits at most `wait_seconds`."""
    WAIT = "wait"
    """The request waits until all blocks have arrived or failed."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Configuration of a store below the host tier."""

    name: str = "disk"
    saving: WritebackConfig = field(default_factory=WritebackConfig)
    wait: WaitPolicy = WaitPolicy.DEADLINE
    wait_seconds: float = 5.0
    is_shared: bool = False
    """True if other processes write to the store. In this case, each request looks up the blocks that memory lacks.
    Otherwise the keys in the store are listed once at the start, and later writes are recorded."""
    max_fetching_blocks: int = 1024
    """Maximum number of blocks in flight from the store. A fetch of more blocks starts when no other is in flight."""
    max_known: int = 1 << 22
    """Maximum number of recorded keys. A key takes about 150 bytes. A key that the store has evicted stays recorded
    until a lookup or a read does not find it. If the store is not shared, kvtier's engine lowers this limit to at most
    four times the number of blocks that fit in the store."""

    def __post_init__(self) -> None:
        if not self.name or self.name in ("device", "host"):
            raise RangeError(f"a store needs a name other than 'device' and 'host', got {self.name!r}")
        if self.wait_seconds < 0 or self.max_fetching_blocks < 1 or self.max_known < 1:
            raise RangeError(
                f"wait_seconds must be at least 0, and max_fetching_blocks and max_known must be at least 1, got "
                f"{self.wait_seconds}, {self.max_fetching_blocks} and {self.max_known}"
            )
