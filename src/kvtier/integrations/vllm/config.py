"""ConnectorConfig: the settings in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvtier.cache.config import (
    CacheConfig,
    HostConfig,
    StoreConfig,
    WaitPolicy,
    WritebackConfig,
    WritePolicy,
)
from kvtier.errors import ArgumentError
from kvtier.index import Retention
from kvtier.storage.open import parse_bytes

_SHARED_SCHEMES = ("redis", "rediss", "s3", "gs", "az", "mooncake")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store below host memory: its URL (docs/stores.md) and its StoreConfig."""

    url: str
    config: StoreConfig

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def is_persistent(self) -> bool:
        """True if the stored blocks outlive the process."""
        return self.scheme != "memory"

    @classmethod
    def parse(cls, given: str | Mapping[str, Any], number: int) -> StoreSettings:
        """Read a URL, or a table with a `url` and settings of StoreConfig and WritebackConfig."""
        table: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"url": given}
        url = table.pop("url", "")
        scheme = urlsplit(url).scheme if isinstance(url, str) else ""
        if not scheme:
            raise ArgumentError(f"each of `stores` must be a URL or a table with a `url`, got {given!r}")
        try:
            table |= {
                key: kind(table[key]) for key, kind in (("write", WritePolicy), ("wait", WaitPolicy)) if key in table
            }
        except ValueError as error:
            raise ArgumentError(f"the store {url}: {error}") from None
        names = {each.name for each in fields(WritebackConfig)} & table.keys()
        saving = WritebackConfig(**{name: table.pop(name) for name in names})
        table.setdefault("name", scheme if not number else f"{scheme}-{number}")
        table.setdefault("is_shared", scheme in _SHARED_SCHEMES)
        _check_keys(table, StoreConfig, f"the store {url}", without=("saving",))
        return cls(url, StoreConfig(saving=saving, **table))


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Settings of the connector. docs/vllm.md describes them for users."""

    host_bytes: int = 4 << 30
    """Host memory for blocks, in total over all ranks."""
    stores: tuple[StoreSettings, ...] = ()
    policy: str = "lru"
    revision: str = ""
    """Revision of the weights. Required for persistent stores, unless vLLM's `model` is a local folder or file, or a
    hub model whose commit is known."""
    secret_file: str = ""
    """File with the key for the token digests in stored blocks."""
    kv_shards: int = 0
    """Number of parts of a stored block; 0 for the number of ranks. The number must be a multiple of the
    tensor-parallel size of every vLLM instance that reads the store."""
    layout: str = "auto"
    """`auto` requests block-first cache tensors on CUDA, because one copy per block is faster than one per layer.
    `keep` leaves the layout to vLLM."""
    on_reset: str = "memory"
    """`memory`: a cache reset drops the blocks in host memory. `weights`: a reset means that the weights may have
    changed. Earlier blocks in host memory and in stores are then never used again."""
    save_generated: bool = True
    """Save the blocks of completions too, and not only the blocks of prompts."""
    max_saving_blocks: int = 0
    """Maximum number of device blocks that are held for saving; 0 for a quarter of vLLM's blocks, but at least 256. If
    a request ends while the limit is reached, its remaining blocks are not saved."""
    allow_fail_policy: bool = False
    """Start even if vLLM fails requests whose load failed (kv_load_failure_policy=fail)."""
    verify_loads: bool = False
    """For debugging: compare checksums of loaded and saved blocks. Blocks from stores are not compared."""

    def __post_init__(self) -> None:
        if self.layout not in ("auto", "keep") or self.on_reset not in ("memory", "weights"):
            raise ArgumentError(
                f"layout is auto or keep, on_reset is memory or weights; got {self.layout!r} and {self.on_reset!r}"
            )
        if self.host_bytes < 1 or self.kv_shards < 0 or self.max_saving_blocks < 0:
            raise ArgumentError(
                f"host_bytes must be positive, kv_shards and max_saving_blocks 0 or more; got {self.host_bytes}, "
                f"{self.kv_shards} and {self.max_saving_blocks}"
            )

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Read `kv_connector_extra_config`. An unknown key is an error."""
        _check_keys(extra, cls, "kv_connector_extra_config")
        values = dict(extra)
        if "host_bytes" in values:
            values["host_bytes"] = _bytes_of(values["host_bytes"])
        stores = values.get("stores", ())
        if isinstance(stores, str) or not isinstance(stores, Sequence):
            raise ArgumentError(f"`stores` must be a list of URLs or tables, got {stores!r}")
        values["stores"] = tuple(StoreSettings.parse(given, number) for number, given in enumerate(stores))
        return cls(**values)

    @property
    def secret(self) -> bytes:
        return Path(self.secret_file).read_bytes().strip() if self.secret_file else b""

    def cache_config(self, num_host_blocks: int, num_device_blocks: int) -> CacheConfig:
        """Return the configuration of a CacheManager for vLLM's device blocks."""
        max_saving = self.max_saving_blocks or max(256, num_device_blocks // 4)
        return CacheConfig(
            0,
            owns_device=False,
            host=HostConfig(num_host_blocks, self.policy, WritebackConfig(max_blocks=max_saving)),
            stores=tuple(store.config for store in self.stores),
            always_load=True,
            secret=self.secret,
        )


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Settings of one request: `kv_transfer_params={"kvtier": {...}}`."""

    save: bool = True
    load: bool = True
    priority: int = 0
    ttl: float = float("inf")
    explain: bool = False
    """In `kv_transfer_params` of the response, return the number of loaded tokens by tier and the reason for a miss."""
    error: str = ""
    """Description of invalid settings; empty if all are valid. A request with invalid settings runs with the default
    settings and `explain`, because an exception in a connector would stop vLLM for all requests."""

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> RequestOptions:
        given = (params or {}).get("kvtier", {})
        try:
            _check_keys(given, cls, 'kv_transfer_params["kvtier"]', without=("error",))
            return cls(**given)
        except (ArgumentError, TypeError) as error:
            return cls(explain=True, error=str(error))

    @property
    def retention(self) -> Retention:
        return Retention(self.priority, self.ttl)


def _check_keys(given: Any, config: type, where: str, *, without: tuple[str, ...] = ()) -> None:
    known = [each.name for each in fields(config) if each.name not in without]
    unknown = sorted(set(given) - set(known)) if isinstance(given, Mapping) else [repr(given)]
    if unknown:
        raise ArgumentError(f"{where}: unknown setting {', '.join(unknown)}; known: {', '.join(known)}")


def _bytes_of(value: int | str) -> int:
    try:
        return parse_bytes(value) if isinstance(value, str) else int(value)
    except ValueError:
        raise ArgumentError(f"host_bytes must be a number of bytes such as 16GiB, got {value!r}") from None
