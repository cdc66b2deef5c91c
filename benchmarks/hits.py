"""Replay a trace through the index, one request at a time."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.index import BlockPool, Chain, GhostCache, Namespace, RadixTree, Shortage, Tier, make_policy
from kvtier.replay import HitPoint, TraceRequest


def replay_hits(
    requests: Iterable[TraceRequest],
    *,
    block_tokens: int,
    num_slots: int,
    policy: str = "lru",
    ghost: GhostCache | None = None,
) -> HitPoint:
    """Match, allocate, publish and release each request in turn. Requests larger than the pool are not cached."""
    namespace = Namespace("replay", block_tokens=block_tokens)
    tree = RadixTree(namespace, [Tier(0, BlockPool("device", num_slots), lambda: make_policy(policy))], ghost=ghost)
    num_blocks = num_hits = 0
    for request in requests:
        chain = Chain(namespace, request.tokens())
        now = request.timestamp_ms / 1000
        lease = tree.match(chain, now=now)
        num_blocks += chain.num_blocks
        num_hits += lease.num_matched
        is_cached = not isinstance(tree.allocate(lease, chain.num_blocks - lease.num_blocks), Shortage)
        if is_cached:
            tree.publish(lease, chain.num_tokens, now=now)
        tree.release(lease, used=is_cached, now=now, outcome=request.outcome)
    return HitPoint(policy, num_slots, num_blocks, num_hits)
