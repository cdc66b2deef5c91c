"""Module: what takes part in a batch: input processors, the model, samplers, output processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kvtier.batch.environment import Environment, Key
from kvtier.errors import ArgumentError


class Module:
    """One method per BatchOp, each of which does nothing unless overridden.

    `reads` and `writes` name the entries of the environment a module needs and makes, so that a missing producer is
    found before the first step. The engine thread runs all but the three in the middle, which the executor runs.
    """

    reads: ClassVar[frozenset[Key[Any]]] = frozenset()
    writes: ClassVar[frozenset[Key[Any]]] = frozenset()

    def add(self, requests: Sequence[Any]) -> None:
        """Requests have arrived; raise to refuse them. Host."""

    def setup(self, env: Environment) -> None:
        """Enqueue what the step needs on the device. Host to device."""

    def prepare(self, env: Environment) -> None:
        """Bring per-sequence state into the order of this batch. Device; copies run after all modules."""

    def forward(self, env: Environment) -> None:
        """Compute. Device."""

    def unprep(self, env: Environment) -> None:
        """Put aside what FETCH will read, before the next batch overwrites it. Device."""

    def fetch(self, env: Environment) -> None:
        """Enqueue the way back to the host. Device to host."""

    def update(self, env: Environment) -> None:
        """Use the results, which are there now. Host."""

    def remove(self, requests: Sequence[Any]) -> None:
        """Requests are leaving, none of their batches is in flight. Host.

        Also those that another module refused in `add`, before or after this one saw them.
        """


def check_modules(modules: Sequence[Module], given: Sequence[Key[Any]]) -> None:
    """Raise unless every entry a module reads is given or written by a module, and none is written twice."""
    producers: dict[str, str] = {key.name: "the pipeline" for key in given}
    for module in modules:
        for key in sorted(module.writes, key=str):
            if key.name in producers:
                raise ArgumentError(f"{type(module).__name__} writes {key}, which {producers[key.name]} writes already")
            producers[key.name] = type(module).__name__
    for module in modules:
        for key in sorted(module.reads, key=str):
            if key.name not in producers:
                raise ArgumentError(
                    f"{type(module).__name__} reads {key}, which nobody writes; written: {', '.join(producers)}"
                )
