"""A process that writes to a DiskStore until it is killed; run by test_disk_crash.py, which kills it.

python storage_crash.py FOLDER

Reads "go SEED SYNC" lines. For each it forks a writer, so that a round costs no start of Python, and says "pid N" and,
when that writer is dead, "dead". The writer says "trying NUMBER VERSION .." before and "stored NUMBER VERSION .." after
each call that reported all of it stored.
"""

import os
import random
import sys

from kvtier.storage import DiskStore, Sync
from storage_support import key_of, write_of

NUMBERS = 48
SETTINGS = {"max_bytes": 4 << 20, "segment_bytes": 512 << 10, "min_free_bytes": 0, "num_threads": 3}
SIZES = (5000, 20_000)


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def write_for_ever(folder: str, seed: int, sync: Sync) -> None:
    rng, version = random.Random(seed), seed * 1_000_000
    store = DiskStore(folder, sync=sync, **SETTINGS)
    while True:
        numbers = rng.sample(range(NUMBERS), rng.randint(1, 6))
        version += 1
        told = [word for number in numbers for word in (number, version)]
        if rng.random() < 0.1:
            say("dropping", *told)
            store.remove([key_of(number) for number in numbers])
            continue
        say("trying", *told)
        if store.write([write_of(number, size_of(number), version) for number in numbers]).ok:
            say("stored", *told)


def main() -> None:
    for line in sys.stdin:
        _, seed, sync = line.split()
        pid = os.fork()
        if not pid:
            write_for_ever(sys.argv[1], int(seed), Sync(sync))
        say("pid", pid)
        os.waitpid(pid, 0)
        say("dead")


if __name__ == "__main__":
    main()
