"""What a cache of blocks would have hit: a trace through the real index, one request at a time and without a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.index import BlockPool, Chain, GhostCache, Namespace, RadixTree, Shortage, Tier, make_policy
from kvtier.replay.trace import TraceRequest


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
    progress: Callable[[int], None] | None = None,
) -> HitReport:
    """Each request matches, gets its slots, is computed, published and done before the next one comes."""
    namespace = Namespace("replay", block_tokens=block_tokens)
    tree = RadixTree(namespace, [Tier(0, BlockPool("device", num_slots), lambda: make_policy(policy))], ghost=ghost)
    num_requests = num_blocks = num_hits = num_too_large = 0
    for num_requests, request in enumerate(requests, 1):
        chain = Chain(namespace, request.tokens())
        lease = tree.match(chain)
        num_blocks += chain.num_blocks
        num_hits += lease.num_matched
        if isinstance(tree.allocate(lease, chain.num_blocks - lease.num_blocks), Shortage):
            num_too_large += 1
        else:
            tree.publish(lease, chain.num_tokens)
        tree.release(lease)
        if progress is not None:
            progress(num_requests)
    return HitReport(num_requests, num_blocks, num_hits, num_too_large)
