"""HttpConnection: uvicorn's HTTP/1.1 protocol with limits that apply before a request is complete.

    waiting --first byte--> head --headers complete--> busy --response complete--> waiting
    head --timeout--> closing: answer 4xx, discard input, close
    head, busy --limit or invalid HTTP--> closing; if the response has started: closed without another answer
    waiting --timeout--> closed without an answer

The parser receives input in pieces of at most `header_bytes` bytes. It therefore buffers only a few times
`header_bytes` for a head, a chunk extension or a trailer. Pipelined requests are not run. Instead, the connection
closes after the current response, and the client repeats the pipelined requests (RFC 9112, 9.3.2).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvtier.server.config import Limits
from kvtier.server.connections import ConnectionTable, Place, address_group
from kvtier.server.errors import ApiError
from kvtier.server.request_log import RequestLog

_log = logging.getLogger("kvtier.server")
# After an error response, the rest of the request is read and discarded within these bounds. Closing a socket with
# unread input sends a reset, which can destroy the response before the client reads it.
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 1 << 20


class HttpConnection(HttpToolsProtocol):
    def __init__(self, limits: Limits, table: ConnectionTable[HttpConnection], log: RequestLog, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._table = table
        self._request_log = log
        self._place = Place.NORMAL
        self._deadline: asyncio.TimerHandle | None = None  # limits the wait for the first byte, the head and closing
        self._stall: asyncio.TimerHandle | None = None  # runs while the client does not read the response
        self._in_head = False
        self._is_busy = False
        self._is_pipelining = False
        self._is_closing = False
        self._num_head_bytes = 0
        self._num_raw_bytes = 0  # input bytes since the parser completed a part of a message, or since the error answer
        self._refusal: ApiError | None = None  # error that a parser callback raised

    # ---- connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host = self.client[0] if self.client else ""
        self._place, evicted = self._table.add(self, address_group(host))
        if evicted is not None:
            evicted.abort("evicted")
        if self._place is Place.REFUSED:
            self.abort("no_place")
        else:
            self._set_deadline(self._limits.header_seconds, self._end_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._set_deadline(None)
        self.resume_writing()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def abort(self, reason: str) -> None:
        self._request_log.connection_closed(reason)
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.send_seconds, self.abort, "stalled")

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._request_log.connection_closed("idle")
        super().timeout_keep_alive_handler()
        self._set_deadline(_LINGER_SECONDS, self.transport.abort)

    # ---- input ----

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            self._num_raw_bytes += len(data)
            if self._num_raw_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        view, step = memoryview(data), self._limits.header_bytes
        for start in range(0, len(data), step):
            if self._is_closing or self._is_pipelining:
                return
            self._feed(view[start : start + step])

    def _feed(self, piece: bytes | memoryview) -> None:
        self._num_raw_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_pipelining:
                self._refuse(self._refusal or ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http"))
        else:
            if self._num_raw_bytes > self._limits.header_bytes + self._limits.url_bytes:
                self._refuse(self._headers_too_large())

    def _feed_without_upgrade(self, rest: bytes | memoryview) -> None:
        """Parse the head again without its upgrade headers, because only HTTP/1.1 is supported (RFC 9110, 7.8)."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings"):
                head += (name, b": ", value, b"\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join((*head, b"\r\n")))
        if not self._is_closing and len(rest):
            self._feed(rest)

    # ---- parser callbacks ----

    def on_message_begin(self) -> None:
        if self._is_busy:
            self._is_pipelining = True
            self.cycle.keep_alive = False
            raise httptools.HttpParserError("pipelined request")
        self._unset_keepalive_if_required()
        self._set_deadline(self._limits.header_seconds, self._end_slow_head)
        self._in_head = True
        self._num_head_bytes = self._num_raw_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > self._limits.url_bytes:
            message = f"the URL has more than {self._limits.url_bytes} bytes"
            self._raise(ApiError(414, message, code="url_too_long"))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header. Trailers count towards the size limit, and are then dropped."""
        self._num_head_bytes += len(name) + len(value) + 4  # colon, space and line end
        if self._num_head_bytes > self._limits.header_bytes:
            self._raise(self._headers_too_large())
        if not self._in_head:
            return
        if len(self.headers) == self._limits.headers:
            message = f"the request has more than {self._limits.headers} headers"
            self._raise(ApiError(431, message, code="headers_too_large"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_raw_bytes = 0
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._raise(ApiError(405, "CONNECT is not supported: this server is not a proxy"))
            return  # `_feed_without_upgrade` follows
        super().on_headers_complete()
        self._in_head = False
        self._is_busy = True
        self._set_deadline(None)
        self._table.set_busy(self)
        if self._place is Place.HEALTH_ONLY:
            self.scope["state"]["health_only"] = True
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_raw_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_raw_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._is_busy = False
        self._table.set_idle(self)
        super().on_response_complete()
        if self.transport.is_closing():
            self._set_deadline(self._limits.send_seconds, self.transport.abort)

    # ---- errors ----

    def _raise(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise refusal

    def _headers_too_large(self) -> ApiError:
        limit = self._limits.header_bytes
        return ApiError(431, f"the request headers have more than {limit} bytes", code="headers_too_large")

    def _refuse(self, refusal: ApiError) -> None:
        if self.transport.is_closing():
            return
        self._is_closing = True
        self._num_raw_bytes = 0
        is_busy, self._is_busy = self._is_busy, False
        if is_busy and self.cycle.response_started:
            self.transport.abort()
            return
        if is_busy:  # the middleware counts and logs the request as 499
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        else:
            self._request_log.http("unknown", refusal.status)
            _log.info("http method=- route=unknown status=%d code=%s", refusal.status, refusal.code)
        self._unset_keepalive_if_required()
        self._table.set_idle(self)
        answer = refusal.response()
        headers = (*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close"))
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[refusal.status] + lines + b"\r\n" + bytes(answer.body))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._set_deadline(_LINGER_SECONDS, self.transport.abort)

    def _end_slow_head(self) -> None:
        if self._in_head:
            self._request_log.connection_closed("slow_headers")
            seconds = self._limits.header_seconds
            self._refuse(ApiError(408, f"the headers did not arrive within {seconds:g} s", code="header_timeout"))
        else:
            self.abort("idle")

    def _set_deadline(self, seconds: float | None, action: Any = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, action)
