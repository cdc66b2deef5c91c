"""Compare a remote store with a dictionary, while two clients use the store and objects are damaged or expire."""

from __future__ import annotations

import os
import uuid

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.storage import ObjectStatus, RemoteStore
from kvtier.storage.cipher import Cipher
from kvtier.storage.remote.envelope import Envelope
from storage_support import Clock, all_keys, get, has, key_of, payload_of, put

NUMBERS = st.integers(0, 5)
TTL_S = 100


def make_machine(port: int) -> type[RuleBasedStateMachine]:
    import redis

    from kvtier.storage.remote.redis import RedisBucket

    raw = redis.Redis(port=port)

    class Machine(RuleBasedStateMachine):
        """`stored` maps the number of an object to (version, expiry time, True if damaged)."""

        @initialize(is_sealed=st.booleans(), ttl_s=st.sampled_from([None, TTL_S]))
        def open(self, is_sealed, ttl_s):
            self.prefix, self.clock, self.ttl_s = uuid.uuid4().hex, Clock(), ttl_s
            self.clock.now = 1e9
            self.envelope = Envelope(Cipher(bytes(32)) if is_sealed else None, ttl_s=ttl_s, clock=self.clock)
            bucket = {"port": port, "prefix": self.prefix, "num_connections": 2, "timeout_s": 20.0}
            self.stores = [
                RemoteStore(RedisBucket(**bucket), "redis", envelope=self.envelope, timeout_s=20.0) for _ in range(2)
            ]
            self.stored: dict[int, tuple[int, float, bool]] = {}

        def sound(self) -> dict[int, int]:
            now = self.clock.now
            return {n: version for n, (version, expires, bad) in self.stored.items() if expires > now and not bad}

        @rule(client=st.integers(0, 1), numbers=st.lists(NUMBERS, min_size=1, max_size=4), version=st.integers(0, 3))
        def write(self, client, numbers, version):
            assert put(self.stores[client], *numbers, nbytes=3000, version=version).ok
            expires = int(self.clock.now + self.ttl_s) if self.ttl_s else float("inf")
            self.stored |= dict.fromkeys(numbers, (version, expires, False))

        @rule(client=st.integers(0, 1), number=NUMBERS)
        def read(self, client, number):
            outcome, target = get(self.stores[client], number, 3000)
            if number in self.sound():
                version = self.stored[number][0]
                assert (outcome.status, target) == (ObjectStatus.FOUND, payload_of(number, 3000, version))
                return
            assert target == b"\xee" * 3000
            is_damaged = number in self.stored and self.stored[number][2]
            assert outcome.status is (ObjectStatus.CORRUPT if is_damaged else ObjectStatus.MISSING)
            self.stored.pop(number, None)  # a read deletes a damaged or expired object

        @rule(client=st.integers(0, 1), numbers=st.sets(NUMBERS, min_size=1))
        def remove(self, client, numbers):
            results = self.stores[client].remove([key_of(n) for n in numbers])
            removed = [outcome.status is ObjectStatus.REMOVED for outcome in results]
            assert removed == [number in self.stored for number in numbers]
            for number in numbers:
                self.stored.pop(number, None)

        @rule(number=NUMBERS, data=st.data())
        def damage(self, number, data):
            if number not in self.sound():
                return
            name = self.prefix + self.envelope.name(key_of(number))
            value = bytearray(raw.get(name))
            bit = data.draw(st.integers(self.envelope.head_bytes * 8, len(value) * 8 - 1))
            value[bit // 8] ^= 1 << bit % 8
            raw.set(name, bytes(value))
            self.stored[number] = (*self.stored[number][:2], True)

        @rule(seconds=st.sampled_from([1, TTL_S // 2, TTL_S]))
        def wait(self, seconds):
            # No status is defined for an object that is both damaged and expired, so no time passes after damage.
            if not any(bad for _, _, bad in self.stored.values()):
                self.clock.now += seconds

        @rule()
        def wipe(self):
            for name in raw.scan_iter(self.prefix + "*"):
                raw.delete(name)
            self.stored.clear()

        @invariant()
        def check_all_clients(self):
            if not hasattr(self, "stored"):
                return
            for store in self.stores:
                assert has(store, *range(6)) == [number in self.stored for number in range(6)]
            now = self.clock.now
            listed = sorted(key_of(number) for number, (_, expires, _) in self.stored.items() if expires > now)
            assert sorted(all_keys(self.stores[0], 100)) == listed

        def teardown(self):
            for store in getattr(self, "stores", ()):
                store.close()
            if hasattr(self, "stored"):
                self.wipe()  # otherwise scans would visit the objects of earlier examples

    return Machine


def test_remote_store_equals_dictionary_under_random_calls(redis_port):
    soak = int(os.environ.get("KVTIER_SOAK", "1"))
    run_state_machine_as_test(
        make_machine(redis_port), settings=settings(max_examples=150 * soak, stateful_step_count=15, deadline=None)
    )
