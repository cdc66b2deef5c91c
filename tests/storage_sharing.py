"""Several processes read and write one folder, and are killed with SIGKILL at random times.

The class Crowd starts a parent process with `python storage_sharing.py FOLDER WORKLOAD`. The parent forks workers.

There are places 0 to 7. Each place has one worker at a time and a range of objects. A worker writes and removes only
the objects of its own place, and reads objects of all places. The parent reads lines from its standard input. For
"start PLACE SEED SYNC", it forks a worker and prints "pid PLACE PID". For "wait PLACE PID", it waits until a killed
worker has ended, and prints "dead PLACE". The lines of a worker begin with its place:

    trying, stored, dropping   as in storage_crash
    dropped NUMBER 0           after each removal; 0 stands for the version
    wrong TEXT ..              an error: a lost or changed object, a result that is not allowed, or a slow call
    calls N SECONDS            the number of calls since the last such line, and the longest duration of these calls
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from kvtier.storage import DiskStore, ObjectResult, ObjectStatus, Read, Sync, Write
from storage_support import LABEL, check_disk, key_of, payload_of

NUM_PLACES = 8
NUMBERS_PER_PLACE = 12
SIZES = (5000, 20_000, 70_000)
TIMEOUT_S = 5.0
ROOM = {"roomy": 64 << 20, "full": 2 << 20, "encrypted": 64 << 20}
"""Size limit of the folder in bytes, by workload. Only the folder of `full` is too small for all objects."""
_HEAD = struct.Struct("<QQ")


def open_folder(folder: str | Path, workload: str, sync: Sync = Sync.CLOSE) -> DiskStore:
    secret = bytes(32) if workload == "encrypted" else None
    segment_bytes = 256 << 10 if workload == "full" else 1 << 20
    limits = {"segment_bytes": segment_bytes, "min_free_bytes": 0, "num_threads": 3, "timeout_s": TIMEOUT_S}
    return DiskStore(folder, ROOM[workload], sync=sync, secret=secret, **limits)


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def content_of(number: int, version: int) -> bytes:
    return _HEAD.pack(number, version) + payload_of(number, size_of(number) - _HEAD.size, version)


def version_in(number: int, content: bytes) -> int | None:
    """Return the version in the header of `content`, or None if it is not this version of `number`."""
    _, version = _HEAD.unpack_from(content)
    return version if content == content_of(number, version) else None


class Worker:
    """A process that calls the store at random until it is killed."""

    def __init__(self, folder: str, workload: str, place: int, seed: int, sync: Sync) -> None:
        self._place, self._is_full = place, workload == "full"
        self._random = random.Random(seed * NUM_PLACES + place)
        self._version = seed * 1_000_000  # each seed has its own versions
        self._store = open_folder(folder, workload, sync)
        self._own = range(place * NUMBERS_PER_PLACE, (place + 1) * NUMBERS_PER_PLACE)
        self._last: dict[int, int | None] = {}
        """Maps each own object to the version of the last successful write, or to None if it was removed since."""

    def say(self, *words: object) -> None:
        os.write(1, (" ".join(map(str, (self._place, *words))) + "\n").encode())

    def run(self) -> None:
        longest_s = 0.0
        for step in range(1, 1 << 30):
            begin = time.perf_counter()
            kind = self._random.choice(("write", "write", "read", "read", "read", "remove", "contains"))
            getattr(self, f"_{kind}")()
            seconds = time.perf_counter() - begin
            if seconds > TIMEOUT_S:
                self.say("wrong", kind, "took", seconds)
            longest_s = max(longest_s, seconds)
            if not step % 10:
                self.say("calls", 10, longest_s)
                longest_s = 0.0

    def _write(self) -> None:
        numbers = self._random.sample(self._own, self._random.randint(1, 4))
        self._version += 1
        self.say("trying", *(word for number in numbers for word in (number, self._version)))
        results = self._store.write([Write(key_of(n), LABEL, content_of(n, self._version)) for n in numbers])
        self._check(results.outcomes, {ObjectStatus.STORED}, "write")
        if results.ok:
            self._last.update(dict.fromkeys(numbers, self._version))
            self.say("stored", *(word for number in numbers for word in (number, self._version)))

    def _remove(self) -> None:
        number = self._random.choice(self._own)
        self.say("dropping", number, 0)
        results = self._store.remove([key_of(number)])
        self._check(results.outcomes, {ObjectStatus.REMOVED, ObjectStatus.MISSING}, "remove")
        self._last[number] = None
        self.say("dropped", number, 0)

    def _contains(self) -> None:
        self._check(
            self._store.contains([key_of(number) for number in self._own]).outcomes,
            {ObjectStatus.FOUND, ObjectStatus.MISSING},
            "contains",
        )

    def _read(self) -> None:
        numbers = [self._random.choice(self._own), *self._random.sample(range(NUM_PLACES * NUMBERS_PER_PLACE), 2)]
        targets = [bytearray(size_of(number)) for number in numbers]
        reads = [Read(key_of(number), LABEL, target) for number, target in zip(numbers, targets, strict=True)]
        results = self._store.read_into(reads)
        self._check(results.outcomes, {ObjectStatus.FOUND, ObjectStatus.MISSING}, "read")
        for number, target, result in zip(numbers, targets, results, strict=True):
            version = version_in(number, bytes(target)) if result.ok else None
            if result.ok and version is None:
                self.say("wrong", "bytes", number)
            is_expected = version == self._last.get(number, version) or (self._is_full and version is None)
            if number in self._last and not is_expected:
                self.say("wrong", "version", number, version, self._last[number], result.reason)

    def _check(self, outcomes: tuple[ObjectResult, ...], allowed: set[ObjectStatus], call: str) -> None:
        for outcome in outcomes:
            # In the workload "full", a write may fail, because objects that other calls use cannot be evicted.
            is_full = self._is_full and "no room" in outcome.reason
            if outcome.status not in allowed and not is_full:
                self.say("wrong", call, outcome.status, outcome.reason)


class Crowd:
    """Starts and kills workers.

    `possible` contains, for each object, the versions that the store might contain now, and None if the object might be
    missing.
    """

    def __init__(self, folder: Path, workload: str = "roomy") -> None:
        self.folder, self.workload = folder, workload
        command = [sys.executable, __file__, str(folder), workload]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.possible: dict[int, set[int | None]] = {n: {None} for n in range(NUM_PLACES * NUMBERS_PER_PLACE)}
        self.pids: dict[int, int] = {}
        self.wrong: list[str] = []
        self.num_stored = self.num_calls = self.num_owners_killed = 0
        self.longest_s = 0.0
        self._seed = 0

    def start(self, place: int, sync: Sync) -> None:
        self._seed += 1
        self._send("start", place, self._seed, sync.value)
        while place not in self.pids:
            self.take_line()

    def kill(self, place: int) -> None:
        """Kill a worker and read its last lines."""
        pid = self.pids[place]
        self.num_owners_killed += pid == self.owner
        os.kill(pid, signal.SIGKILL)
        self._send("wait", place, pid)
        while place in self.pids:
            self.take_line()

    @property
    def owner(self) -> int:
        """Id of the process that owns the folder and assigns the slots, or 0 if the file LOCK is missing or empty."""
        try:
            return int((self.folder / "LOCK").read_text() or 0)
        except FileNotFoundError:
            return 0

    @property
    def owner_place(self) -> int | None:
        return next((place for place, pid in self.pids.items() if pid == self.owner), None)

    def take_line(self) -> None:
        line = self._process.stdout.readline()
        assert line, "the parent of the workers has ended"
        first, *rest = line.split()
        if first == "pid":
            self.pids[int(rest[0])] = int(rest[1])
            return
        if first == "dead":
            del self.pids[int(rest[0])]
            return
        word, *values = rest
        if word == "wrong":
            self.wrong.append(line)
        elif word == "calls":
            self.num_calls += int(values[0])
            self.longest_s = max(self.longest_s, float(values[1]))
        else:
            for number, version in zip(map(int, values[::2]), map(int, values[1::2]), strict=True):
                self._take(word, number, version)

    @property
    def figures(self) -> str:
        return (
            f"{self.num_calls} calls, {self.num_stored} objects stored, {self.num_owners_killed} owners killed, "
            f"longest call {self.longest_s:.2f} s of {TIMEOUT_S} s"
        )

    def _take(self, word: str, number: int, version: int) -> None:
        if word == "stored":
            self.possible[number] = {version}
            self.num_stored += 1
        elif word == "dropped":
            self.possible[number] = {None}
        else:
            self.possible[number].add(version if word == "trying" else None)

    def inspect(self) -> dict[str, int]:
        """Read all objects after the end of all workers. Return counts. All counts except `found` must be 0."""
        store = open_folder(self.folder, self.workload)
        found = lost = corrupt = 0
        for number, possible in self.possible.items():
            target = bytearray(size_of(number))
            result = store.read_into([Read(key_of(number), LABEL, target)])[0]
            version = version_in(number, bytes(target)) if result.ok else None
            found += result.ok
            corrupt += result.status not in (ObjectStatus.FOUND, ObjectStatus.MISSING) or (
                result.ok and version is None
            )
            lost += version not in possible and not (version is None and self.workload == "full")
        check_disk(store)
        files = [path for path in self.folder.glob("segment-*") if path.is_file()]
        leaked = sum(path.stat().st_size for path in files) - store.stats.used_bytes
        stats = store.stats
        beyond = max(0, stats.used_bytes - ROOM[self.workload])
        store.close()
        return {"found": found, "lost": lost, "corrupt": corrupt + stats.num_quarantined, "bytes": leaked + beyond}

    def _send(self, *words: object) -> None:
        print(*words, file=self._process.stdin, flush=True)

    def close(self) -> None:
        for place in [*self.pids]:
            self.kill(place)
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def kill_crowd(crowd: Crowd, num_kills: int, rng: random.Random) -> None:
    """Start a worker at every place. Then, `num_kills` times, kill a worker and start another one at its place.

    Every second victim is the owner of the folder, if the owner is a worker.
    """
    for place in range(NUM_PLACES):
        crowd.start(place, rng.choice([*Sync]))
    for number in range(num_kills):
        for _ in range(rng.randint(5, 300)):
            crowd.take_line()
        until = time.perf_counter_ns() + rng.randrange(3_000_000)
        while time.perf_counter_ns() < until:
            pass
        place = crowd.owner_place if number % 2 else None
        place = rng.randrange(NUM_PLACES) if place is None else place
        crowd.kill(place)
        crowd.start(place, rng.choice([*Sync]))
        assert not crowd.wrong, crowd.wrong[:5]


def main() -> None:
    for line in sys.stdin:
        command, place, *rest = line.split()
        if command == "wait":
            os.waitpid(int(rest[0]), 0)
            os.write(1, f"dead {place}\n".encode())
            continue
        pid = os.fork()
        if not pid:
            Worker(sys.argv[1], sys.argv[2], int(place), int(rest[0]), Sync(rest[1])).run()
        os.write(1, f"pid {place} {pid}\n".encode())


if __name__ == "__main__":
    main()
