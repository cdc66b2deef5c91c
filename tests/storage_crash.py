"""Kill a process with SIGKILL while it writes to a DiskStore, and check the store afterwards.

The class Victim starts a parent process with `python storage_crash.py FOLDER WORKLOAD`.

The parent reads lines "go SEED SYNC". For each line, it forks a process that writes objects ("the writer"). A fork is
faster than a new Python process. The parent prints "pid N" when the writer has started and "dead" when the writer has
ended. The writer prints lines with the numbers and versions of objects:

    trying NUMBER VERSION ..     before each write
    stored NUMBER VERSION ..     after each write that stored all objects
    dropping NUMBER VERSION ..   before each removal
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvtier.storage import DiskStore, ObjectStatus, Read, Sync
from storage_support import LABEL, check_disk, key_of, payload_of, write_of

NUMBERS = 48


@dataclass(frozen=True)
class Workload:
    """Object sizes and store limits. The store has room for all objects, so no object is evicted."""

    sizes: tuple[int, ...]
    max_bytes: int
    segment_bytes: int
    secret: bytes | None = None

    def size_of(self, number: int) -> int:
        return self.sizes[number % len(self.sizes)]

    def open(self, folder: str | Path, sync: Sync = Sync.CLOSE) -> DiskStore:
        limits = {"segment_bytes": self.segment_bytes, "min_free_bytes": 0, "num_threads": 3}
        return DiskStore(folder, self.max_bytes, sync=sync, secret=self.secret, **limits)


WORKLOADS = {
    "small": Workload((5000, 20_000), 4 << 20, 512 << 10),
    "encrypted": Workload((5000, 20_000), 4 << 20, 512 << 10, bytes(32)),
    "large": Workload((5000, 20_000, 700_000), 64 << 20, 4 << 20),
}


def write_line(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def write_until_killed(folder: str, workload: Workload, seed: int, sync: Sync) -> None:
    rng, version = random.Random(seed), seed * 1_000_000  # each seed has its own versions
    store = workload.open(folder, sync)
    while True:
        numbers = rng.sample(range(NUMBERS), rng.randint(1, 6))
        version += 1
        words = [word for number in numbers for word in (number, version)]
        if rng.random() < 0.1:
            write_line("dropping", *words)
            store.remove([key_of(number) for number in numbers])
            continue
        write_line("trying", *words)
        if store.write([write_of(number, workload.size_of(number), version) for number in numbers]).ok:
            write_line("stored", *words)


class Victim:
    """The parent process and its writers.

    `possible` contains, for each object, the versions that the store might contain now, and None if the object might be
    missing.
    """

    def __init__(self, folder: Path, workload: str = "small") -> None:
        self.folder, self.workload = folder, WORKLOADS[workload]
        command = [sys.executable, __file__, str(folder), workload]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.possible: dict[int, set[int | None]] = {number: {None} for number in range(NUMBERS)}
        self.num_stored = 0

    def kill_after(self, num_lines: int, spin_ns: int, seed: int, sync: Sync) -> None:
        """Start a writer. Read at least `num_lines` lines, wait `spin_ns` ns, kill the writer, and read the rest."""
        print("go", seed, sync.value, file=self._process.stdin, flush=True)
        word, pid = self._process.stdout.readline().split()
        while word != "pid":  # the first lines of the writer can arrive before the line of the parent
            self._take(word, pid)
            word, pid = self._process.stdout.readline().split()
        for _ in range(num_lines):
            self._take(*self._process.stdout.readline().split())
        until = time.perf_counter_ns() + spin_ns
        while time.perf_counter_ns() < until:
            pass
        os.kill(int(pid), signal.SIGKILL)
        while (line := self._process.stdout.readline().split()) != ["dead"]:
            self._take(*line)

    def inspect(self) -> Damage:
        """Open the store and read all objects. Then `possible` contains what was read."""
        store = self.workload.open(self.folder)
        lost = corrupt = found = 0
        for number, possible in self.possible.items():
            target = bytearray(self.workload.size_of(number))
            result = store.read_into([Read(key_of(number), LABEL, target)])[0]
            matching = {v for v in possible if v is not None and payload_of(number, len(target), v) == target}
            found += result.ok
            corrupt += not ((result.ok and matching) or result.status is ObjectStatus.MISSING)
            lost += not result.ok and None not in possible
            self.possible[number] = matching if result.ok else {None}
        check_disk(store)  # fails if the store has lost a slot
        damage = Damage(
            found, lost, corrupt + store.stats.num_quarantined, store.stats.num_evicted, self._leaked(store)
        )
        store.close()
        return damage

    def _leaked(self, store: DiskStore) -> int:
        """Return the size of all files, except LOCK and those in keys/, minus the size that the store reports."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.name != "LOCK"]
        files = [path for path in files if path.parent.name != "keys"]
        return sum(path.stat().st_size for path in files) - store.stats.used_bytes

    def _take(self, word: str, *rest: str) -> None:
        for number, version in zip(map(int, rest[::2]), map(int, rest[1::2]), strict=True):
            if word == "stored":
                self.possible[number] = {version}
                self.num_stored += 1
            else:
                self.possible[number].add(version if word == "trying" else None)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Damage:
    """Result of an inspection. All numbers except `found` must be 0."""

    found: int
    lost: int
    """Number of objects that must be in the store but could not be read."""
    corrupt: int
    """Number of reads that failed or returned wrong bytes, plus the number of quarantined objects."""
    evicted: int
    leaked_bytes: int

    @property
    def is_none(self) -> bool:
        return not (self.lost or self.corrupt or self.evicted or self.leaked_bytes)


def main() -> None:
    for line in sys.stdin:
        _, seed, sync = line.split()
        pid = os.fork()
        if not pid:
            write_until_killed(sys.argv[1], WORKLOADS[sys.argv[2]], int(seed), Sync(sync))
        write_line("pid", pid)
        os.waitpid(pid, 0)
        write_line("dead")


if __name__ == "__main__":
    main()
