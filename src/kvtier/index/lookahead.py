"""Lookahead: chooses the next victims of a tier early, so that they can be saved before they are evicted.

    policy ──pull──> queue [ n1 n2 n3 ] ──victim──> evicted
      ^                │           ^
      │                │ leased    │ lease ended, not used
      └── used again ──┴───────────┘

The queue contains the nodes that will be evicted next. A node leaves the queue while it is leased. If the lease counts
as a use, the node returns to the policy. Otherwise, for example after the transfer that saved the node, it returns to
the queue.
"""

from __future__ import annotations

from kvtier.errors import StateError
from kvtier.index.node import Node
from kvtier.index.policies import Policy


class Lookahead:
    """Wraps a policy and evicts the nodes in its queue first. `num_blocks` is the sum of the numbers in `queue`."""

    __slots__ = ("_leased", "_policy", "_tier", "name", "num_blocks", "queue")

    def __init__(self, policy: Policy, tier: int) -> None:
        self.name = policy.name
        self.queue: dict[Node, int] = {}
        """Node -> number of blocks of the node in the tier, at the last count."""
        self.num_blocks = 0
        self._policy, self._tier = policy, tier
        self._leased: dict[Node, int] = {}
        """Node that left the queue because it was leased -> logical time of its last use at that moment."""

    def offer(self, node: Node) -> None:
        if node in self.queue:
            return
        if self._leased and self._leased.pop(node, None) == node.usage.used:
            self._count(node)
        else:
            self._policy.offer(node)

    def withdraw(self, node: Node) -> None:
        count = self.queue.pop(node, None)
        if count is None:
            self._policy.withdraw(node)
            return
        self.num_blocks -= count
        if node.leases:
            self._leased[node] = node.usage.used
            if len(self._leased) > 64 + 2 * len(self.queue):  # drop nodes that cannot return
                self._leased = {node: used for node, used in self._leased.items() if node.leases and node.attached}

    def __contains__(self, node: Node) -> bool:
        return node in self.queue or node in self._policy

    def victim(self) -> Node | None:
        for node in self.queue:
            return node
        return self._policy.victim()

    def pull(self, num_blocks: int) -> list[Node]:
        """Fill the queue to `num_blocks` blocks with victims of the policy, if possible. Return these victims."""
        for node in self.queue:  # only the first node loses blocks by eviction, so count it again
            self._count(node)
            break
        pulled: list[Node] = []
        while self.num_blocks < num_blocks:
            victim = self._policy.victim()
            if victim is None:
                break
            self._policy.withdraw(victim)
            self._count(victim)
            pulled.append(victim)
        return pulled

    def check(self) -> None:
        """Raise StateError if the queue has a node that cannot be evicted, or if blocks are counted wrongly."""
        if self.num_blocks != sum(self.queue.values()):
            raise StateError(
                f"{self.num_blocks} blocks counted in the queue, but its nodes have {sum(self.queue.values())}"
            )
        for node, count in self.queue.items():
            held = node.held[self._tier]
            if node.leases or not node.attached or held is None or held.num_held > count:
                raise StateError(
                    f"a node is in the queue with {count} blocks, but has {node.leases} leases and "
                    f"{0 if held is None else held.num_held} blocks in the tier (in the tree: {node.attached})"
                )

    def _count(self, node: Node) -> None:
        """Count the blocks of a node in the tier, and store the count in `queue`. Append the node if it is new."""
        held = node.held[self._tier]
        count = held.num_held if held is not None else 0
        self.num_blocks += count - self.queue.get(node, 0)
        self.queue[node] = count
