"""A TCP proxy between a client and a real server that does to the bytes what networks and sick servers do."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Mood:
    """What happens to connections from now on. Offsets count what the server sends, over all connections."""

    refuses: int = 0
    """So many new connections are closed at once."""
    hangs: bool = False
    """What arrives is not passed on, in neither direction."""
    delay_s: float = 0.0
    """Before each piece the server sends."""
    flips: tuple[int, ...] = ()
    """Bits to flip, by their place in what the server sends."""
    cut_at: int | None = None
    """After so many bytes of the server the connection ends."""
    hangs_at: int | None = None
    """After so many bytes of the server nothing is passed on."""
    latency_s: float = 0.0
    """Before the first piece of each answer."""


class Proxy:
    """Listens on `port` until closed.

    `num_asked` counts bytes clients sent, `num_connections` what they opened, `num_turns` how often one that had been
    answered asked again: round trips.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._lock = threading.Lock()
        self._mood = Mood()
        self._changed = threading.Event()
        self._num_sent = 0
        self._sockets: set[socket.socket] = set()
        self.num_asked = self.num_connections = self.num_turns = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mood: Mood) -> None:
        """From now on; connections that hang go on or end with it, and the count of what the server sends starts."""
        with self._lock:
            self._mood, self._num_sent = mood, 0
            self._changed.set()
            self._changed = threading.Event()

    def drop(self) -> None:
        """End all connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._server.close()
        self.set(Mood())
        self.drop()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with self._lock:
                self.num_connections += 1
                refused = self._mood.refuses > 0
                if refused:
                    self._mood = Mood(self._mood.refuses - 1)
            try:
                server = socket.create_connection(("127.0.0.1", self._upstream)) if not refused else None
            except OSError:
                server = None
            if server is None:
                client.close()
                continue
            for each in (client, server):  # as Redis and its clients do; else some answers wait 40 ms for an ACK
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
                    mood, changed, begin = self._mood, self._changed, self._num_sent
                    self._num_sent += len(data) if is_answer else 0
                if is_first and mood.latency_s:
                    changed.wait(mood.latency_s)
                limit = mood.hangs_at if is_answer else None
                if mood.hangs or (limit is not None and begin + len(data) > limit):
                    changed.wait()
                    break
                if is_answer and not self._treat(data, mood, begin, changed):
                    target.sendall(data)
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _treat(self, data: bytearray, mood: Mood, begin: int, changed: threading.Event) -> bool:
        """Change what the server sent; False if it is the last."""
        if mood.delay_s:
            changed.wait(mood.delay_s)
        for bit in mood.flips:
            if 0 <= bit // 8 - begin < len(data):
                data[bit // 8 - begin] ^= 1 << bit % 8
        if mood.cut_at is not None and begin + len(data) > mood.cut_at:
            del data[max(0, mood.cut_at - begin) :]
            return False
        return True


@contextlib.contextmanager
def proxy_process(upstream: int) -> Iterator[tuple[int, Callable[[Mood], None]]]:
    """A Proxy in a process of its own, so that it takes no time from who measures: its port, and its `set`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(upstream, there), daemon=True)
    process.start()
    there.close()

    def change(mood: Mood) -> None:
        here.send(mood)
        here.recv()

    try:
        yield here.recv(), change
    finally:
        here.close()
        process.join()


def _serve(upstream: int, moods: Connection) -> None:
    proxy = Proxy(upstream)
    moods.send(proxy.port)
    with contextlib.suppress(EOFError):
        while True:
            proxy.set(moods.recv())
            moods.send(None)
    proxy.close()
