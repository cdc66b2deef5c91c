"""A small server with the part of Google Cloud Storage's XML API that obstore uses. Every request needs a valid token.

No emulator on PyPI or npm works with obstore. For example, obstore requires an ETag, but gcp-storage-emulator 2026.7.19
sends none.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TOKEN = "kvtier-test-token"
_DATE = "Wed, 18 Nov 2026 12:00:00 GMT"


class GcsStub(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.accepts: Callable[[str], bool] = lambda token: token == TOKEN
        """Returns True for a valid bearer token."""
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: GcsStub

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        bucket, _, name = url.path.lstrip("/").partition("/")
        with self.server.lock:
            self.server.requests.append((self.command, self.path))
            kind, _, token = (self.headers.get("Authorization") or "").partition(" ")
            if kind != "Bearer" or not self.server.accepts(token):
                return self._send(401)
            if bucket != "test":
                return self._send(404)
            return self._object(unquote(name), body) if name else self._list(parse_qs(url.query))

    do_GET = do_PUT = do_HEAD = do_DELETE = _serve

    def _object(self, name: str, body: bytes) -> None:
        objects = self.server.objects
        if self.command == "PUT":
            if self.headers.get("x-goog-if-generation-match") == "0" and name in objects:
                return self._send(412)
            objects[name] = body
            return self._send(200, headers=_described(body) | {"x-goog-generation": "1"})
        if name not in objects:
            return self._send(404)
        data = objects[name]
        if self.command == "DELETE":
            del objects[name]
            return self._send(204)
        if span := self.headers.get("Range"):
            first, _, last = span.removeprefix("bytes=").partition("-")
            if int(first) >= len(data):
                return self._send(416)
            part = data[int(first) : int(last) + 1]
            place = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            return self._send(206, part, _described(data) | {"Content-Range": place})
        return self._send(200, data, _described(data))

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        names = sorted(name for name in self.server.objects if name.startswith(prefix) and name > after)
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-18T12:00:00.000Z</LastModified>"
            f"<ETag>x</ETag><Size>{len(self.server.objects[name])}</Size></Contents>"
            for name in names
        )
        self._send(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode())

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


def _described(data: bytes) -> dict[str, str]:
    return {"ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"', "Last-Modified": _DATE}


@contextlib.contextmanager
def gcs_stub() -> Iterator[GcsStub]:
    server = GcsStub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
