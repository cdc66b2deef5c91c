"""The server limits connections before it checks an API key. Most tests use raw sockets."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.server.connections import SURPLUS, ConnectionTable, Place, address_group
from server_support import ServerProcess

TEXT = "/v1/completions"
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MEGABYTE = 1 << 20


class Connection:
    """A raw connection to a server."""

    def __init__(self, server, sent: bytes = b"", receive_bytes: int = 0) -> None:
        address = urlsplit(server.url)
        self.socket = socket.socket()
        self.socket.settimeout(30)
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect((address.hostname, address.port))
        self.socket.sendall(sent)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def flood(self, piece: bytes, max_bytes: int = 64 * MEGABYTE) -> bool:
        """Send a piece repeatedly. Return True if the server closes the connection before `max_bytes` are sent."""
        num_bytes = 0
        try:
            while num_bytes < max_bytes:
                self.socket.sendall(piece)
                num_bytes += len(piece)
        except OSError:
            return True
        return False

    def receive_all(self) -> bytes:
        """Read until the server closes the connection."""
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(65536):
                received += data
        return received

    def is_served(self) -> bool:
        """True if the server responds. False if it closes the connection at once."""
        try:
            return bool(self.socket.recv(65536))
        except ConnectionResetError:
            return False

    def receive_response(self) -> tuple[int, bytes, bytes]:
        """Read one response, which must have a Content-Length. Return its status, head and body."""
        received = b""
        while b"\r\n\r\n" not in received:
            received += (data := self.socket.recv(65536))
            assert data, received
        head, _, body = received.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        while len(body) < length:
            body += (data := self.socket.recv(65536))
            assert data, received
        return int(head.split(b" ")[1]), head, body


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"the condition is still false after {seconds} s"
        time.sleep(0.02)
    return result


def error_of(response: bytes) -> tuple[int, str]:
    """Return status and error code of a response, which must have OpenAI's format and the header connection: close."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head, response
    error = json.loads(body)["error"]
    assert {*error} == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1]), error["code"]


def metric(server, name, key="", **labels):
    return value_of(server.get("/metrics", key).text, name, **labels)


def value_of(text, name, **labels):
    suffix = "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "} "
    for line in text.splitlines():
        if line.startswith(name + suffix):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


@pytest.fixture(scope="module")
def keyed(tiny_model, tmp_path_factory):
    """Yield a server with API keys, short timeouts and at most 256 file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        process = ServerProcess(
            tmp_path_factory.mktemp("keyed") / "log",
            *("--model", str(tiny_model), "--threads", "1"),
            *("--header-seconds", "2", "--idle-seconds", "3", "--send-seconds", "1"),
            env={"KVTIER_API_KEY": "user-secret-key", "KVTIER_ADMIN_KEY": "root-secret-key"},
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log, process.log


# ---- size ----

ENDLESS = {
    "headers": (HEAD, b"x: " + b"a" * 8000 + b"\r\n", (431, "headers_too_large")),
    "short-headers": (HEAD, b"x:a\r\n" * 1000, (431, "headers_too_large")),
    "header-value": (HEAD + b"x: ", b"a" * 65536, (431, "headers_too_large")),
    "header-name": (HEAD + b"x", b"a" * 65536, (431, "headers_too_large")),
    "url": (b"GET /", b"a" * 1000, (414, "url_too_long")),
    "query": (b"GET /health?", b"a" * 65536, (414, "url_too_long")),
    "newlines": (b"", b"\r\n" * 1000, (431, "headers_too_large")),
    "method": (b"", b"A" * 1000, (400, "invalid_http")),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_head_is_rejected_with_bounded_memory(server, name):
    first, piece, refusal = ENDLESS[name]
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with Connection(server, first) as connection:
        assert connection.flood(piece)
        assert process.memory_info().rss - before < 16 * MEGABYTE
    # About 256,000 bytes exceed every limit. The server reads up to 1 MiB after an error, so it reads all these bytes.
    # Closing the connection with unread bytes would cause a reset, which could destroy the response.
    with Connection(server, first + piece * (256_000 // len(piece))) as connection:
        assert error_of(connection.receive_all()) == refusal
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "piece",
    [b"1;" + b"x" * 65536, b"0\r\nx: " + b"a" * 65536, b"0\r\n" + b"x: a\r\n" * 10_000],
    ids=["chunk-extension", "trailer-value", "trailers"],
)
def test_endless_chunk_framing_is_rejected(server, piece):
    before = psutil.Process(server.process.pid).memory_info().rss
    with Connection(server, POST + b"Transfer-Encoding: chunked\r\n\r\n" + piece) as connection:
        assert connection.flood(b"a" * 65536)
    assert psutil.Process(server.process.pid).memory_info().rss - before < 16 * MEGABYTE
    assert server.get("/health").status_code == 200


def test_head_just_below_the_limits_is_served(server):
    url = b"/health?" + b"a" * (8192 - len("/health?"))
    # With Host, there are 99 headers; the limit is 100. They have 58 KiB in total; the limit is 64 KiB.
    many = b"".join(b"x%d: %s\r\n" % (number, b"a" * 600) for number in range(98))
    with Connection(server, b"GET " + url + b" HTTP/1.1\r\nHost: localhost\r\n" + many + b"\r\n") as connection:
        assert connection.receive_response()[0] == 200
        connection.socket.sendall(b"GET " + url + b"a HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert error_of(connection.receive_all()) == (414, "url_too_long")


def test_trailers_do_not_become_headers(server):
    body = json.dumps({"model": server.model, "prompt": "x", "max_tokens": 1}).encode()
    chunked = b"%x\r\n%s\r\n0\r\nHost: evil.example\r\nx-other: 1\r\n\r\n" % (len(body), body)
    with Connection(server, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunked) as connection:
        assert connection.receive_response()[0] == 200
        connection.socket.sendall(HEAD + b"\r\n")
        assert connection.receive_response()[0] == 200


# ---- time ----


def test_slow_headers_get_408(keyed):
    with Connection(keyed, HEAD + b"x: ") as connection:
        assert error_of(connection.receive_all()) == (408, "header_timeout")
    with Connection(keyed, HEAD) as connection:  # the bytes sent below do not extend the timeout
        connection.socket.settimeout(0.05)
        received = b""
        while not received:
            with contextlib.suppress(TimeoutError):
                connection.socket.sendall(b"x")
                received = connection.socket.recv(65536)
    assert error_of(received) == (408, "header_timeout")


def test_silent_and_idle_connections_are_closed(keyed):
    before = metric(keyed, "kvtier_connections_closed_total", "root-secret-key", reason="idle")
    with Connection(keyed) as silent, Connection(keyed, HEAD + b"\r\n") as idle:
        assert idle.receive_response()[0] == 200
        assert silent.receive_all() == b""
        assert idle.receive_all() == b""
    assert metric(keyed, "kvtier_connections_closed_total", "root-secret-key", reason="idle") >= before + 2


def test_slow_body_after_401_does_not_keep_connection_open(keyed):
    with Connection(keyed, POST + b"Content-Length: 100000\r\n\r\n") as connection:
        assert connection.receive_response()[0] == 401
        connection.socket.settimeout(0.05)
        with contextlib.suppress(OSError):
            while True:
                connection.socket.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not connection.socket.recv(100):
                        break


def test_client_that_never_reads_is_disconnected(keyed):
    """Unread responses fill all buffers. Then the server stops sending and must disconnect the client."""
    admin = {"Authorization": "Bearer root-secret-key"}
    process = psutil.Process(keyed.process.pid)
    with (
        httpx.Client(base_url=keyed.url, headers=admin, timeout=30) as client,
        Connection(keyed, receive_bytes=2048) as connection,
    ):

        def counts():
            text = client.get("/metrics").text
            return value_of(text, "kvtier_connections_closed_total", reason="stalled"), value_of(
                text, "kvtier_http_responses_total", route="unknown", status="200"
            )

        before, rss = counts(), process.memory_info().rss
        now = before
        while now[0] == before[0]:
            with contextlib.suppress(OSError):
                connection.socket.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            now = wait_until(lambda now=now: (later := counts()) != now and later)
    assert process.memory_info().rss - rss < 16 * MEGABYTE


# ---- number ----


def test_incomplete_heads_do_not_lock_out_health_checks(keyed):
    process = psutil.Process(keyed.process.pid)
    keyed.get("/health")
    num_fds, num_threads = process.num_fds(), process.num_threads()
    opened = []
    try:
        for number in range(300):
            opened.append(Connection(keyed, HEAD + b"x: "))
            if number % 50 == 49:
                assert keyed.get("/health").status_code == 200
                assert process.num_fds() < 256
    finally:
        for connection in opened:
            connection.socket.close()
    assert metric(keyed, "kvtier_connections_closed_total", "root-secret-key", reason="evicted") > 0
    wait_until(lambda: process.num_fds() <= num_fds)
    assert process.num_threads() <= num_threads


def test_accept_recovers_from_lack_of_file_descriptors(keyed):
    process = psutil.Process(keyed.process.pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir())
    process.rlimit(psutil.RLIMIT_NOFILE, (highest + 1, before[1]))
    with contextlib.ExitStack() as opened:
        try:
            while opened.enter_context(Connection(keyed, HEAD + b"\r\n")).is_served():
                assert process.num_fds() <= highest + 1
        finally:
            process.rlimit(psutil.RLIMIT_NOFILE, before)

    def is_healthy():
        with contextlib.suppress(httpx.TransportError):  # libuv may first close queued connections
            return keyed.get("/health").status_code == 200

    wait_until(is_healthy)


def test_busy_connections_do_not_block_health_checks(start):
    server = start("--max-connections", "4", "--max-connections-per-address", "3")
    body = json.dumps({"model": server.model, "prompt": "x", "max_tokens": 1}).encode()
    held = [
        Connection(server, POST + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(body)) for _ in range(3)
    ]
    for connection in held:  # the server waits for the body, so the connection is busy
        assert connection.socket.recv(100).startswith(b"HTTP/1.1 100 ")
    assert server.get("/health").status_code == 200
    refused = server.post(TEXT, {"model": server.model, "prompt": "x", "max_tokens": 1})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "too_many_connections"
    assert int(refused.headers["retry-after"]) >= 1
    for connection in held:
        connection.socket.sendall(body)
        assert connection.receive_response()[0] == 200
        connection.socket.close()
    wait_until(lambda: server.get("/v1/models").status_code == 200)


# ---- protocols ----


def test_h2c_upgrade_keeps_the_body(server):
    body = json.dumps({"model": server.model, "prompt": "x", "max_tokens": 2, "ignore_eos": True}).encode()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = POST + upgrade + b"Content-Length: %d\r\n\r\n" % len(body)
    with Connection(server, head + body) as connection:
        status, _, answer = connection.receive_response()
        assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 2)
        for part in (head, body):  # send the same request again, in two pieces
            connection.socket.sendall(part)
        assert connection.receive_response()[0] == 200


def test_websocket_upgrade_gets_a_plain_http_response(server):
    upgrade = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with Connection(server, b"GET /ws HTTP/1.1\r\n" + upgrade) as connection:
        status, _, body = connection.receive_response()
    assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")


def test_pipelining_serves_first_request_and_closes_connection(server):
    body = json.dumps({"model": server.model, "prompt": "x", "max_tokens": 1}).encode()
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with Connection(server, request * 1000) as connection:
        received = connection.receive_all()
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in received


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_invalid_http_gets_a_json_error(server, sent, status):
    with Connection(server, sent) as connection:
        assert error_of(connection.receive_all())[0] == status


# ---- ConnectionTable ----


class _Evictable:
    def __init__(self) -> None:
        self.is_open = True

    def evict(self) -> None:
        self.is_open = False


class TableMachine(RuleBasedStateMachine):
    """Compares a ConnectionTable with a plain list.

    The table evicts only idle connections. Of the idle connections of one address, the table evicts the connection that
    has been idle longest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = ConnectionTable(6, 4)  # limits: 6 connections in total, and 4 per address
        self.opened: list[tuple[_Evictable, str]] = []
        self.idle: list[_Evictable] = []

    @rule(address=st.sampled_from("abc"))
    def add(self, address):
        added = _Evictable()
        own = [connection for connection, other in self.opened if other == address]
        place, evicted = self.table.add(added, address)
        if evicted is not None:
            evicted.evict()
        closed = [connection for connection, _ in self.opened if not connection.is_open]
        assert len(closed) <= 1
        if len(own) < 4 and len(self.opened) < 6:
            assert (place, closed) == (Place.NORMAL, [])
        elif closed:
            assert closed[0] in self.idle
            victim_address = next(other for connection, other in self.opened if connection is closed[0])
            same = [each for each in self.idle if (each, victim_address) in self.opened]
            assert closed[0] is same[0]
            assert victim_address == address or len(own) < 4
        else:
            assert place is not Place.NORMAL
            assert not [each for each in own if each in self.idle]
        self.opened = [pair for pair in self.opened if pair[0].is_open]
        self.idle = [each for each in self.idle if each.is_open]
        if place is not Place.REFUSED:
            self.opened.append((added, address))
            self.idle.append(added)

    @rule(number=st.integers(0, 30), action=st.sampled_from(("set_busy", "set_idle", "remove")))
    def change(self, number, action):
        if not self.opened:
            return
        pair = self.opened[number % len(self.opened)]
        if action == "set_idle" and pair[0] in self.idle:
            return
        getattr(self.table, action)(pair[0])
        if pair[0] in self.idle:
            self.idle.remove(pair[0])
        if action == "set_idle":
            self.idle.append(pair[0])
        elif action == "remove":
            self.opened.remove(pair)

    @invariant()
    def connections_stay_within_limits(self):
        assert {*self.table.addresses} == {connection for connection, _ in self.opened}
        assert len(self.table.addresses) <= 6 + SURPLUS
        assert all(count <= 4 + SURPLUS for count in Counter(address for _, address in self.opened).values())


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestTable = TableMachine.TestCase


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("unix", "unix"),
    ],
)
def test_address_group_is_ipv4_address_or_ipv6_network(host, group):
    assert address_group(host) == group
