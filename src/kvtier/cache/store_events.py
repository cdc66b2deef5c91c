"""StoreEvents: events about the blocks in a store."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.cache.in_flight import Mask, mask_runs
from kvtier.index import BlocksRemoved, Lease, Listener, Namespace
from kvtier.index.events import stored_event
from kvtier.index.transitions import path_parts
from kvtier.messages import split_keys


class StoreEvents:
    """Reports the blocks that this cache wrote to a store, and the removal of these blocks.

    Blocks that an earlier process wrote are not reported, because their tokens are unknown. A store evicts blocks
    without notice, so an eviction is reported only when a lookup does not find the block. A block is also reported as
    removed when StoreIndex forgets its key.
    """

    def __init__(self, name: str, listener: Listener) -> None:
        self._name, self._listener = name, listener
        self._reported: set[bytes] = set()

    def written(self, lease: Lease, first: int, written: Mask, namespace: Namespace) -> None:
        """Report a path's written blocks that the tree still has, parents first. The mask starts at block `first`."""
        for start, stop in mask_runs(written, first):
            for node, low, high, _ in reversed(path_parts(lease, start, stop - start)):
                if not node.attached:  # removed from the tree after the write began
                    continue
                event = stored_event(self._name, node, low, high, namespace)
                keys = split_keys(event.keys)
                if self._reported.isdisjoint(keys):  # do not report a key twice
                    self._reported.update(keys)
                    self._listener(event)

    def removed(self, keys: Iterable[bytes]) -> None:
        """Report the removal of those blocks whose write was reported."""
        gone = [key for key in keys if key in self._reported]
        if gone:
            self._reported.difference_update(gone)
            self._listener(BlocksRemoved(self._name, b"".join(gone)))

    def removed_all(self) -> None:
        self.removed(list(self._reported))

    def reset(self) -> None:
        """Forget all reports, because an IndexCleared event was sent."""
        self._reported.clear()
