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
    """Blocks of the device tier."""
    prefix_caching: bool = True
    policy: str = "lru"
    host: HostConfig | None = None
    """A second tier in host memory."""
    stores: tuple[StoreConfig, ...] = ()
    """Further tiers below the host, the nearest first."""
    partial_scan: int = 8
    """Number of cached blocks to compare with the first missing block, to copy the longest common beginning."""
    free_share: float = 0.0
    """Evict from the device ahead of demand, so that this share of it is free."""
    always_load: bool = False
    """Load cached blocks even if computing them is expected to be faster."""
    secret: bytes = field(default=b"", repr=False)
    """Key for the token digests in stored blocks, at most 64 bytes. All engines that share a store need the same key.
    Without a key, anyone who can read the store can verify a guess of a prompt."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise RangeError(f"a cache needs at least one block, got num_blocks={self.num_blocks}")
        if self.partial_scan < 0 or not 0 <= self.free_share < 1:
            raise RangeError(
                f"partial_scan counts blocks and free_share is in [0, 1), got {self.partial_scan} and {self.free_share}"
            )
        if len(self.secret) > 64:
            raise RangeError(f"a secret has at most 64 bytes, got {len(self.secret)}")
        names = [store.name for store in self.stores]
        if names and self.host is None:
            raise ArgumentError(f"blocks come from {', '.join(names)} through host memory: give the cache a host tier")
        if len({*names}) < len(names):
            raise ArgumentError(f"stores need different names, got {names}")


class WritePolicy(Enum):
    """When a block is copied to a lower tier."""

    THROUGH = "write_through"
    """As soon as it is in the tier above."""
    SELECTIVE = "write_through_selective"
    """After it was used again `min_uses` times."""
    BACK = "write_back"
    """When the tier above runs low, in the order in which requests finished. A flush copies all blocks."""


@dataclass(frozen=True, slots=True)
class WritebackConfig:
    """Policy and limits of copies to a lower tier."""

    write: WritePolicy = WritePolicy.THROUGH
    min_uses: int = 1
    max_blocks: int = 256
    """Maximum number of blocks in flight, so that saves do not delay loads."""
    low_share: float = 0.25
    """For write_back: save when less than this share of the tier above is free."""
    blocks_per_second: float = math.inf
    """Bandwidth limit of saves."""

    def __post_init__(self) -> None:
        if self.max_blocks < 1 or self.min_uses < 1 or self.blocks_per_second <= 0:
            raise RangeError(
                f"saving needs max_blocks and min_uses of 1 or more and blocks_per_second above 0, got "
                f"{self.max_blocks}, {self.min_uses} and {self.blocks_per_second}"
            )
        if not 0 <= self.low_share <= 1:
            raise RangeError(f"low_share is in [0, 1], got {self.low_share}")


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The host tier."""

    num_blocks: int
    policy: str = "lru"
    saving: WritebackConfig = field(default_factory=WritebackConfig)
    free_share: float = 0.0
    """Evict ahead of demand, so that this share of the tier is free."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise RangeError(f"a host tier needs blocks, got {self.num_blocks}")
        if not 0 <= self.free_share < 1:
            raise RangeError(f"free_share is in [0, 1), got {self.free_share}")


class WaitPolicy(Enum):
    """How long a request waits for its blocks from a store before it is scheduled."""

    BEST_EFFORT = "best_effort"
    """Not at all: the request uses the blocks that have arrived."""
    DEADLINE = "deadline"
    """At most `wait_seconds`."""
    WAIT = "wait"
    """Until all blocks have arrived or failed."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A store below the host tier."""

    name: str = "disk"
    saving: WritebackConfig = field(default_factory=WritebackConfig)
    wait: WaitPolicy = WaitPolicy.DEADLINE
    wait_seconds: float = 5.0
    is_shared: bool = False
    """True if other processes write to the store. Then keys are looked up for each request. Otherwise the list of keys
    is read once, and later writes are recorded."""
    max_fetching_blocks: int = 1024
    """Maximum number of blocks in flight from the store."""
    max_known: int = 1 << 22
    """Maximum number of recorded keys, at about 150 bytes each. A limit is needed: the store evicts without notice."""

    def __post_init__(self) -> None:
        if not self.name or self.name in ("device", "host"):
            raise RangeError(f"a store needs a name that is not a memory's, got {self.name!r}")
        if self.wait_seconds < 0 or self.max_fetching_blocks < 1 or self.max_known < 1:
            raise RangeError(
                f"wait_seconds must be 0 or more, max_fetching_blocks and max_known 1 or more, got "
                f"{self.wait_seconds}, {self.max_fetching_blocks} and {self.max_known}"
            )
