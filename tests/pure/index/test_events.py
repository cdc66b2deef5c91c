"""Events of the index. A router rebuilds the contents of the index from these events."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from index_cases import BLOCK, NAMESPACE, begin, chain_of, copy_down, matched, path_of, remove, run, tokens_of, tree_of
from kvtier.index import BlocksRemoved, BlocksStored, Chain, Event, IndexCleared, RadixTree, transitions
from kvtier.messages import KEY_BYTES


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def keys_of(*blocks: int, **options) -> list[bytes]:
    return split(chain_of(*blocks, **options).keys())


def token_bytes(*blocks: int) -> bytes:
    return np.array(tokens_of(blocks), "<i4").tobytes()


class Router:
    """Receives all events of an index and rebuilds the contents of the index."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.present: dict[str, dict[bytes, tuple[bytes, bytes]]] = {}
        """Parent key and tokens of every block, by tier and key."""

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, IndexCleared):
            self.present.clear()
        elif isinstance(event, BlocksStored):
            above, keys = event.parent, split(event.keys)
            width = len(event.token_bytes) // len(keys)
            for number, key in enumerate(keys):
                assert key not in self.present.setdefault(event.tier, {})
                self.present[event.tier][key] = (above, event.token_bytes[number * width : (number + 1) * width])
                above = key
        else:
            for key in split(event.keys):
                del self.present[event.tier][key]

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def matched(self, chain: Chain, tier: str) -> int:
        """Return how many leading blocks of a chain are in a tier. Look up each block by parent key and tokens."""
        above, found = chain.namespace.root_key(chain.salt, chain.adapter), 0
        below = {content: key for key, content in self.present.get(tier, {}).items()}
        while found < chain.num_blocks and (above, chain.label(found)) in below:
            above = below[above, chain.label(found)]
            found += 1
        return found


def tree_and_router() -> tuple[RadixTree, Router]:
    router = Router()
    return tree_of(16, 16, listener=router), router


ROOT = NAMESPACE.root_key()


def test_stored_event_contains_parent_keys_and_tokens():
    tree, router = tree_and_router()
    run(tree, 1, 2)
    one, two = keys_of(1, 2)
    assert router.take() == [BlocksStored("device", ROOT, one + two, token_bytes(1, 2), is_first=True)]
    run(tree, 1, 2, 3)
    assert router.take() == [BlocksStored("device", two, keys_of(1, 2, 3)[2], token_bytes(3))]
    run(tree, 1, 9)
    assert router.take() == [BlocksStored("device", one, keys_of(1, 9)[1], token_bytes(9))]


def test_extended_request_publishes_only_new_blocks():
    tree, router = tree_and_router()
    lease = begin(tree, 1)
    tree.publish(lease, BLOCK)
    router.take()
    lease.chain.append([2] * BLOCK)
    tree.allocate(lease, 1)
    tree.publish(lease, 2 * BLOCK)
    one, two = keys_of(1, 2)
    assert router.take() == [BlocksStored("device", one, two, token_bytes(2))]


def test_matched_or_duplicate_block_publishes_no_event():
    tree, router = tree_and_router()
    first, second = begin(tree, 1, 2, 3), begin(tree, 1, 2, 3)
    tree.publish(first, 3 * BLOCK)
    assert len(router.take()) == 1
    tree.publish(second, 3 * BLOCK)
    tree.release(first)
    tree.release(second)
    assert matched(tree, 1) == 1
    run(tree, 1, 2)
    assert router.take() == []


def test_event_keys_differ_by_salt_and_adapter():
    tree, router = tree_and_router()
    run(tree, 1, salt=b"a")
    run(tree, 1, adapter=b"a")
    assert [event.keys for event in router.take()] == [keys_of(1, salt=b"a")[0], keys_of(1, adapter=b"a")[0]]


def test_eviction_publishes_removed_event():
    tree, router = tree_and_router()
    run(tree, 1, 2, 3)
    router.take()
    tree.evict(tree.tiers[0], 2)
    assert router.take() == [BlocksRemoved("device", b"".join(keys_of(1, 2, 3)[1:]))]


def test_drop_publishes_removed_event_before_lease_ends():
    tree, router = tree_and_router()
    run(tree, 1, 2, 3)
    lease = tree.match(chain_of(1, 2, 3))
    router.take()
    tree.drop(chain_of(1, 2, 3), first=2)
    assert router.take() == [BlocksRemoved("device", keys_of(1, 2, 3)[2])]
    tree.release(lease)
    assert router.take() == []


def test_each_tier_publishes_its_own_events():
    tree, router = tree_and_router()
    lease = begin(tree, 1, 2)
    tree.publish(lease, 2 * BLOCK)
    one, two = keys_of(1, 2)
    router.take()
    copy_down(tree, lease, 1)
    assert router.take() == [BlocksStored("host", ROOT, one + two, token_bytes(1, 2), is_first=True)]
    remove(tree, lease, tree.tiers[0], 1, 1)
    assert router.take() == [BlocksRemoved("device", two)]
    tree.release(lease)
    tree.evict(tree.tiers[1], 1)
    assert router.take() == [BlocksRemoved("host", two)]


def test_failed_or_dropped_copy_publishes_no_stored_event():
    tree, router = tree_and_router()
    lease = begin(tree, 1)
    tree.publish(lease, BLOCK)
    router.take()
    transitions.begin_write(lease, tree.tiers[1], 0, tree.reserve(tree.tiers[1], 1))
    transitions.end_write(tree, lease, tree.tiers[1], 0, 1, ok=False)
    transitions.begin_write(lease, tree.tiers[1], 0, tree.reserve(tree.tiers[1], 1))
    assert router.take() == []
    tree.drop(chain_of(1))
    assert router.take() == [BlocksRemoved("device", keys_of(1)[0])]
    transitions.end_write(tree, lease, tree.tiers[1], 0, 1, ok=True)
    tree.release(lease)
    assert router.take() == []


def test_recomputing_host_block_publishes_device_event():
    tree, router = tree_and_router()
    lease = begin(tree, 1)
    tree.publish(lease, BLOCK)
    copy_down(tree, lease, 1)
    tree.release(lease)
    tree.evict(tree.tiers[0], 1)
    router.take()
    second = tree.match(chain_of(1), max_blocks=0)
    tree.allocate(second, 1)
    tree.publish(second, BLOCK)
    assert router.take() == [BlocksStored("device", ROOT, keys_of(1)[0], token_bytes(1), is_first=True)]


def test_reset_publishes_cleared_event_last():
    tree, router = tree_and_router()
    run(tree, 1)
    tree.reset()
    assert router.take()[-1] == IndexCleared()
    assert router.present == {}


@given(
    st.lists(
        st.tuples(st.sampled_from(["run", "store", "evict", "drop", "reset"]), st.lists(st.integers(0, 1), max_size=5)),
        max_size=30,
    )
)
@settings(max_examples=80, deadline=None)
def test_router_that_applies_events_matches_tree(actions):
    tree, router = tree_and_router()
    seen = []
    for action, blocks in actions:
        seen.append(blocks)
        if action == "run":
            run(tree, *blocks)
        elif action == "store":
            run(tree, *blocks)
            lease = tree.match(chain_of(*blocks))
            missing = [i for i in range(lease.num_blocks) if not holds(lease, 1, i)]
            for number in missing:
                copy_down(tree, lease, 1, number, 1)
            tree.release(lease)
        elif action == "evict":
            tier = tree.tiers[len(blocks) % 2]
            tree.evict(tier, min(len(blocks), tier.num_evictable))
        elif action == "drop":
            tree.drop(chain_of(*blocks), first=len(blocks) // 2)
        elif not blocks:
            tree.reset()
        for each in seen:
            found = max(router.matched(chain_of(*each), tier) for tier in ("device", "host"))
            assert found <= matched(tree, *each)  # the tree also matches a path whose blocks are in different tiers
        held = {
            name: sum(n.held[t] is not None and n.held[t].num_held for n in tree.nodes())
            for t, name in enumerate(["device", "host"])
        }
        assert {name: len(router.present.get(name, {})) for name in held} == held
    for each in seen:
        chain = chain_of(*each)
        lease = tree.match(chain)
        tiers = path_of(lease).tiers.tolist()
        assert all(
            key in router.present[("device", "host")[t]] for key, t in zip(split(chain.keys()), tiers, strict=False)
        )
        tree.release(lease)


def holds(lease, number: int, block: int) -> bool:
    """True if tier `number` holds this block of the lease."""
    node = lease.node
    while node.start > block:
        node = node.parent
    held = node.held[number]
    return held is not None and held.states[block - node.start] != 0
