"""A TCP proxy that injects faults between a client and a real server."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Faults:
    """Faults to inject. An offset counts the bytes that the server has sent over all connections since `Proxy.set`."""

    refuses: int = 0
    """The next `refuses` new connections are closed at once. The first of them ends all other faults."""
    hangs: bool = False
    """True if the proxy forwards nothing in either direction."""
    delay_s: float = 0.0
    """Delay before each piece that the server sends."""
    flips: tuple[int, ...] = ()
    """Offsets of the bits to flip, in bits instead of bytes."""
    cut_at: int | None = None
    """Offset at which the connection is closed."""
    hangs_at: int | None = None
    """The proxy forwards neither the piece with the byte at this offset nor later data from the server."""
    latency_s: float = 0.0
    """Delay before the first piece of each answer."""


class Proxy:
    """Listens on `port` until `close` is called.

    `num_asked` counts the bytes that clients have sent, and `num_turns` counts the round trips.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._lock = threading.Lock()
        self._faults = Faults()
        self._changed = threading.Event()
        self._num_sent = 0
        self._sockets: set[socket.socket] = set()
        self.num_asked = self.num_connections = self.num_turns = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, faults: Faults) -> None:
        """Replace the faults and close hanging connections. Offsets start at 0 again."""
        with self._lock:
            self._faults, self._num_sent = faults, 0
            self._changed.set()
            self._changed = threading.Event()

    def drop(self) -> None:
        """Close all connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        self._server.close()
        self.set(Faults())
        self.drop()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with self._lock:
                self.num_connections += 1
                refused = self._faults.refuses > 0
                if refused:
                    self._faults = Faults(self._faults.refuses - 1)
            try:
                server = socket.create_connection(("127.0.0.1", self._upstream)) if not refused else None
            except OSError:
                server = None
            if server is None:
                client.close()
                continue
            for each in (client, server):  # as in Redis; otherwise some answers would wait 40 ms for an ACK
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            was_answered = threading.Event()
            was_answered.set()
            for args in ((client, server, False, was_answered), (server, client, True, was_answered)):
                threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(
        self, source: socket.socket, target: socket.socket, is_answer: bool, was_answered: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                with self._lock:
                    self.num_asked += 0 if is_answer else len(data)
                    self.num_turns += not is_answer and was_answered.is_set()
                    is_first = is_answer and not was_answered.is_set()
                    (was_answered.set if is_answer else was_answered.clear)()
                    faults, changed, begin = self._faults, self._changed, self._num_sent
                    self._num_sent += len(data) if is_answer else 0
                if is_first and faults.latency_s:
                    changed.wait(faults.latency_s)
                limit = faults.hangs_at if is_answer else None
                if faults.hangs or (limit is not None and begin + len(data) > limit):
                    changed.wait()
                    break
                if is_answer and not self._apply_faults(data, faults, begin, changed):
                    target.sendall(data)
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _apply_faults(self, data: bytearray, faults: Faults, begin: int, changed: threading.Event) -> bool:
        """Apply the faults to data from the server. Return False if the connection must be closed after this data."""
        if faults.delay_s:
            changed.wait(faults.delay_s)
        for bit in faults.flips:
            if 0 <= bit // 8 - begin < len(data):
                data[bit // 8 - begin] ^= 1 << bit % 8
        if faults.cut_at is not None and begin + len(data) > faults.cut_at:
            del data[max(0, faults.cut_at - begin) :]
            return False
        return True


@contextlib.contextmanager
def proxy_process(upstream: int) -> Iterator[tuple[int, Callable[[Faults], None]]]:
    """Run a Proxy in another process, so that it does not slow down a benchmark.

    Yield its port and a function that calls its method `set`.
    """
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(upstream, child_end), daemon=True)
    process.start()
    child_end.close()

    def change(faults: Faults) -> None:
        parent_end.send(faults)
        parent_end.recv()

    try:
        yield parent_end.recv(), change
    finally:
        parent_end.close()
        process.join()


def _serve(upstream: int, commands: Connection) -> None:
    proxy = Proxy(upstream)
    commands.send(proxy.port)
    with contextlib.suppress(EOFError):
        while True:
            proxy.set(commands.recv())
            commands.send(None)
    proxy.close()
