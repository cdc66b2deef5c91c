"""Specifications of models, GPUs, disks and prices, from presets, files or `kvtier doctor --json`."""

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
    """Shape of a model. The shape determines the work per token and the bytes per cached token."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    params: float
    active_params: float = 0.0
    """Parameters used per token; 0 means all parameters."""
    kv_elements: int = 0
    """Cached elements per token in all layers, for models without KV per head (MLA). 0 if the model has KV per head."""
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    source: str = ""
    assumed: tuple[str, ...] = ()
    """Names of the fields whose values are assumptions without a source."""

    def __post_init__(self) -> None:
        _check_positive(self, "layers", "heads", "kv_heads", "head_dim", "params", "weight_bytes", "kv_bytes")

    @property
    def token_bytes(self) -> int:
        return round((self.kv_elements or 2 * self.layers * self.kv_heads * self.head_dim) * self.kv_bytes)

    @property
    def used_params(self) -> float:
        return self.active_params or self.params


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One accelerator and its link to host memory. Engines achieve the fractions `*_share` of the peak rates."""

    flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    """Bytes per second in each direction."""
    compute_share: float = 0.6  # of flops, in matrix products
    attention_share: float = 0.45  # of flops, in attention
    memory_share: float = 0.8  # of memory_bandwidth
    step_seconds: float = 0.0005
    """Fixed host time of a step."""
    row_seconds: float = 0.0
    """Host time for each request in a step."""
    name: str = ""
    source: str = ""
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(self, "flops", "memory_bytes", "memory_bandwidth", "link_bandwidth")
        _check_positive(self, "compute_share", "attention_share", "memory_share")
        _check_positive(self, "step_seconds", "row_seconds", allow_zero=True)

    def times(self, count: int) -> GpuSpec:
        """Return one spec for `count` GPUs, each with its own link. Communication between the GPUs is not modelled."""
        if count < 1:
            raise RangeError(f"need at least one GPU, got {count}")
        names = ("flops", "memory_bytes", "memory_bandwidth", "link_bandwidth")
        return replace(self, **{name: getattr(self, name) * count for name in names})


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """A disk that executes one read or write at a time."""

    read_bandwidth: float
    write_bandwidth: float
    latency_seconds: float = 0.0001
    name: str = ""
    source: str = ""
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(self, "read_bandwidth", "write_bandwidth")
        _check_positive(self, "latency_seconds", allow_zero=True)


@dataclass(frozen=True, slots=True)
class PriceSpec:
    """US dollars per GiB of host memory and of disk."""

    host_gib: float
    disk_gib: float
    source: str = ""
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(self, "host_gib", "disk_gib", allow_zero=True)


Spec = TypeVar("Spec", ModelSpec, GpuSpec, DiskSpec, PriceSpec)
_FILES: Mapping[type, str] = {
    ModelSpec: "models.toml",
    GpuSpec: "gpus.toml",
    DiskSpec: "disks.toml",
    PriceSpec: "prices.toml",
}


def presets(kind: type[Spec]) -> dict[str, Spec]:
    text = (resources.files("kvtier.replay") / "presets" / _FILES[kind]).read_text()
    return {name: from_table(kind, table, name) for name, table in tomllib.loads(text).items()}


def preset(kind: type[Spec], name: str) -> Spec:
    """Return the preset `name`. If `name` ends in .toml or .json, read the spec from this file."""
    path = Path(name)
    if path.suffix in (".toml", ".json"):
        return from_table(kind, _read(path), name)
    known = presets(kind)
    if name not in known:
        what = _FILES[kind].removesuffix("s.toml")
        raise ArgumentError(f"unknown {what} {name!r}; use one of {', '.join(sorted(known))}, or a .toml or .json file")
    return known[name]


def from_table(kind: type[Spec], table: Mapping[str, Any], name: str) -> Spec:
    """Create a spec from a table. Raise ArgumentError for unknown and missing keys and for invalid values."""
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise ArgumentError(
            f"{name}: unknown key of {kind.__name__}: {', '.join(unknown)}; known keys: {', '.join(sorted(known))}"
        )
    assumed = table.get("assumed", [])
    if not isinstance(assumed, list) or not known.issuperset(assumed):
        raise ArgumentError(f"{name}: assumed must be a list of keys of {kind.__name__}, got {assumed!r}")
    try:
        return kind(**{**table, "assumed": tuple(assumed)})
    except TypeError as error:
        raise ArgumentError(f"{name}: {str(error).removeprefix(f'{kind.__name__}.__init__() ')}") from error


def from_doctor(path: str | Path, gpu: GpuSpec) -> GpuSpec:
    """Return `gpu` with the name, memory size and lowest link bandwidth from the output of `kvtier doctor --json`."""
    measured = _read(Path(path)).get("measured", {})
    if not isinstance(measured, dict) or "cuda:0" not in measured:
        raise ArgumentError(f"{path} has no GPU (cuda:0); run kvtier doctor --json again, on a machine with a GPU")
    device = measured["cuda:0"]
    try:
        memory, rates, name = float(device["memory_bytes"]), list(device["link_gbs"].values()), str(device["name"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"{path} lacks a field of kvtier doctor --json for cuda:0: {error!r}") from error
    if not rates:
        raise ArgumentError(f"{path}: the link was not measured; run kvtier doctor --calibrate on that machine first")
    source = f"{gpu.source}; memory and link from {path}"
    left = tuple(each for each in gpu.assumed if each not in ("memory_bytes", "link_bandwidth"))
    return replace(gpu, memory_bytes=memory, link_bandwidth=min(rates) * 1e9, name=name, source=source, assumed=left)


def _read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(table, dict):
        raise ArgumentError(f"{path} must contain one table, got {type(table).__name__}")
    return table


def _check_positive(spec: object, *names: str, allow_zero: bool = False) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int | float) or not (value > 0 or (allow_zero and value == 0)):
            raise RangeError(
                f"{type(spec).__name__}: {name} must be {'0 or more' if allow_zero else 'above 0'}, got {value!r}"
            )
