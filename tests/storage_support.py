"""Objects, a store with injected faults and a simulated disk for tests of stores."""

from __future__ import annotations

import errno
import hashlib
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.storage import (
    DiskStore,
    Label,
    MemoryStore,
    ObjectResult,
    ObjectStatus,
    Page,
    Read,
    Results,
    Store,
    StoredObject,
    StoreStats,
    Write,
)
from kvtier.storage.disk.catalog import SlotRef

NAMESPACE = hashlib.sha256(b"a model").digest()
OTHER_NAMESPACE = hashlib.sha256(b"another model").digest()
LABEL = Label(NAMESPACE)
SECTOR = 512


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def payload_of(number: int, nbytes: int = 5000, version: int = 0) -> bytes:
    """Return a payload that repeats a digest of number and version, so that every part identifies the object."""
    unit = hashlib.sha256(b"payload %d %d" % (number, version)).digest()
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


def write_of(number: int, nbytes: int = 5000, version: int = 0, label: Label = LABEL) -> Write:
    return Write(key_of(number), label, payload_of(number, nbytes, version))


def put(store: Store, *numbers: int, nbytes: int = 5000, version: int = 0) -> Results:
    return store.write([write_of(number, nbytes, version) for number in numbers])


def get(store: Store, number: int, nbytes: int = 5000, label: Label = LABEL) -> tuple[ObjectResult, bytes]:
    """Read an object into memory filled with 0xEE. Return the result and the memory."""
    target = bytearray(b"\xee" * nbytes)
    results = store.read_into([Read(key_of(number), label, target)])
    return results[0], bytes(target)


def check_disk(store: DiskStore) -> None:
    """Raise AssertionError if the metadata of an idle store is inconsistent or has lost slots.

    The store must own its folder, and all other stores in the folder must be closed.
    """
    assert all(session.join(10.0) for session in store._participant._server._sessions), "a client is still open"
    space = store._participant.owned
    catalog = space._catalog
    assert not space._discarded
    space._give_back_late()
    assert not space._late
    assert space._segments.keys() == catalog._segments.keys()
    assert space.used_bytes <= space._max_bytes or not space._segments
    places: dict[SlotRef, str] = {}
    for size in catalog._sizes.values():
        free = [*size.free, *size.quarantined]
        assert len({*free}) == len(free), "a slot is listed as free twice"
        places.update(dict.fromkeys(free, "free"))
        for key, entry in size.entries.items():
            assert catalog._entries[key] is entry, "an entry is listed under another key"
            assert not entry.is_gone, "a removed entry is still listed"
            assert entry.place not in places, f"{entry.place} is {places.get(entry.place)} and used"
            places[entry.place] = "used"
    segments = catalog._segments.values()
    num_slots = sum(segment.shape.num_slots for segment in segments)
    assert len(catalog._entries) == sum(len(size.entries) for size in catalog._sizes.values())
    assert not any(segment.num_holds for segment in segments), "a slot is still held"
    assert len(places) == num_slots, f"{num_slots - len(places)} slots are lost"
    assert catalog.file_bytes == sum(segment.shape.file_bytes for segment in segments)


def has(store: Store, *numbers: int) -> list[bool]:
    return [result.ok for result in store.contains([key_of(number) for number in numbers])]


def all_objects(store: Store, limit: int = 3) -> list[StoredObject]:
    found, cursor = [], ""
    while True:
        page = store.scan(cursor, limit)
        assert not page.reason, page.reason
        found += page.objects
        cursor = page.cursor
        if not cursor:
            return found


def all_keys(store: Store, limit: int = 3) -> list[bytes]:
    return [each.key for each in all_objects(store, limit)]


def resealed(data: bytes, at: int, value: bytes) -> bytes:
    """Return a copy of a record or superblock with `value` at offset `at` and a matching CRC."""
    changed = bytearray(data)
    changed[at : at + len(value)] = value
    changed[-4:] = struct.pack("<I", zlib.crc32(changed[:-4]))
    return bytes(changed)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Fault:
    """Fault of one store call: an error, a hang until the deadline, or damage to stored objects before the call."""

    error: str = ""
    hangs: bool = False
    flip_bit: int | None = None
    cut_to: int | None = None
    only: Callable[[bytes], bool] = lambda _: True
    """Function that returns True for the keys that are affected."""


class FaultyStore:
    """A MemoryStore that applies the faults in the given order, one to each call.

    A hang advances the clock by the timeout of the call. In `scan`, an error or a hang only makes the call fail, and
    faults that damage objects have no effect.
    """

    def __init__(
        self, inner: MemoryStore, faults: Iterable[Fault] = (), clock: Clock | None = None, timeout_s: float = 10.0
    ) -> None:
        self.inner, self.clock = inner, clock or Clock()
        self._faults = iter(faults)
        self._timeout_s = timeout_s

    def _call(self, keys: Sequence[bytes], timeout_s: float | None, call: Callable[[list[int]], Results]) -> Results:
        fault = next(self._faults, Fault())
        hit = [fault.only(key) for key in keys]
        for key, is_hit in zip(keys, hit, strict=True):
            stored = self.inner.objects.get(key)
            if is_hit and stored is not None and stored.payload:
                if fault.flip_bit is not None:
                    stored.payload[fault.flip_bit // 8 % len(stored.payload)] ^= 1 << fault.flip_bit % 8
                if fault.cut_to is not None:
                    del stored.payload[fault.cut_to :]
        seconds = (self._timeout_s if timeout_s is None else timeout_s) if fault.hangs else 0.0
        self.clock.now += seconds
        reason = fault.error or ("not done in time" if fault.hangs else "")
        spared = [i for i, is_hit in enumerate(hit) if not (is_hit and reason)]
        results = call(spared)
        answers = dict(zip(spared, results, strict=True))
        failed = ObjectResult(ObjectStatus.FAILED, reason=reason)
        return Results(tuple(answers.get(i, failed) for i in range(len(keys))), seconds + results.seconds)

    def contains(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        return self._call(keys, timeout_s, lambda left: self.inner.contains([keys[i] for i in left]))

    def read_into(self, reads: Sequence[Read], *, timeout_s: float | None = None) -> Results:
        keys = [read.key for read in reads]
        return self._call(keys, timeout_s, lambda left: self.inner.read_into([reads[i] for i in left]))

    def write(self, writes: Sequence[Write], *, timeout_s: float | None = None) -> Results:
        keys = [write.key for write in writes]
        return self._call(keys, timeout_s, lambda left: self.inner.write([writes[i] for i in left]))

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results:
        return self._call(keys, timeout_s, lambda left: self.inner.remove([keys[i] for i in left]))

    def scan(self, cursor: str = "", limit: int = 1000, *, timeout_s: float | None = None) -> Page:
        fault = next(self._faults, Fault())
        if fault.error or fault.hangs:
            return Page((), cursor, timeout_s or 0.0, fault.error or "not done in time")
        return self.inner.scan(cursor, limit)

    def close(self) -> None:
        self.inner.close()

    @property
    def stats(self) -> StoreStats:
        return self.inner.stats


@dataclass
class Node:
    """A simulated file: durable content, current content, and changes since the last sync."""

    durable: bytearray = field(default_factory=bytearray)
    current: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, bytes) for a write, (length, None) for an allocation."""


def apply(data: bytearray, offset: int, written: bytes | None) -> None:
    length = offset if written is None else offset + len(written)
    if len(data) < length:
        data.extend(bytes(length - len(data)))
    if written is not None:
        data[offset : offset + len(written)] = written


class SimulatedDisk:
    """Implements the file operations of a DiskStore with files in memory. A crash loses random unsynced data.

    `pending_names` lists the unsynced changes of names: ("create", name, node), ("rename", old name, new name) or
    ("unlink", name, None).
    """

    def __init__(self, names: dict[str, Node] | None = None, capacity: int = 1 << 30) -> None:
        self.names = dict(names or {})
        self.durable_names = dict(self.names)
        self.pending_names: list[tuple[str, str, Node | str | None]] = []
        self.capacity = capacity
        self.num_operations = 0
        self.before: Callable[[str, int], object] = lambda *_: None
        """Called before each operation that `_step` counts, with its name and number. The call may raise or block."""
        self._open: dict[int, Node] = {}
        self._direct: set[int] = set()
        self._next = 1000
        self._lock = threading.RLock()

    def _step(self, operation: str) -> None:
        with self._lock:
            self.num_operations += 1
            number = self.num_operations
        self.before(operation, number)

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        self._step("open")
        with self._lock:
            name = _name(path)
            if create:
                node = self.names[name] = Node()
                self.pending_names.append(("create", name, node))
            self._next += 1
            self._open[self._next] = self.names[name]
            if direct:
                self._direct.add(self._next)
            return self._next

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._step("read")
        with self._lock:
            data = self._open[descriptor].current[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        self._step("write")
        with self._lock:
            data = b"".join(bytes(each) for each in buffers)
            if descriptor in self._direct:
                assert offset % SECTOR == 0
                assert len(data) % SECTOR == 0
            node = self._open[descriptor]
            apply(node.current, offset, data)
            node.pending.append((offset, data))

    def allocate(self, descriptor: int, nbytes: int) -> None:
        self._step("allocate")
        with self._lock:
            if self.free_bytes("") < nbytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            node = self._open[descriptor]
            apply(node.current, nbytes, None)
            node.pending.append((nbytes, None))

    def lock(self, descriptor: int, start: int, nbytes: int) -> None:
        pass

    def is_locked(self, descriptor: int, start: int, nbytes: int) -> bool:  # noqa: ARG002
        return False

    def sync(self, descriptor: int) -> None:
        self._step("sync")
        with self._lock:
            node = self._open[descriptor]
            node.durable[:] = node.current
            node.pending.clear()

    def sync_folder(self, path: str) -> None:
        """Make the names in one folder durable."""
        self._step("sync_folder")
        with self._lock:
            folder = Path(_name(f"{path}/name")).parent

            def is_here(name: str) -> bool:
                return Path(name).parent == folder

            kept = {name: node for name, node in self.durable_names.items() if not is_here(name)}
            self.durable_names = kept | {name: node for name, node in self.names.items() if is_here(name)}
            self.pending_names = [change for change in self.pending_names if not is_here(change[1])]

    def rename(self, old: str, new: str) -> None:
        self._step("rename")
        with self._lock:
            before, after = _name(old), _name(new)
            self.names[after] = self.names.pop(before)
            self.pending_names.append(("rename", before, after))

    def link(self, old: str, new: str) -> None:
        self._step("link")
        with self._lock:
            node, name = self.names[_name(old)], _name(new)
            if name in self.names:
                raise FileExistsError(errno.EEXIST, "File exists", new)
            self.names[name] = node
            self.pending_names.append(("create", name, node))

    def stamp(self, path: str) -> tuple[int, int] | None:
        node = self.names.get(_name(path))
        return None if node is None else (id(node), 0)

    def unlink(self, path: str) -> None:
        self._step("unlink")
        with self._lock:
            name = _name(path)
            del self.names[name]
            self.pending_names.append(("unlink", name, None))

    def list(self, folder: str) -> dict[str, int]:
        with self._lock:
            sizes = {name: len(node.current) for name, node in self.names.items()}
        return {
            Path(name).name: nbytes for name, nbytes in sizes.items() if _name(f"{folder}/{Path(name).name}") == name
        }

    def free_bytes(self, folder: str) -> int:  # noqa: ARG002
        return self.capacity - sum(len(node.current) for node in self.names.values())

    def after_crash(self, keep: Callable[[], bool]) -> SimulatedDisk:
        """Return the disk after a crash. Of the unsynced changes, only those remain for which `keep` returns True.

        A write of more than one sector may remain as a whole, in some of its sectors, or not at all.
        """
        with self._lock:
            names = dict(self.durable_names)
            for operation, name, what in self.pending_names:
                if not keep():
                    continue
                if operation == "create" and isinstance(what, Node):
                    names[name] = what
                elif operation == "rename" and isinstance(what, str) and name in names:
                    names[what] = names.pop(name)
                elif operation == "unlink":
                    names.pop(name, None)
            return SimulatedDisk({name: _after_crash(node, keep) for name, node in names.items()}, self.capacity)


def _name(path: str) -> str:
    """Return the path relative to the folder of the store: NAME, quarantine/NAME or keys/NAME."""
    place = Path(path)
    return f"{place.parent.name}/{place.name}" if place.parent.name in ("quarantine", "keys") else place.name


def _after_crash(node: Node, keep: Callable[[], bool]) -> Node:
    data = bytearray(node.durable)
    for offset, written in node.pending:
        if written is None or len(written) <= SECTOR:
            if keep():
                apply(data, offset, written)
            continue
        whole, torn = keep(), keep()
        if whole:
            apply(data, offset, written)
        elif torn:
            for at in range(0, len(written), SECTOR):
                if keep():
                    apply(data, offset + at, written[at : at + SECTOR])
    return Node(bytearray(data), data)
