"""Environment: what the modules of a batch hand to each other, by typed name (the ancestors' TensorMap)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvtier.errors import ArgumentError, StateError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key(Generic[T]):
    """The name and type of an entry. Two keys of one name and type are the same key."""

    name: str
    type: type[T]

    def __str__(self) -> str:
        return f"{self.name} ({self.type.__name__})"


class Environment:
    """Entries by key. An entry is produced once, read any number of times, and may be consumed once."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Key[Any], Any]] = {}

    def __contains__(self, key: Key[Any]) -> bool:
        return key.name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def produce(self, key: Key[T], value: T) -> T:
        """Add an entry, which must not be there yet. Returns the value."""
        if key.name in self._entries:
            raise StateError(f"{key} is there already: an entry is produced once")
        if not isinstance(value, key.type):
            raise ArgumentError(f"{key} was given a {type(value).__name__}")
        self._entries[key.name] = (key, value)
        return value

    def at(self, key: Key[T]) -> T:
        """The value of an entry; an error that lists what there is if it is not."""
        found = self.get(key)
        if found is None:
            known = ", ".join(str(known) for known, _ in self._entries.values()) or "nothing"
            raise StateError(f"there is no {key} in the batch's environment; known: {known}")
        return found

    def get(self, key: Key[T]) -> T | None:
        """The value of an entry, or None."""
        entry = self._entries.get(key.name)
        if entry is None:
            return None
        known, value = entry
        if known != key:
            raise ArgumentError(f"{known} was asked for as {key}")
        found: T = value
        return found

    def consume(self, key: Key[T]) -> T:
        """Take an entry out."""
        value = self.at(key)
        del self._entries[key.name]
        return value
