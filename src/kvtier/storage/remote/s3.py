"""Blocks in a bucket of S3, or of a server that speaks it. Needs the extra `s3`.

S3 has one request per object, so requests run in parallel: one per thread. An object is put on the condition that there
is none of its name; the one that is there is replaced only if it is another. Expired objects are not served, and are
deleted when somebody reads them; the rest is for a lifecycle rule of the bucket.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from kvtier.storage.remote.bucket import BucketError, Listing, Parts, Put, RequestSize, join
from kvtier.storage.workers import Scratch

Answer = TypeVar("Answer")

_REFUSED = (PermissionDeniedError, UnauthenticatedError)


@dataclass(frozen=True, slots=True)
class S3Config:
    """A bucket, and where it is. What is empty comes from AWS_* in the environment."""

    bucket: str
    prefix: str = ""
    """Names begin with it and a slash."""
    endpoint: str = ""
    """http:// or https:// of a server other than Amazon's; the bucket goes into the path."""
    region: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""


class S3Bucket:
    """Named objects in S3. A bucket that cannot be read is a BucketError when this is made."""

    request_size = RequestSize(max_names=1)

    def __init__(self, config: S3Config, timeout_s: float) -> None:
        self._prefix = config.prefix.strip("/") + "/" if config.prefix.strip("/") else ""
        timeout = datetime.timedelta(seconds=timeout_s)
        chosen = {
            "endpoint": config.endpoint,
            "region": config.region,
            "access_key_id": config.access_key_id,
            "secret_access_key": config.secret_access_key,
        }
        self._store = S3Store(
            config.bucket,
            **{name: value for name, value in chosen.items() if value},  # type: ignore[arg-type]
            virtual_hosted_style_request=not config.endpoint,
            client_options={
                "timeout": timeout,
                "connect_timeout": timeout,
                "allow_http": config.endpoint.startswith("http://"),
            },
            retry_config={"max_retries": 0, "retry_timeout": timeout},  # RemoteStore's are enough
        )
        self.list_names("", 1)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of them are there."""
        return [self._find(lambda n=name: obstore.head(self._store, self._prefix + n)) is not None for name in names]  # type: ignore[misc]

    def fetch(self, names: Sequence[str], rooms: Sequence[int], scratch: Scratch) -> list[memoryview | None]:  # noqa: ARG002
        """Their values, in memory of the client."""
        return [self._fetch(name, room) for name, room in zip(names, rooms, strict=True)]

    def fetch_heads(self, names: Sequence[str], nbytes: int, scratch: Scratch) -> list[bytes | None]:  # noqa: ARG002
        """The first bytes of their values; an empty value counts as none."""
        return [self._head(name, nbytes) for name in names]

    def put(self, names: Sequence[str], values: Sequence[Parts], scratch: Scratch, *, replace: bool) -> list[Put]:
        """Put them, on the condition that there are none, unless they are to be replaced."""
        return [self._put(name, parts, scratch, replace=replace) for name, parts in zip(names, values, strict=True)]

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Forget them. S3 does not tell whether there was anything, so it is asked before."""
        there = self.exists(names)
        gone = [self._prefix + name for name, is_there in zip(names, there, strict=True) if is_there]
        if gone:
            _translate(lambda: obstore.delete(self._store, gone))
        return there

    def list_names(self, cursor: str, limit: int) -> Listing:
        """Names in their order; the cursor is the last one before."""
        offset = self._prefix + cursor if cursor else None
        prefix = self._prefix.rstrip("/") or None
        found = _translate(
            lambda: next(iter(obstore.list(self._store, prefix, offset=offset, chunk_size=limit + 1)), [])
        )
        names = [each["path"].removeprefix(self._prefix) for each in found]
        ours = tuple(name for name in names[:limit] if len(name) == 64 and "/" not in name)
        return Listing(ours, names[limit - 1] if len(names) > limit else "")

    def reset(self) -> None:
        """HTTP frames each answer; there is nothing to be out of step."""

    def close(self) -> None:
        """The client closes its connections when nobody refers to it."""

    def _fetch(self, name: str, room: int) -> memoryview | None:
        found = self._find(lambda: obstore.get(self._store, self._prefix + name))
        if found is None:
            return None
        if found.meta["size"] > room:
            head = self._head(name, room)
            return None if head is None else memoryview(head)
        return memoryview(_translate(found.bytes))

    def _head(self, name: str, nbytes: int) -> bytes | None:
        found = self._find(lambda: obstore.get_range(self._store, self._prefix + name, start=0, end=nbytes))
        return bytes(found) or None if found is not None else None

    def _put(self, name: str, parts: Parts, scratch: Scratch, *, replace: bool) -> Put:
        value = join(parts, scratch.take(sum(map(len, parts))))
        mode = "overwrite" if replace else "create"
        try:
            obstore.put(self._store, self._prefix + name, value, mode=mode, use_multipart=False)  # type: ignore[arg-type]
        except (AlreadyExistsError, PreconditionError):
            return Put.EXISTS
        except (BaseError, OSError, ValueError) as error:
            raise _as_bucket_error(error) from error
        return Put.STORED

    def _find(self, call: Callable[[], Answer]) -> Answer | None:
        """What the call finds; None if there is nothing."""
        try:
            return call()
        except (FileNotFoundError, NotFoundError):
            return None
        except (BaseError, OSError, ValueError) as error:
            raise _as_bucket_error(error) from error


def _translate(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except (BaseError, OSError, ValueError) as error:
        raise _as_bucket_error(error) from error


def _as_bucket_error(error: Exception) -> BucketError:
    message = str(error).partition("\n")[0][:300]  # the rest is the client's own inside
    if isinstance(error, _REFUSED):
        return BucketError(f"refused us: {message}", is_transient=False)
    return BucketError(f"{type(error).__name__}: {message}")
