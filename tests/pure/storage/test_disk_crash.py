"""kill -9: a writer dies at any moment; the next process finds what was reported stored, and no wrong byte."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import storage_crash
from kvtier.storage import DiskStore, Read, Sync
from storage_support import LABEL, key_of, payload_of, put

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
ROUNDS = 20 if SOAK == 1 else 200


class Writer:
    """storage_crash.py, and what it has said: number -> the versions that may be there after its death."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, storage_crash.__file__, str(folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.possible: dict[int, set[int | None]] = {number: {None} for number in range(storage_crash.NUMBERS)}
        self.num_stored = 0

    def kill_after(self, num_lines: int, spins: int, seed: int, sync: Sync) -> None:
        """Let it write, kill it a moment after it has said so many lines, take in what it said."""
        print("go", seed, sync.value, file=self._process.stdin, flush=True)
        word, pid = self._process.stdout.readline().split()
        while word != "pid":  # the child may speak before its parent
            self._take(word, pid)
            word, pid = self._process.stdout.readline().split()
        for _ in range(num_lines):
            self._take(*self._process.stdout.readline().split())
        until = time.perf_counter_ns() + spins
        while time.perf_counter_ns() < until:
            pass
        os.kill(int(pid), signal.SIGKILL)
        while (line := self._process.stdout.readline().split()) != ["dead"]:
            self._take(*line)

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


def version_found(store: DiskStore, number: int, possible: set[int | None]) -> int | None:
    """The version that is there: one of the possible ones, byte for byte, or none."""
    nbytes = storage_crash.size_of(number)
    room = bytearray(nbytes)
    outcome = store.read_into([Read(key_of(number), LABEL, room)])[0]
    if outcome.ok:
        found = [v for v in possible if v is not None and payload_of(number, nbytes, v) == room]
        assert found, f"{number} is neither what was stored nor what was being stored"
        return found[0]
    assert outcome.status.value == "missing", outcome
    return None


def test_a_writer_killed_at_random_moments_loses_nothing_it_reported_and_leaves_nothing_wrong_soak(tmp_path):
    folder, rng = tmp_path / "store", random.Random(7)
    writer = Writer(folder)
    try:
        for seed in range(1, ROUNDS + 1):
            writer.kill_after(rng.randint(0, 25), rng.randrange(3_000_000), seed, rng.choice([*Sync]))
            store = DiskStore(folder, **storage_crash.SETTINGS)
            assert store.stats.num_quarantined == 0, "an incomplete object was visible"
            for number, possible in writer.possible.items():
                found = version_found(store, number, possible)
                assert found in possible, f"{number}: {found} is there, stored was {possible}"
                writer.possible[number] = {found}
            store.check()  # every slot is an object's or free
            assert store.stats.num_evicted == 0
            files = sorted(path.name for path in folder.iterdir())
            assert sum((folder / name).stat().st_size for name in files if name != "LOCK") == store.stats.used_bytes
            store.close()
        assert writer.num_stored > ROUNDS
        store = DiskStore(folder, **storage_crash.SETTINGS)
        assert put(store, *range(1000, 1200)).ok, "the space is not there any more"
        store.check()
        store.close()
    finally:
        writer.close()
