"""What routers want to know: which blocks came, which went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became readable in a tier. Keys are 32 bytes each, in path order; `parent` is the key above them."""

    tier: str
    parent: bytes
    keys: bytes
    token_bytes: bytes
    is_first: bool = False
    """Whether `parent` is a root, which is no block."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that were readable left a tier."""

    tier: str
    keys: bytes


@dataclass(frozen=True, slots=True)
class IndexCleared:
    """Everything left every tier."""


Event = BlocksStored | BlocksRemoved | IndexCleared
Listener = Callable[[Event], None]
