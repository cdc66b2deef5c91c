"""A real subscriber receives events in vLLM's format."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest

from kvtier.errors import ArgumentError, ClosedError, StateError, UnavailableError
from kvtier.events import EventConfig, publish_events
from kvtier.index import BlocksRemoved, BlocksStored, IndexCleared
from kvtier.messages import KEY_BYTES

zmq = pytest.importorskip("zmq", reason="pip install 'kvtier[events]'")
msgspec = pytest.importorskip("msgspec", reason="pip install 'kvtier[events]'")

LOCAL = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
KEYS = [bytes([n]) * KEY_BYTES for n in range(8)]


class Stored(msgspec.Struct, tag="BlockStored"):
    """The fields that subscribers to vLLM decode. Fields without a default are required."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Message(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Receives the events of a publisher and requests missed events."""

    def __init__(self, publisher, topic: bytes = b"") -> None:
        self.context = zmq.Context()
        self.publisher, self.topic = publisher, topic
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(publisher.endpoint)
        self.socket.subscribe(topic)
        self.numbers: list[int] = []
        self._join()

    def _join(self) -> None:
        """Publish marker events until one arrives, then receive all messages up to the last marker.

        A subscriber does not receive messages that were sent before it subscribed.
        """
        mark = 1 << 32
        while not self.socket.poll(20):
            mark += 1
            self.publisher(BlocksRemoved("marks", mark.to_bytes(KEY_BYTES, "big")))
        while self.receive()[-1].block_hashes[0] not in (mark, mark.to_bytes(KEY_BYTES, "big")):
            pass

    def receive(self) -> list[object]:
        assert self.socket.poll(10_000), "nothing was published"
        topic, number, payload = self.socket.recv_multipart()
        assert topic == self.topic
        self.numbers.append(int.from_bytes(number, "big"))
        return msgspec.msgpack.decode(payload, type=Message).events

    def take(self, count: int) -> list[object]:
        events: list[object] = []
        while len(events) < count:
            events += self.receive()
        return events

    def replay(self, first: int) -> list[tuple[int, list[object]]]:
        socket = self.context.socket(zmq.DEALER)
        socket.connect(self.publisher.replay_endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert socket.poll(10_000), "no reply"
            _, topic, number, payload = socket.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                socket.close()
                return found
            assert topic == self.topic
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Message).events))

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextlib.contextmanager
def subscribed(topic: str = "", **options):
    with (
        contextlib.closing(publish_events(EventConfig(**LOCAL, topic=topic, **options))) as publisher,
        contextlib.closing(Subscriber(publisher, topic.encode())) as subscriber,
    ):
        yield publisher, subscriber


def tokens(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def test_events_arrive_in_order_in_vllm_format():
    with subscribed() as (publisher, subscriber):
        publisher(BlocksStored("device", KEYS[0], KEYS[1] + KEYS[2], tokens(5, 6, 7, 8), is_first=True))
        publisher(BlocksStored("host", KEYS[2], KEYS[3], tokens(9, 10)))
        publisher(BlocksRemoved("disk", KEYS[1] + KEYS[2]))
        publisher(BlocksRemoved("shared", KEYS[3]))
        publisher(IndexCleared())
        assert subscriber.take(5) == [
            Stored(
                [0x0101010101010101, 0x0202020202020202], None, [5, 6, 7, 8], 2, None, "GPU", None, None, 0, "LOCAL"
            ),
            Stored([0x0303030303030303], 0x0202020202020202, [9, 10], 2, None, "CPU", None, None, 0, "LOCAL"),
            Removed([0x0101010101010101, 0x0202020202020202], "STORAGE", 0, "LOCAL", "disk"),
            Removed([0x0303030303030303], "STORAGE", 0, "REMOTE", "shared"),
            Cleared(),
        ]


@pytest.mark.parametrize(
    ("salt", "adapter", "name", "extra_keys"),
    [
        (b"", b"", None, None),
        (b"\0pepper", b"", None, [("pepper",), None]),
        (b"shop\0pepper", b"", None, [("shop\0pepper",), None]),
        (b"", b"french\0digest", "french", [("french",), ("french",)]),
        (b"shop\0", b"french\0digest", "french", [("french", "shop\0"), ("french",)]),
        (b"\xff", b"", None, [("\\xff",), None]),
    ],
)
def test_stored_event_has_salt_and_adapter_as_extra_keys(salt, adapter, name, extra_keys):
    with subscribed() as (publisher, subscriber):
        publisher(BlocksStored("device", KEYS[0], KEYS[1] + KEYS[2], tokens(5, 6), True, salt, adapter))
        publisher(BlocksStored("device", KEYS[2], KEYS[3], tokens(7), False, salt, adapter))
        first, second = subscriber.take(2)
        assert (first.lora_name, first.extra_keys) == (name, extra_keys)
        assert second.extra_keys == (None if name is None else [(name,)])  # the salt is in the first block only


def test_events_can_contain_full_keys_and_omit_token_ids():
    with subscribed(int_hashes=False, token_ids=False) as (publisher, subscriber):
        publisher(BlocksStored("device", KEYS[0], KEYS[1], tokens(5, 6, 7)))
        assert subscriber.take(1) == [Stored([KEYS[1]], KEYS[0], [], 3, None, "GPU", None, None, 0, "LOCAL")]


def test_sequence_numbers_are_consecutive():
    with subscribed("kv-events") as (publisher, subscriber):
        for _ in range(50):
            publisher(IndexCleared())
        subscriber.take(50)
        assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[0] + len(subscriber.numbers)))


def test_missed_events_are_replayed():
    with subscribed() as (publisher, subscriber):
        subscriber.socket.unsubscribe(b"")
        for number in range(1, 7):
            publisher(BlocksRemoved("device", KEYS[number]))
        expected = [Removed([int.from_bytes(KEYS[n][-8:], "big")], "GPU", 0, "LOCAL") for n in range(1, 7)]
        known = subscriber.numbers[-1] + 1
        replayed: list[tuple[int, list[object]]] = []
        while sum(len(events) for _, events in replayed) < 6:  # the publisher thread can still be sending
            replayed = subscriber.replay(known)
        assert [event for _, events in replayed for event in events] == expected
        assert [number for number, _ in replayed] == list(range(known, known + len(replayed)))
        assert subscriber.replay(known + 1000) == []


def test_replay_of_discarded_messages_starts_with_a_snapshot():
    with subscribed(num_kept=2, int_hashes=False) as (publisher, subscriber):
        publisher(BlocksStored("device", KEYS[0], KEYS[5], tokens(5, 5), is_first=True))
        publisher(IndexCleared())
        publisher(BlocksStored("host", KEYS[1], KEYS[2], tokens(7, 8)))  # published before its parent
        publisher(BlocksStored("device", KEYS[0], KEYS[1] + KEYS[3], tokens(5, 6, 3, 3), True, b"\0salt"))
        publisher(BlocksRemoved("device", KEYS[3]))
        subscriber.take(5)
        for _ in range(2):
            publisher(BlocksRemoved("device", KEYS[4]))
            subscriber.take(1)
        replayed = subscriber.replay(0)
        assert [number for number, _ in replayed] == list(range(subscriber.numbers[-1] - 2, subscriber.numbers[-1] + 1))
        assert replayed[0][1] == [
            Cleared(),
            Stored([KEYS[1]], None, [5, 6], 2, None, "GPU", None, [("salt",)], 0, "LOCAL"),
            Stored([KEYS[2]], KEYS[1], [7, 8], 2, None, "CPU", None, None, 0, "LOCAL"),
        ]
        assert [len(events) for _, events in replayed[1:]] == [1, 1]
        kept = subscriber.numbers[-2]
        assert [number for number, _ in subscriber.replay(kept)] == [kept, kept + 1]


def test_new_publisher_continues_above_earlier_numbers():
    """A subscriber that outlives the publisher finds a gap in the numbers. Its replay begins with AllBlocksCleared."""
    with subscribed() as (publisher, subscriber):
        publisher(BlocksStored("device", KEYS[0], KEYS[1], tokens(5, 6), is_first=True))
        subscriber.take(1)
        last = subscriber.numbers[-1]
    with subscribed() as (_, later):
        (number, events), *_ = later.replay(last + 1)
        assert last < number < later.numbers[0]
        assert events == [Cleared()]


def test_dropped_events_are_replaced_by_all_blocks_cleared():
    with subscribed(max_queued=3) as (publisher, subscriber):
        while not publisher.num_dropped:
            publisher(BlocksRemoved("device", KEYS[1]))
        num_dropped = publisher.num_dropped
        messages: list[tuple[int, list[object]]] = []
        while Cleared() not in (events := [event for _, events in messages for event in events]):
            publisher(BlocksRemoved("device", KEYS[2]))  # dropped until the queue has a free place
            messages = subscriber.replay(subscriber.numbers[0])
        after = events[events.index(Cleared()) + 1]
        assert after == Removed([int.from_bytes(KEYS[2][-8:], "big")], "GPU", 0, "LOCAL")
        assert publisher.num_dropped >= num_dropped > 0
        numbers = [number for number, _ in messages]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_malformed_replay_request_is_ignored():
    with subscribed() as (publisher, subscriber):
        socket = subscriber.context.socket(zmq.DEALER)
        socket.connect(publisher.replay_endpoint)
        for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"]):
            socket.send_multipart(frames)
        assert subscriber.replay(subscriber.numbers[-1] + 1) == []


def test_close_sends_queued_events():
    publisher = publish_events(EventConfig(**LOCAL))
    with contextlib.closing(Subscriber(publisher)) as subscriber:
        for number in range(1, 8):
            publisher(BlocksRemoved("host", KEYS[number]))
        publisher.close()
        publisher.close()
        assert len(subscriber.take(7)) == 7
    with pytest.raises(ClosedError):
        publisher(IndexCleared())


def test_blocks_rebuilt_from_events_match_the_tree():
    """Run requests on a tree that evicts blocks, and rebuild its set of blocks from the events.

    For each prompt of two blocks, the tree and the rebuilt set must contain the same prefix.
    """
    from index_cases import chain_of, matched, run, tree_of

    with subscribed(int_hashes=False) as (publisher, subscriber):
        tree = tree_of(8, listener=publisher)
        known: dict[bytes, bytes | None] = {}
        rng = np.random.default_rng(0)
        for _ in range(60):
            run(tree, *rng.integers(1, 4, rng.integers(1, 5)).tolist())
        publisher(IndexCleared())
        events: list[object] = []
        while not (events and isinstance(events[-1], Cleared)):
            events += subscriber.receive()
        for event in events[:-1]:
            if isinstance(event, Stored):
                above = event.parent_block_hash
                for key in event.block_hashes:
                    assert above is None or above in known, "the parent of a block is unknown"
                    known[key], above = above, key
            else:
                for key in event.block_hashes:
                    del known[key]
        for first in range(1, 4):
            for second in range(1, 4):
                keys = chain_of(first, second).keys()
                known_blocks = [keys[at : at + KEY_BYTES] in known for at in range(0, len(keys), KEY_BYTES)]
                assert (known_blocks.index(False) if False in known_blocks else len(known_blocks)) == matched(
                    tree, first, second
                )


def test_invalid_config_or_missing_extra_for_events_raises(monkeypatch):
    with contextlib.closing(publish_events(EventConfig(**LOCAL))) as publisher:
        with pytest.raises(StateError, match="choose free addresses"):
            publish_events(EventConfig(publisher.endpoint))
        with pytest.raises(StateError, match="cannot publish events"):
            publish_events(EventConfig("nonsense"))
    with pytest.raises(ArgumentError):
        EventConfig(num_kept=0)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "kvtier.events.publisher")
    with pytest.raises(UnavailableError, match=r"pip install 'kvtier\[events\]'"):
        publish_events(EventConfig())
