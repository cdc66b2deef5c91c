"""ObjectBucket: blocks in S3 or a compatible server, Google Cloud or Azure Blob Storage (extra `s3`, `gcs` or `azure`).

A request to these servers handles one object, so requests run in parallel, one per thread. A put without `replace` does
not change an existing object. RemoteStore then compares the stored object with the new one. If the objects differ, it
puts the new object with `replace`. Expired objects are deleted when they are read; use a lifecycle rule of the bucket
for objects that are not read.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from kvtier.storage.codec import Scratch
from kvtier.storage.remote.bucket import BucketError, Parts, Put, RequestSize, join

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

Response = TypeVar("Response")

_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


def s3_store(
    bucket: str,
    endpoint: str = "",
    region: str = "",
    access_key_id: str = "",
    secret_access_key: str = "",
    *,
    timeout_s: float,
) -> ObjectStore:
    """Return a client for S3. Empty arguments default to the environment variables AWS_*.

    `endpoint` is the http:// or https:// URL of a server other than Amazon's. Requests to this server name the bucket
    in the path of the URL.
    """
    options = {
        "endpoint": endpoint,
        "region": region,
        "access_key_id": access_key_id,
        "secret_access_key": secret_access_key,
    }
    return S3Store(
        bucket,
        **_given(options),  # type: ignore[arg-type]
        virtual_hosted_style_request=not endpoint,
        client_options=_client(endpoint, timeout_s),
        retry_config=_no_retries(timeout_s),
    )


def gcs_store(bucket: str, endpoint: str = "", credentials: str = "", *, timeout_s: float) -> ObjectStore:
    """Return a client for Google Cloud Storage.

    `credentials` is the path of a service account file. The default is the path in GOOGLE_APPLICATION_CREDENTIALS.
    Machines in Google Cloud need no file.
    """
    options = {"base_url": endpoint, "application_credentials": credentials}
    return GCSStore(
        bucket,
        **_given(options),  # type: ignore[arg-type]
        client_options=_client(endpoint, timeout_s),
        retry_config=_no_retries(timeout_s),
    )


def azure_store(
    container: str, endpoint: str = "", account: str = "", account_key: str = "", *, timeout_s: float
) -> ObjectStore:
    """Return a client for Azure Blob Storage. Empty arguments default to the environment variables AZURE_*."""
    options = {"endpoint": endpoint, "account_name": account, "account_key": account_key}
    return AzureStore(
        container,
        **_given(options),  # type: ignore[arg-type]
        client_options=_client(endpoint, timeout_s),
        retry_config=_no_retries(timeout_s),
    )


def _given(options: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if value}


def _client(endpoint: str, timeout_s: float) -> ClientConfig:
    timeout = datetime.timedelta(seconds=timeout_s)
    return {"timeout": timeout, "connect_timeout": timeout, "allow_http": endpoint.startswith("http://")}


def _no_retries(timeout_s: float) -> RetryConfig:
    """Return a configuration without retries, because RemoteStore retries requests itself."""
    return {"max_retries": 0, "retry_timeout": datetime.timedelta(seconds=timeout_s)}


class ObjectBucket:
    """Objects of one bucket. The path of an object is `prefix`/name, or just the name if `prefix` is empty."""

    request_size = RequestSize(max_names=1)

    def __init__(self, connect: Callable[[], ObjectStore], prefix: str = "") -> None:
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._store = _translate(connect)
        self.list_names("", 1)  # raises BucketError if the bucket cannot be read

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [self._find(lambda n=name: obstore.head(self._store, self._prefix + n)) is not None for name in names]  # type: ignore[misc]

    def fetch(self, names: Sequence[str], limits: Sequence[int], scratch: Scratch) -> list[memoryview | None]:  # noqa: ARG002
        return [self._fetch(name, limit) for name, limit in zip(names, limits, strict=True)]

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:  # noqa: ARG002
        """Return the first `nbytes` bytes of each value. An empty value counts as missing."""
        return [self._head(name, nbytes) for name in names]

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:
        return [self._put(name, parts, scratch, replace=replace) for name, parts in zip(names, values, strict=True)]

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Delete objects. Look up each object first, because a deletion in S3 does not report missing objects."""
        existed = self.exists(names)
        paths = [self._prefix + name for name in itertools.compress(names, existed)]
        if paths:
            _translate(lambda: obstore.delete(self._store, paths))
        return existed

    def list_names(self, cursor: str, limit: int) -> tuple[list[str], str]:
        """Return block names in order, and the next cursor: the last listed name, or "" at the end."""
        offset = self._prefix + cursor if cursor else None
        paths = _translate(lambda: self._list_paths(offset, limit + 1))
        names = [path.removeprefix(self._prefix) for path in paths[: limit + 1]]
        ours = [name for name in names[:limit] if len(name) == 64 and "/" not in name]  # a block's name: 64 hex digits
        return ours, names[limit - 1] if len(names) > limit else ""

    def _list_paths(self, offset: str | None, count: int) -> list[str]:
        """Return at least `count` paths after `offset`, if there are enough. Some servers also list earlier paths."""
        paths: list[str] = []
        prefix = self._prefix.rstrip("/") or None
        for chunk in obstore.list(self._store, prefix, offset=offset, chunk_size=count):
            paths += [entry["path"] for entry in chunk if offset is None or entry["path"] > offset]
            if len(paths) >= count:
                break
        return paths

    def reset(self) -> None:
        """Do nothing. Over HTTP, a late response cannot be mistaken for the response to a later request."""

    def close(self) -> None:
        """Do nothing, because the client closes its connections when it is garbage-collected."""

    def _fetch(self, name: str, limit: int) -> memoryview | None:
        response = self._find(lambda: obstore.get(self._store, self._prefix + name))
        if response is None:
            return None
        if response.meta["size"] > limit:
            head = self._head(name, limit)
            return None if head is None else memoryview(head)
        return memoryview(_translate(response.bytes))

    def _head(self, name: str, nbytes: int) -> bytes | None:
        head = self._find(lambda: obstore.get_range(self._store, self._prefix + name, start=0, end=nbytes))
        return bytes(head) or None if head is not None else None

    def _put(self, name: str, parts: Parts, scratch: Scratch, *, replace: bool) -> Put:
        value = join(parts, scratch.take(sum(map(len, parts))))
        mode = "overwrite" if replace else "create"
        path = self._prefix + name
        try:
            _translate(
                lambda: obstore.put(self._store, path, value, mode=mode, use_multipart=False),  # type: ignore[arg-type]
                (exceptions.AlreadyExistsError, exceptions.PreconditionError),
            )
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return Put.EXISTS
        return Put.STORED

    def _find(self, call: Callable[[], Response]) -> Response | None:
        try:
            return _translate(call, (FileNotFoundError, exceptions.NotFoundError))
        except (FileNotFoundError, exceptions.NotFoundError):
            return None


def _translate(call: Callable[[], Response], expected: tuple[type[Exception], ...] = ()) -> Response:
    """Run a request. Errors other than the expected ones become BucketErrors."""
    try:
        return call()
    except expected:
        raise
    except (exceptions.BaseError, OSError, ValueError) as error:
        message = str(error).partition("\n")[0][:300]  # the rest is internal to the client
        if isinstance(error, _REFUSED):
            raise BucketError(f"access denied: {message}", is_transient=False) from error
        raise BucketError(f"{type(error).__name__}: {message}") from error
