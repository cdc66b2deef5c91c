"""The router reads events in vLLM's format. It computes kvtier's block hashes from the tokens in the events."""

from __future__ import annotations

import msgspec

from kvtier.index import Chain, Namespace
from kvtier.router import EventBatch, ForeignKeys, PlacementIndex, ReplicaFeed, hashes_of

NAMESPACE = Namespace("model", block_tokens=4)


def test_router_finds_blocks_in_events_of_vllm():
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    tokens, hashes = list(range(12)), [bytes([number]) * 32 for number in (7, 8, 9)]
    first = BlockStored(hashes[:2], None, tokens[:8], 4, None, "GPU", None)
    second = BlockStored(hashes[2:], hashes[1], tokens[8:], 4, None, "GPU", None)
    host = BlockStored(hashes[:1], None, tokens[:4], 4, None, "CPU", None)
    keys, index = ForeignKeys(NAMESPACE), PlacementIndex(4, 1)
    feed, prompt = ReplicaFeed(index, 0), hashes_of(Chain(NAMESPACE, tokens).keys())

    def send(*events):
        time, maps, _ = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(float(send.number), events, 0)))
        feed.apply(keys.convert(EventBatch(send.number, time, maps)))
        send.number += 1

    send.number = 0
    send(first, second, host)  # a block on the device and on the host counts only for the device
    assert index.match(prompt)[:2, 0].tolist() == [3, 0]
    send(BlockRemoved(hashes[:1], "GPU"))
    assert index.match(prompt)[:2, 0].tolist() == [2, 1]
    send(AllBlocksCleared())
    assert not index.match(prompt).any()
    assert (keys.num_skipped, feed.num_malformed) == (0, 0)
