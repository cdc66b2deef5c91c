"""Check the features of Redis stores: users, TLS, expiry, memory limits and clusters."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import threading
import uuid

import pytest

from kvtier.errors import StoreError
from kvtier.storage import Breaker, ObjectStatus, Read, Write
from kvtier.storage.audit import take_inventory
from kvtier.storage.open import open_store
from kvtier.storage.remote.store import RemoteStore
from storage_support import LABEL, all_keys, get, key_of, payload_of, put
from store_servers import NotInstalled, free_ports, redis_server, wait_for


@contextlib.contextmanager
def server(folder, *options):
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(redis_server(folder, *options))
        except NotInstalled as missing:
            pytest.skip(str(missing))
        yield port


def round_trip_works(store) -> bool:
    assert put(store, 1).ok
    return get(store, 1)[1] == payload_of(1)


def test_redis_url_needs_valid_user_and_password(tmp_path):
    options = ["--requirepass", "a-secret", "--user", "kv", "on", ">p@ss:word", "~kvtier:*", "+@all"]
    with server(tmp_path, *options) as port:
        for user in (":a-secret", "default:a-secret", "kv:p%40ss%3Aword"):
            with contextlib.closing(open_store(f"redis://{user}@127.0.0.1:{port}")) as store:
                assert round_trip_works(store)
        with pytest.raises(StoreError, match=r"cannot open .*: access denied"):
            open_store(f"redis://127.0.0.1:{port}")
        with pytest.raises(StoreError, match="access denied") as refused:
            open_store(f"redis://kv:wrong-password@127.0.0.1:{port}")
        assert "wrong-password" not in str(refused.value)
        with contextlib.closing(open_store(f"redis://kv:p%40ss%3Aword@127.0.0.1:{port}?prefix=other:")) as store:
            outcome = put(store, 1)[0]
            assert outcome.status is ObjectStatus.FAILED
            assert "permission" in outcome.reason.lower()


def make_certificates(folder):
    """Write a CA and a certificate for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def write(name, key, certificate):
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.key").write_bytes(secret)
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def build(subject, issuer, key, signer, extension):
        name = lambda text: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])  # noqa: E731
        made = x509.CertificateBuilder(name(issuer), name(subject), key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        return made.add_extension(extension, critical=True).sign(signer, hashes.SHA256())

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    write("ca", ca_key, build("ca", "ca", ca_key, ca_key, x509.BasicConstraints(ca=True, path_length=None)))
    local = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    write("server", key, build("server", "ca", key, ca_key, local))


def test_redis_tls_needs_known_ca_and_client_certificate(tmp_path):
    make_certificates(tmp_path)
    files = [f"{name}.{kind}" for name, kind in (("server", "crt"), ("server", "key"), ("ca", "crt"))]
    names = ("--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file")
    (port,) = free_ports(1)
    options = ["--tls-port", str(port), *(x for pair in zip(names, files, strict=True) for x in pair)]
    with server(tmp_path, *options) as plain_port:
        ca, cert, key = (tmp_path / name for name in ("ca.crt", "server.crt", "server.key"))
        with contextlib.closing(
            open_store(f"rediss://127.0.0.1:{port}?ca={ca}&cert={cert}&cert_key={key}&timeout=20s")
        ) as store:
            assert round_trip_works(store)
        with pytest.raises(StoreError, match="cannot open"):  # unknown CA
            open_store(f"rediss://127.0.0.1:{port}?cert={cert}&cert_key={key}")
        with pytest.raises(StoreError, match="cannot open"):  # no client certificate
            open_store(f"rediss://127.0.0.1:{port}?ca={ca}")
        with pytest.raises(StoreError, match="cannot open"):  # a port without TLS
            open_store(f"rediss://127.0.0.1:{plain_port}?ca={ca}&timeout=2s")


def test_redis_ttl_is_set_on_server(redis_port):
    import redis

    prefix, raw = uuid.uuid4().hex, redis.Redis(port=redis_port)
    with contextlib.closing(open_store(f"redis://127.0.0.1:{redis_port}?prefix={prefix}&ttl=2h")) as store:
        put(store, 1)
        assert 7_100_000 < raw.pttl(prefix + key_of(1).hex()) <= 7_200_000
    with contextlib.closing(open_store(f"redis://127.0.0.1:{redis_port}?prefix={prefix}")) as store:
        put(store, 2)
        assert raw.pttl(prefix + key_of(2).hex()) == -1


@pytest.mark.parametrize("options", ["", "&compression=zlib"])
def test_redis_read_of_grown_value_transfers_only_wanted_bytes(redis_port, options):
    import redis

    prefix, raw = uuid.uuid4().hex, redis.Redis(port=redis_port)
    with contextlib.closing(open_store(f"redis://127.0.0.1:{redis_port}?prefix={prefix}{options}")) as store:
        put(store, *range(4))
        for number in range(4):
            raw.setrange(prefix + key_of(number).hex(), 20_000_000, b"x")
        before = raw.info("stats")["total_net_output_bytes"]
        assert [get(store, number)[1] for number in range(4)] == [payload_of(number) for number in range(4)]
        assert len(all_keys(store)) == 4
        assert raw.info("stats")["total_net_output_bytes"] - before < 100_000
        store.remove([key_of(number) for number in range(4)])


@pytest.mark.parametrize("kind", ["redis_port", "cluster_ports"])
def test_redis_key_of_wrong_type_does_not_affect_other_keys(request, kind):
    import redis

    port, prefix = request.getfixturevalue(kind), uuid.uuid4().hex
    is_cluster = kind == "cluster_ports"
    port = port[0] if is_cluster else port
    raw = redis.RedisCluster("127.0.0.1", port) if is_cluster else redis.Redis(port=port)
    url = f"redis://127.0.0.1:{port}?prefix={prefix}{'&cluster=yes' if is_cluster else ''}"
    with contextlib.closing(open_store(url)) as store:
        put(store, 0, 2, 4)
        names = [prefix + key_of(number).hex() for number in range(6)]
        raw.lpush(names[1], "a")
        raw.sadd(names[3], "a")
        raw.hset(names[5], "a", "b")
        targets = [bytearray(5000) for _ in range(7)]
        found = take_inventory(store)
        assert (found.num_objects, found.num_unreadable, found.reason) == (3, 3, "")
        results = store.read_into([Read(key_of(number), LABEL, target) for number, target in enumerate(targets)])
        assert [each.status.value for each in results] == ["found", "corrupt"] * 3 + ["missing"]
        assert [bytes(target) for target in targets[:6:2]] == [payload_of(number) for number in (0, 2, 4)]
        assert put(store, 1, 3, 5).ok
        assert get(store, 3)[1] == payload_of(3)
        assert store.stats.num_refused == 0


def test_redis_write_to_full_server_does_not_open_breaker(tmp_path):
    with (
        server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as port,
        contextlib.closing(open_store(f"redis://127.0.0.1:{port}")) as store,
    ):
        results = store.write([])
        for number in range(60):
            results = put(store, number, nbytes=200_000)
        assert results[0].status is ObjectStatus.FAILED
        assert "is full" in results[0].reason
        assert get(store, 0, 200_000)[1] == payload_of(0, 200_000)
        store.remove([key_of(n) for n in range(60)])
        assert put(store, 61).ok
        assert store.stats.num_refused == 0


def test_redis_evicted_objects_are_missing_and_others_are_intact(tmp_path):
    with (
        server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as port,
        contextlib.closing(open_store(f"redis://127.0.0.1:{port}")) as store,
    ):
        for number in range(60):
            assert put(store, number, nbytes=200_000).ok
        outcomes = [get(store, number, 200_000) for number in range(60)]
        for number, (outcome, target) in enumerate(outcomes):
            assert target == (payload_of(number, 200_000) if outcome.ok else b"\xee" * 200_000)
            assert outcome.status in (ObjectStatus.FOUND, ObjectStatus.MISSING)
        assert 0 < sum(outcome.ok for outcome, _ in outcomes) < 60


def test_redis_write_past_deadline_stores_no_later_changes(tmp_path):
    """The server sleeps past the deadline of a write. While the server sleeps, the caller overwrites the buffers.

    The client sends most of the buffers only when the server wakes up. Changed bytes must not become valid objects.
    """
    import redis

    from kvtier.storage.remote.bucket import RequestSize
    from kvtier.storage.remote.redis import RedisBucket

    with server(tmp_path, "--enable-debug-command", "yes") as port:
        bucket = RedisBucket(port=port, num_connections=2, timeout_s=60.0)
        bucket.request_size = RequestSize(max_names=64, max_put_bytes=64 << 20)  # send all writes in one request
        store = RemoteStore(bucket, "redis", num_threads=1, breaker=Breaker(retry_s=0))
        memory = [bytearray(payload_of(number, 1 << 20)) for number in range(40)]
        writes = [Write(key_of(number), LABEL, each) for number, each in enumerate(memory)]
        sleep = threading.Thread(target=redis.Redis(port=port).execute_command, args=("DEBUG", "SLEEP", "2"))
        sleep.start()
        results = store.write(writes, timeout_s=0.5)
        for each in memory:
            each[:] = b"\xaa" * len(each)
        assert not results.ok
        sleep.join()
        wait_for(lambda: store.contains([key_of(0)])[0].status is not ObjectStatus.FAILED, "the store to answer")
        for number in range(40):
            outcome, target = get(store, number, 1 << 20)
            assert target == (payload_of(number, 1 << 20) if outcome.ok else b"\xee" * (1 << 20)), outcome
        store.close()


def test_redis_cluster_spreads_objects_over_nodes(cluster_ports):
    import redis

    prefix = uuid.uuid4().hex
    url = f"redis://127.0.0.1:{cluster_ports[0]}?cluster=yes&prefix={prefix}"
    with contextlib.closing(open_store(url)) as store:
        assert put(store, *range(60), nbytes=1000).ok
        on_nodes = [len(list(redis.Redis(port=port).scan_iter(prefix + "*"))) for port in cluster_ports]
        assert sum(on_nodes) == 60
        assert min(on_nodes) > 0
        assert sorted(all_keys(store, 7)) == sorted(key_of(n) for n in range(60))
        assert all(get(store, n, 1000)[1] == payload_of(n, 1000) for n in range(60))


def test_redis_cluster_url_without_option_fails_with_advice(cluster_ports):
    with contextlib.closing(open_store(f"redis://127.0.0.1:{cluster_ports[0]}")) as store:
        reasons = {outcome.reason for outcome in put(store, *range(20), nbytes=100) if not outcome.ok}
        assert any("cluster=yes" in reason for reason in reasons), reasons


def test_redis_cluster_client_follows_moved_slots(cluster_ports):
    import redis

    prefix = uuid.uuid4().hex
    nodes = {port: redis.Redis(port=port) for port in cluster_ports}
    ids = {port: node.cluster("MYID").decode() for port, node in nodes.items()}
    before = redis.RedisCluster(host="127.0.0.1", port=cluster_ports[0])
    for node in nodes.values():
        node.flushall()  # a node refuses to give away a slot with keys, such as keys of another test
    with contextlib.closing(open_store(f"redis://127.0.0.1:{cluster_ports[0]}?cluster=yes&prefix={prefix}")) as store:
        assert put(store, *range(20)).ok  # now the client caches the slot map, and the loop makes this map outdated
        store.remove([key_of(n) for n in range(20)])
        for number in range(20):
            name = prefix + key_of(number).hex()
            other = next(port for port in cluster_ports if port != before.get_node_from_key(name).port)
            for node in nodes.values():
                node.cluster("SETSLOT", before.keyslot(name), "NODE", ids[other])
        assert put(store, *range(20)).ok
        assert all(get(store, n)[1] == payload_of(n) for n in range(20))
