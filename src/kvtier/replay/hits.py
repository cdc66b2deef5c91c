"""What a cache of blocks would have hit: a trace through the real index, one request at a time and without a clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.index import BlockPool, Chain, GhostCache, Namespace, RadixTree, Shortage, Tier, make_policy
from kvtier.replay.trace import TraceRequest

Paths = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class HitReport:
    """Hits are full blocks of the unbroken leading run. A request larger than the pool is counted and not cached."""

    num_requests: int
    num_blocks: int
    num_hits: int
    num_too_large: int

    @property
    def hit_rate(self) -> float:
        """Of full blocks."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


def replay_hits(
    requests: Iterable[TraceRequest],
    *,
    block_tokens: int,
    num_slots: int,
    policy: str = "lru",
    ghost: GhostCache | None = None,
) -> HitReport:
    """Each request matches, gets its slots, is computed, published and done before the next one comes."""
    prompts = (request.tokens() for request in requests)
    return _replay(prompts, Namespace("replay", block_tokens=block_tokens), num_slots, policy, ghost)


def replay_paths(requests: Iterable[Paths], *, num_slots: int, policy: str = "lru") -> HitReport:
    """The same for requests given as a number for each block: one token stands for a block, so it takes no memory."""
    return _replay(requests, Namespace("replay", block_tokens=1), num_slots, policy, None)


def _replay(
    prompts: Iterable[np.ndarray[Any, Any]],
    namespace: Namespace,
    num_slots: int,
    policy: str,
    ghost: GhostCache | None,
) -> HitReport:
    tree = RadixTree(namespace, [Tier(0, BlockPool("device", num_slots), lambda: make_policy(policy))], ghost=ghost)
    num_requests = num_blocks = num_hits = num_too_large = 0
    for num_requests, prompt in enumerate(prompts, 1):  # noqa: B007 - the count is reported
        chain = Chain(namespace, prompt)
        lease = tree.match(chain)
        num_blocks += chain.num_blocks
        num_hits += lease.num_matched
        is_too_large = isinstance(tree.allocate(lease, chain.num_blocks - lease.num_blocks), Shortage)
        num_too_large += is_too_large
        if not is_too_large:
            tree.publish(lease, chain.num_tokens)
        tree.release(lease, used=not is_too_large)  # as a scheduler does that refuses it
    return HitReport(num_requests, num_blocks, num_hits, num_too_large)
