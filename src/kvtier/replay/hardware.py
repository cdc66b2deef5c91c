"""Models, GPUs, disks and prices as numbers: presets with their sources, or what `kvtier doctor --json` found."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from kvtier.errors import ArgumentError, RangeError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a step computes, and what a token takes in the cache."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    params: float
    active_params: float = 0.0
    """Per token; 0: all of them."""
    kv_elements: int = 0
    """Per token over all layers, where attention is not by heads."""
    weight_bytes: float = 2.0
    """Of one parameter."""
    kv_bytes: float = 2.0
    """Of one element."""
    source: str = ""
    assumed: tuple[str, ...] = ()
    """Fields that the source says nothing of."""

    def __post_init__(self) -> None:
        _must_be_positive(self, "layers", "heads", "kv_heads", "head_dim", "params", "weight_bytes", "kv_bytes")

    @property
    def token_bytes(self) -> int:
        """Of one token's KV."""
        return round((self.kv_elements or 2 * self.layers * self.kv_heads * self.head_dim) * self.kv_bytes)

    @property
    def used_params(self) -> float:
        """Per token."""
        return self.active_params or self.params


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One accelerator and its link to host memory. The shares are the parts of the peaks that an engine reaches."""

    flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    """Bytes per second, each way."""
    compute_share: float = 0.6
    attention_share: float = 0.45
    memory_share: float = 0.8
    step_seconds: float = 0.0005
    """What a step takes besides."""
    row_seconds: float = 0.0
    """What each request of a step takes besides: the host's part."""
    name: str = ""
    source: str = ""
    assumed: tuple[str, ...] = ()
    """Fields that the source says nothing of."""

    def __post_init__(self) -> None:
        _must_be_positive(self, "flops", "memory_bytes", "memory_bandwidth", "link_bandwidth")
        _must_be_positive(self, "compute_share", "attention_share", "memory_share")
        _must_not_be_negative(self, "step_seconds", "row_seconds")

    def times(self, count: int) -> GpuSpec:
        """So many of them as one, each with its own link; what they tell each other is left out."""
        if count < 1:
            raise RangeError(f"at least one GPU computes, got {count}")
        return replace(
            self,
            flops=self.flops * count,
            memory_bytes=self.memory_bytes * count,
            memory_bandwidth=self.memory_bandwidth * count,
            link_bandwidth=self.link_bandwidth * count,
        )


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """A disk: reads and writes share it."""

    read_bandwidth: float
    write_bandwidth: float
    latency_seconds: float = 0.0001
    name: str = ""
    source: str = ""
    assumed: tuple[str, ...] = ()
    """Fields that the source says nothing of."""

    def __post_init__(self) -> None:
        _must_be_positive(self, "read_bandwidth", "write_bandwidth")
        _must_not_be_negative(self, "latency_seconds")


@dataclass(frozen=True, slots=True)
class PriceSpec:
    """US dollars a GiB of host memory and of disk."""

    host_gib: float
    disk_gib: float
    source: str = ""
    assumed: tuple[str, ...] = ()
    """Fields that the source says nothing of."""

    def __post_init__(self) -> None:
        _must_not_be_negative(self, "host_gib", "disk_gib")


Spec = TypeVar("Spec", ModelSpec, GpuSpec, DiskSpec, PriceSpec)
_FILES: Mapping[type, str] = {
    ModelSpec: "models.toml",
    GpuSpec: "gpus.toml",
    DiskSpec: "disks.toml",
    PriceSpec: "prices.toml",
}


def presets(kind: type[Spec]) -> dict[str, Spec]:
    """All of a kind, by name."""
    text = (resources.files("kvtier.replay") / "presets" / _FILES[kind]).read_text()
    return {name: from_table(kind, table, name) for name, table in tomllib.loads(text).items()}


def preset(kind: type[Spec], name: str) -> Spec:
    """The preset of that name; a .toml or .json file with the same keys will do, too."""
    path = Path(name)
    if path.suffix in (".toml", ".json"):
        return from_table(kind, _read(path), name)
    known = presets(kind)
    if name not in known:
        what = _FILES[kind].removesuffix("s.toml")
        raise ArgumentError(f"no {what} is called {name!r}; there are {', '.join(sorted(known))}, or give a .toml file")
    return known[name]


def from_table(kind: type[Spec], table: Mapping[str, Any], name: str) -> Spec:
    """A spec of a table's values; a key that it does not have is an error."""
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise ArgumentError(
            f"{name}: no {kind.__name__} has {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    assumed = table.get("assumed", [])
    if not isinstance(assumed, list) or not known.issuperset(assumed):
        raise ArgumentError(f"{name}: assumed is a list of keys of a {kind.__name__}, got {assumed!r}")
    try:
        return kind(**{**table, "assumed": tuple(assumed)})
    except TypeError as error:
        raise ArgumentError(f"{name}: {str(error).removeprefix(f'{kind.__name__}.__init__() ')}") from error


def from_doctor(path: str | Path, gpu: GpuSpec) -> GpuSpec:
    """The same GPU with the memory and the link that `kvtier doctor --json` found on a machine.

    Peaks are taken from the preset: the doctor measures links, not FLOPs.
    """
    measured = _read(Path(path)).get("measured", {})
    if not isinstance(measured, dict) or "cuda:0" not in measured:
        raise ArgumentError(f"{path} tells of no GPU (cuda:0); is it from kvtier doctor --json on a machine with one?")
    found = measured["cuda:0"]
    try:
        memory, rates, name = float(found["memory_bytes"]), list(found["link_gbs"].values()), str(found["name"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"{path} lacks what kvtier doctor --json says of cuda:0: {error!r}") from error
    if not rates:
        raise ArgumentError(f"{path}: the link was not measured; run kvtier doctor --calibrate there, then --json")
    source = f"{gpu.source}; memory and link from {path}"
    left = tuple(each for each in gpu.assumed if each not in ("memory_bytes", "link_bandwidth"))
    return replace(gpu, memory_bytes=memory, link_bandwidth=min(rates) * 1e9, name=name, source=source, assumed=left)


def _read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(f"{path} is no {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(table, dict):
        raise ArgumentError(f"{path} must hold one table, got {type(table).__name__}")
    return table


def _must_be_positive(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int | float) or not value > 0:
            raise RangeError(f"{type(spec).__name__}: {name} must be above 0, got {value!r}")


def _must_not_be_negative(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int | float) or not value >= 0:
            raise RangeError(f"{type(spec).__name__}: {name} must be 0 or more, got {value!r}")
