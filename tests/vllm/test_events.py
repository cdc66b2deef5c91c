"""vLLM's own structs decode the events of kvtier, and vLLM's own publisher sends the same frames."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from event_support import Router, contents_of, free_address, replayed, without_empty
from index_cases import begin, copy_down, run, tree_of
from kvtier.events import EventConfig, publish_events

kv_events = pytest.importorskip("vllm.distributed.kv_events", reason="make vllm")
import msgspec  # noqa: E402

pytestmark = pytest.mark.vllm_ci
LOCAL = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


def rebuilt(batches: list) -> dict[str, dict[bytes, tuple]]:
    """Apply batches of vLLM's event structs. Return the resulting blocks by medium and hash."""
    blocks: dict[str, dict[bytes, tuple]] = {}
    for event in (event for batch in batches for event in batch.events):
        match event:
            case kv_events.AllBlocksCleared():
                blocks.clear()
            case kv_events.BlockRemoved():
                assert (event.group_idx, event.locality) == (0, "LOCAL")
                for name in event.block_hashes:
                    del blocks[event.medium][name]
            case kv_events.BlockStored():
                assert (event.group_idx, event.locality, event.lora_name) == (0, "LOCAL", None)
                above, size = event.parent_block_hash, event.block_size
                extra = event.extra_keys or [None] * len(event.block_hashes)
                for place, (name, keys) in enumerate(zip(event.block_hashes, extra, strict=True)):
                    tokens = tuple(event.token_ids[place * size : (place + 1) * size])
                    blocks.setdefault(event.medium, {})[name] = above, tokens, list(keys) if keys else None
                    above = name
    return {medium: each for medium, each in blocks.items() if each}


@pytest.mark.parametrize("num_kept", [10_000, 5])
def test_vllm_structs_decode_events_of_kvtier(num_kept):
    config = EventConfig(**LOCAL, int_hashes=False, num_kept=num_kept)
    with contextlib.closing(publish_events(config)) as publisher:
        tree = tree_of(12, 24, listener=publisher)
        rng = np.random.default_rng(0)
        for number in range(300):
            salt = (b"", b"\0pepper", b"shop\0")[number % 3]
            run(tree, *rng.integers(1, 4, rng.integers(1, 6)).tolist(), salt=salt)
        lease = begin(tree, 7, 8, salt=b"\0pepper")
        tree.publish(lease, lease.chain.num_tokens, now=0.0)
        copy_down(tree, lease, 1)
        tree.release(lease, now=0.0)
        with contextlib.closing(Router(publisher.endpoint, publisher.replay_endpoint)) as router:
            while without_empty(router.blocks) != contents_of(tree):  # the publisher's thread may still be sending
                router.catch_up()
        messages = replayed(publisher.replay_endpoint, 0)
    decoder = msgspec.msgpack.Decoder(kv_events.KVEventBatch)
    batches = [decoder.decode(payload) for _, payload in messages]
    assert rebuilt(batches) == contents_of(tree)
    assert {batch.data_parallel_rank for batch in batches} == {0}
    kinds = {type(event) for batch in batches for event in batch.events}
    assert {kv_events.BlockStored, kv_events.AllBlocksCleared} <= kinds
    assert (kv_events.BlockRemoved in kinds) or num_kept == 5


def test_vllm_structs_keep_all_fields_of_events():
    """Decoding with vLLM's structs and encoding again keeps every field that kvtier sets."""
    with contextlib.closing(publish_events(EventConfig(**LOCAL))) as publisher:
        tree = tree_of(4, listener=publisher)
        for block in range(1, 9):
            run(tree, block, salt=b"\0pepper")
        messages: list[tuple[int, bytes]] = []
        # 1 clear event, 8 stored blocks, 4 removed blocks
        while sum(len(msgspec.msgpack.decode(payload)[1]) for _, payload in messages) < 13:
            messages = replayed(publisher.replay_endpoint, 0)
    for _, payload in messages:
        batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
        ours, theirs = (msgspec.msgpack.decode(data)[1] for data in (payload, msgspec.msgpack.encode(batch)))
        for mine, other in zip(ours, theirs, strict=True):
            assert {key: value for key, value in mine.items() if value is not None} == {
                key: value for key, value in other.items() if value is not None
            }


def test_router_reads_frames_of_vllm_publisher():
    """The Router, which reads kvtier's events, also reads the events of vLLM's own publisher."""
    addresses = free_address(), free_address()
    theirs = kv_events.ZmqEventPublisher(0, addresses[0].replace("127.0.0.1", "*"), addresses[1])
    try:
        stored = kv_events.BlockStored([11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None, [("pepper",), None])
        theirs.publish(kv_events.KVEventBatch(0.0, [stored]))
        with contextlib.closing(Router(*addresses)) as router:
            while not router.blocks:
                router.catch_up()
            assert router.blocks == {"GPU": {11: (None, (1, 2), ["pepper"]), 12: (11, (3, 4), None)}}
    finally:
        theirs.shutdown()
