"""Crash tests of the disk store: kill its process, or simulate a power failure, and count lost objects.

PYTHONPATH=.:tests python -m benchmarks.crash                 200 kills, 200 of sharers, 2,000 power failures; 110 s
PYTHONPATH=.:tests python -m benchmarks.crash --kills 2000 --folder /mnt/nvme/tmp

Kills (tests/storage_crash.py): a process writes, replaces and removes objects of 5 kB to 700 kB. It is killed with
SIGKILL at a random moment. The next process opens the folder and reads every object.

Sharers (tests/storage_sharing.py): eight processes read and write one folder. The owner of the folder, or another
process, is killed with SIGKILL at a random moment, and a new process replaces it.

Power failures (tests/storage_power.py): a store on a simulated disk runs random calls, and the power fails before a
random file operation. Each sector and each file name that was not synced is either kept or lost. Then the store is
opened and every object is read.

All of them run with both sync policies.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.storage import Sync
from storage_crash import NUMBERS, Victim
from storage_power import Call, PowerFailure
from storage_sharing import TIMEOUT_S, Crowd, kill_crowd
from storage_support import check_disk, put


def main() -> None:
    parser = arguments("Kills and power failures of the disk store.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cuts", type=int, default=2000, help="power failures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the killed stores")
    options = parser.parse_args()
    rows, bars = [], []
    for row, more_bars in (
        kills(options.kills, options.seed, options.folder),
        sharers(options.kills, options.seed, options.folder),
        cuts(options.cuts, options.seed),
    ):
        print_table([row])
        rows.append(row)
        bars += more_bars
    report("crash", rows, bars, options.results)


def kills(count: int, seed: int, parent: Path) -> tuple[Row, list[Bar]]:
    """Kill a writer `count` times, always on the same folder."""
    rng, begin = random.Random(seed), time.perf_counter()
    checked = found = lost = corrupt = leaked = 0
    with tempfile.TemporaryDirectory(prefix="kvtier-crash-", dir=parent) as folder:
        victim = Victim(Path(folder) / "store", "large")
        try:
            for number in progress("kills", count):
                victim.kill_after(rng.randint(0, 25), rng.randrange(8_000_000), number, rng.choice([*Sync]))
                damage = victim.inspect()
                checked, found = checked + NUMBERS, found + damage.found
                lost, corrupt = lost + damage.lost, corrupt + damage.corrupt
                leaked += damage.leaked_bytes + damage.evicted
        finally:
            victim.close()
        store = victim.workload.open(victim.folder)
        refilled = sum(put(store, i, nbytes=700_000).ok for i in range(1000, 1070))  # 70 % of the space
        check_disk(store)
        store.close()
    row = {"crash": "kill -9", "times": count, "objects stored": victim.num_stored, "checked": checked, "found": found}
    row |= {"lost": lost, "corrupt": corrupt, "bytes leaked": leaked, "refilled": f"{refilled} of 70"}
    return row | {"seconds": time.perf_counter() - begin}, [
        at_least("kills", count, 200),
        at_most("kills: reported stored and lost", lost, 0),
        at_most("kills: corrupt objects visible", corrupt, 0),
        at_most("kills: bytes leaked, objects evicted", leaked, 0),
        at_least("kills: objects that find room afterwards", refilled, 70),
    ]


def sharers(count: int, seed: int, parent: Path) -> tuple[Row, list[Bar]]:
    """Kill one of eight processes that use one folder `count` times."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvtier-crash-", dir=parent) as folder:
        crowd = Crowd(Path(folder) / "store")
        try:
            kill_crowd(crowd, count, random.Random(seed))  # raises at the first wrong or late result of a process
        finally:
            crowd.close()
        damage = crowd.inspect()
    row = {"crash": "kill -9 of sharers", "times": count, "owners": crowd.num_owners_killed, "calls": crowd.num_calls}
    row |= {"objects stored": crowd.num_stored, "longest call s": crowd.longest_s, **damage}
    return row | {"seconds": time.perf_counter() - begin}, [
        at_least("sharers: kills", count, 200),
        at_most("sharers: reported stored and lost", damage["lost"], 0),
        at_most("sharers: corrupt objects visible", damage["corrupt"] + len(crowd.wrong), 0),
        at_most("sharers: bytes leaked", damage["bytes"], 0),
        at_most("sharers: longest call over its deadline", crowd.longest_s / TIMEOUT_S, 1.0),
    ]


def cuts(count: int, seed: int) -> tuple[Row, list[Bar]]:
    """Simulate `count` power failures, each with a new store and other calls. Half of the stores are nearly full."""
    rng, begin = random.Random(seed), time.perf_counter()
    found = durable = lost = refilled = leaked = 0
    for number in progress("power failures", count):
        room, sync = rng.choice((64 << 10, 1 << 20)), rng.choice([*Sync])
        with tempfile.TemporaryDirectory() as folder:  # for the lock only: the disk is simulated
            failure = PowerFailure(folder, room, sync, rng.randint(1, 150), number)
            failure.run_until_failure(some_calls(rng))
            checked = failure.inspect()  # raises if a byte is wrong
        found, durable, lost = found + checked.found, durable + checked.durable, lost + checked.lost
        refilled, leaked = refilled + checked.refilled, leaked + checked.leaked_bytes
    row = {"crash": "power failure", "times": count, "reported durable": durable, "checked": 12 * count}
    row |= {
        "found": found,
        "lost": lost,
        "corrupt": 0,
        "bytes leaked": leaked,
        "refilled": f"{refilled} of {12 * count}",
    }
    return row | {"seconds": time.perf_counter() - begin}, [
        at_most("power failures: reported durable and lost", lost, 0),
        at_most("power failures: bytes set aside for good", leaked, 0),
        at_most("power failures: objects that find no room afterwards", 12 * count - refilled, 0),
    ]


def some_calls(rng: random.Random) -> list[Call]:
    """Return up to twenty random calls on twelve objects."""
    kinds = ("write", "write", "write", "remove", "read")
    return [
        (rng.choice(kinds), rng.sample(range(12), rng.randint(1, 4)), rng.choice((100, 5000)))
        for _ in range(rng.randint(1, 20))
    ]


def progress(what: str, count: int) -> Iterator[int]:
    """Yield the numbers from 1 to `count` and print the progress."""
    for number in range(1, count + 1):
        yield number
        if number % max(1, count // 20) == 0:
            print(f"\r{number} of {count} {what}", end="\n" if number == count else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
