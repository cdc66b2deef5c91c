"""ASGI layer around the app: GuardMiddleware, event streams, and detection of client disconnects."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.server.config import LOCAL_HOSTS, Limits, Tenant
from kvtier.server.errors import ApiError
from kvtier.server.request_log import RequestLog

T = TypeVar("T")

_log = logging.getLogger("kvtier.server")
_PROBES = ("/health", "/livez", "/ping")
_OPEN = ("/", *_PROBES, "/openapi.json", "/favicon.ico")  # need no key
_ADMIN = ("/control", "/state", "/metrics", "/sleep", "/wake_up", "/reset_prefix_cache")
_POLLED = (*_PROBES, "/state", "/metrics", "/load", "/is_sleeping")  # logged as DEBUG if the status is below 500
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ONCE = (b"authorization", b"x-api-key", b"host", b"origin", b"content-type")  # headers that must not be repeated
_DIRECT_SEND = "kvtier.direct_send"  # scope key of the server's own send function, which bypasses the middleware
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")


class ClientGone(Exception):
    """The client disconnected before the response was complete."""


class EventStream(Response):
    """Server-sent events from a generator. A disconnect of the client or a timeout closes the generator."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], headers: dict[str, str], seconds: float) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._seconds = first, rest, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            try:
                async with asyncio.timeout(self._seconds):
                    await unless_gone(receive, self._send(send, scope.get(_DIRECT_SEND, send)))
            except (ClientGone, TimeoutError, OSError):
                return  # uvicorn closes the connection of an unfinished response

    async def _send(self, send: Send, direct_send: Send) -> None:
        """Send the stream. Events bypass the middleware, which needs to see only the start of a response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await direct_send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._rest:
            await direct_send({"type": "http.response.body", "body": piece, "more_body": True})
        await direct_send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`. If the client disconnects first, cancel `work` and raise ClientGone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def before_deadline(request: Request, limits: Limits, work: Awaitable[T]) -> T:
    """Await `work`. Raise ClientGone if the client disconnects, and ApiError 504 at the request's deadline."""
    try:
        async with asyncio.timeout(request.state.began + limits.request_seconds - time.monotonic()):
            return await unless_gone(request.receive, work)
    except TimeoutError as error:
        raise request_timeout(limits) from error


def request_timeout(limits: Limits) -> ApiError:
    return ApiError(504, f"the request took longer than {limits.request_seconds:g} s", code="timeout")


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GuardMiddleware:
    """Checks headers, origin, key and announced body size before the app runs. Logs and counts responses.

    All keys are compared in constant time, so that response times reveal nothing about the keys. In a server without
    keys, the following requests are rejected: admin requests from other machines, requests under a host name that is
    not local, and requests from pages of other sites that are not in `origins`.
    """

    def __init__(
        self, app: ASGIApp, tenants: Sequence[Tenant], limits: Limits, log: RequestLog, origins: Sequence[str] = ()
    ) -> None:
        """`origins` are other sites whose pages may send requests even if the server has no keys."""
        self._app = app
        self._origins = frozenset(origins)
        self._keys = [(hashlib.sha256(tenant.key.encode()).digest(), tenant) for tenant in tenants]
        self._limits = limits
        self._request_log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, client_id = 0, ""

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if client_id and message["type"] == "http.response.start":
                message["headers"] = _with_id(message["headers"], client_id)
            await send(message)

        try:
            headers = _headers(scope)
            given = headers.get("x-request-id", "")
            client_id = given if _CLIENT_ID.fullmatch(given) else ""
            scope.setdefault("state", {})["client_id"] = client_id
            _check_host(scope, headers)
            self._admit(scope, headers)
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length) > self._limits.body_bytes:
                raise body_too_large(f"{length} bytes", self._limits)
            scope[_DIRECT_SEND] = send
            await self._app(scope, receive, watch)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._request_log.http(route, status)
            level = logging.ERROR if status >= 500 else logging.DEBUG if route in _POLLED else logging.INFO
            _log.log(level, "http method=%s route=%s status=%d", scope["method"], route, status)

    def _admit(self, scope: Scope, headers: dict[str, str]) -> None:
        if not self._keys:
            _reject_cross_site(headers, self._origins)
        path, state = scope["path"], scope.setdefault("state", {})
        state.update(tenant=None, began=time.monotonic())
        if state.get("health_only") and path not in _PROBES:
            message = "all connections of this server or of your address are in use; retry later"
            raise ApiError(503, message, code="too_many_connections")
        if path in _OPEN:
            return
        tenant = self._authenticate(headers) if self._keys else None
        if any(path == prefix or path.startswith(f"{prefix}/") for prefix in _ADMIN):
            peer = (scope.get("client") or (None,))[0]
            if not (tenant.admin if tenant is not None else peer in LOCAL_HOSTS):
                raise ApiError(403, "this endpoint needs an admin key", code="admin_only")
        else:
            state["tenant"] = tenant

    def _authenticate(self, headers: dict[str, str]) -> Tenant:
        """Return the tenant of the key. Anthropic's clients send the key in the header x-api-key."""
        scheme, _, key = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [tenant for known, tenant in self._keys if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not matches:
            message = "missing or unknown API key: send the header Authorization: Bearer <key>, or x-api-key: <key>"
            raise ApiError(401, message, code="invalid_api_key")
        return matches[0]


def body_too_large(size: str, limits: Limits) -> ApiError:
    return ApiError(413, f"the body has {size}; the limit is {limits.body_bytes}", code="body_too_large")


def _headers(scope: Scope) -> dict[str, str]:
    """Return the headers by lower-case name. Raise 400 if a header in `_ONCE` is repeated."""
    names = [name for name, _ in scope["headers"] if name in _ONCE]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1).decode()
        raise ApiError(400, f"the request has more than one {name} header", code="duplicate_header")
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _with_id(headers: list[tuple[bytes, bytes]], client_id: str) -> list[tuple[bytes, bytes]]:
    """Add the request id that the client chose, unless the response already has an id."""
    has_id = any(name == b"x-request-id" for name, _ in headers)
    return headers if has_id else [*headers, (b"x-request-id", client_id.encode())]


def _check_host(scope: Scope, headers: dict[str, str]) -> None:
    """Raise 400 for a missing or invalid Host header (RFC 9112, 3.2). HTTP/1.0 clients need not send one."""
    host = headers.get("host")
    if _HOST.fullmatch(host or "") is None and (host is not None or scope["http_version"] != "1.0"):
        raise ApiError(400, "the Host header is missing or invalid", code="invalid_host")


def _reject_cross_site(headers: dict[str, str], allowed: frozenset[str]) -> None:
    """Raise 403 for a request to a host name that is not local (DNS rebinding).

    Also raise 403 for a request from a page of another origin, unless `allowed` contains the origin.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    match = _HOST.fullmatch(host)
    is_local = match is not None and match[1].strip("[]").lower() in LOCAL_HOSTS
    is_cross_origin = origin is not None and origin.partition("://")[2] != host
    is_cross_site = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
    if not is_local or ((is_cross_origin or is_cross_site) and origin not in allowed):
        message = "this server has no API keys, so it accepts requests only under a local host name"
        raise ApiError(403, f"{message}, and from pages of other sites only if --allow-origin lists the site")
