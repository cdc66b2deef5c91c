"""HiCacheSettings: the settings in `--hicache-storage-backend-extra-config`, and the identity of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvtier.errors import ArgumentError
from kvtier.fingerprint import files_digest

# Settings that only SGLang uses. SGLang itself removes its prefetch settings from the config that a backend gets.
_OF_SGLANG = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "hicache_storage_pass_prefix_keys",
    "allocator",
)


@dataclass(frozen=True, slots=True)
class HiCacheSettings:
    """Settings of the backend. docs/sglang.md describes them for users."""

    store: tuple[str, ...] = ()
    """Store URLs, nearest first."""
    revision: str = ""
    """Revision of the weights. A persistent store needs it, unless the model name is an existing path."""
    timeout_s: float = 2.0
    """Timeout of a lookup. Reads and writes get `gib_timeout_s` seconds more for each GiB."""
    gib_timeout_s: float = 4.0
    secret_file: str = ""
    """File with the secret key of the digests in stored objects. The digests are computed from page hashes."""

    def __post_init__(self) -> None:
        if not self.store:
            raise ArgumentError('the backend needs a store: add "store": "disk:/nvme/kv?bytes=200GiB"')
        if self.timeout_s <= 0 or self.gib_timeout_s < 0:
            raise ArgumentError(
                f"timeout_s must be positive and gib_timeout_s 0 or more, got {self.timeout_s} and {self.gib_timeout_s}"
            )

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> HiCacheSettings:
        """Read the extra config. An unknown setting is an error."""
        values = {name: value for name, value in (extra or {}).items() if name not in _OF_SGLANG}
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ArgumentError(f"unknown setting {', '.join(unknown)} of the backend; known: {', '.join(known)}")
        store = values.get("store", ())
        if not isinstance(store, str) and not isinstance(store, Sequence):
            raise ArgumentError(f"`store` must be a URL or a list of URLs, got {store!r}")
        values["store"] = (store,) if isinstance(store, str) else tuple(store)
        return cls(**values)

    @property
    def secret(self) -> bytes:
        return Path(self.secret_file).read_bytes().strip() if self.secret_file else b""

    def deadline(self, nbytes: int) -> float:
        return self.timeout_s + self.gib_timeout_s * nbytes / (1 << 30)

    @property
    def has_disk(self) -> bool:
        return any(urlsplit(url).scheme == "disk" for url in self.store)

    def revision_of(self, model_name: str) -> str:
        """Return the revision of the weights. If it is unknown and a store is persistent, raise ArgumentError."""
        if self.revision:
            return self.revision
        if model_name and Path(model_name).exists():
            return files_digest(Path(model_name)).hex()
        persistent = [url.split("?")[0] for url in self.store if urlsplit(url).scheme != "memory"]
        if persistent:
            raise ArgumentError(
                f"the revision of the weights of {model_name or 'this model'} is unknown, and {', '.join(persistent)} "
                f'keeps pages after this process ends: set "revision" in the extra config, and change it with the '
                f"weights"
            )
        return "unknown"


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The model of a rank, and the position of the rank in each kind of parallelism."""

    model: str
    tp: tuple[int, int] = (0, 1)
    """Tensor-parallel rank and number of ranks. `pp` and `cp` describe pipeline and context parallelism likewise."""
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    is_replicated: bool = False
    """True if all tensor-parallel ranks hold the same KV, as with multi-head latent attention (MLA)."""

    @classmethod
    def of(cls, config: Any) -> RankIdentity:
        """Read SGLang's HiCacheStorageConfig. Older versions lack context parallelism."""
        return cls(
            config.model_name or "",
            (config.tp_rank, config.tp_size),
            (getattr(config, "pp_rank", 0), getattr(config, "pp_size", 1)),
            (getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1)),
            bool(config.is_mla_model),
        )

    @property
    def part(self) -> tuple[int, int]:
        """Index of this rank's folder in a disk store, and number of folders. Ranks with the same KV share a folder."""
        tp = (0, 1) if self.is_replicated else self.tp
        return (self.pp[0] * self.cp[1] + self.cp[0]) * tp[1] + tp[0], tp[1] * self.pp[1] * self.cp[1]

    def describe(self, *, is_sharded: bool) -> str:
        """Describe the ranks that determine a pool's bytes. With `is_sharded`, each TP rank has different bytes."""
        places = [("tp", self.tp if is_sharded else (0, 1)), ("pp", self.pp), ("cp", self.cp)]
        return " ".join(f"{name} {rank}/{size}" for name, (rank, size) in places)
