"""Placement: `cpu`, `pinned` or `cuda:i`. A torch.device cannot express pinned host memory."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from kvtier.errors import ArgumentError, UnavailableError

Kind = Literal["cpu", "pinned", "cuda"]


@dataclass(frozen=True, slots=True)
class Placement:
    """One kind of memory. `Placement.parse` reads "cpu", "pinned", "cuda:1" and "cuda" (the current device)."""

    kind: Kind
    index: int = 0
    """Index of the GPU; 0 for host memory."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.index < 0 or (self.index and not self.is_device):
            raise ArgumentError(f"no such placement: {self.kind!r} with index {self.index}")

    @classmethod
    def parse(cls, text: str | Placement | torch.device) -> Placement:
        """Read a placement from text or a torch.device. A Placement is returned unchanged."""
        if isinstance(text, Placement):
            return text
        match = re.fullmatch(r"(cpu)(?::0)?|(pinned)|cuda(?::(\d+))?", str(text))
        if match is None:
            raise ArgumentError(f"unknown placement {str(text)!r}; use 'cpu', 'pinned' or 'cuda:<index>'")
        if match[1]:
            return CPU
        if match[2]:
            return PINNED
        if match[3] is None:
            return cls("cuda", torch.cuda.current_device() if has_gpu() else 0)
        return cls("cuda", int(match[3]))

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.is_device else self.kind

    @property
    def is_device(self) -> bool:
        return self.kind == "cuda"

    @property
    def torch(self) -> torch.device:
        """The torch device of this memory (for pinned memory, torch's cpu)."""
        return torch.device("cuda", self.index) if self.is_device else torch.device("cpu")

    def require(self) -> Placement:
        """Return this placement, or raise UnavailableError if the machine does not have it."""
        if self.kind == "cpu":
            return self
        if not has_gpu():
            why = "was built without CUDA" if torch.version.cuda is None else "finds no usable GPU or driver"
            raise UnavailableError(
                f"{self} memory needs an NVIDIA GPU and a CUDA build of torch; torch {torch.__version__} {why}. "
                "Use 'cpu', or best_host() for the best host memory of this machine"
            )
        count = torch.cuda.device_count()
        if self.is_device and self.index >= count:
            raise UnavailableError(
                f"{self} does not exist: this machine has {count} GPU(s), cuda:0 to cuda:{count - 1}"
            )
        return self


@functools.cache  # called for every foreign array, and torch would look for a driver each time
def has_gpu() -> bool:
    return torch.cuda.is_available()


@functools.cache  # called for every tensor, where creating a Placement would dominate the cost
def gpu(index: int) -> Placement:
    return Placement("cuda", index)


CPU = Placement("cpu")
PINNED = Placement("pinned")


def best_host() -> Placement:
    """Return the best host memory of this machine: pinned if there is a GPU, otherwise plain."""
    return PINNED if has_gpu() else CPU
