"""Crashes: what a disk store loses when its process is killed, or the power fails. Nothing.

PYTHONPATH=.:tests python -m benchmarks.crash                 200 kills, 2,000 power failures; 90 s
PYTHONPATH=.:tests python -m benchmarks.crash --kills 2000 --folder /mnt/nvme/tmp

Kills: a process that writes, replaces and removes objects of 5 kB to 700 kB is killed with -9 at a random moment; the
next one opens the folder and reads every object. Power failures: a store on a simulated disk does random calls, and
before a random one of its file operations the power fails; what was not synced is there, or not, or in part, sector by
sector and name by name; that is opened and read. Both with both policies (sync at close, sync at write). The machinery
is that of the tests (tests/storage_crash.py, tests/storage_power.py); here it runs for longer and is counted.
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
from storage_support import put


def main() -> None:
    """Break it, look, count."""
    parser = arguments("Kills and power failures of the disk store.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cuts", type=int, default=2000, help="power failures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where killed stores live")
    options = parser.parse_args()
    rows, bars = [], []
    for row, held in (kills(options.kills, options.seed, options.folder), cuts(options.cuts, options.seed)):
        print_table([row])
        rows.append(row)
        bars += held
    report("crash", rows, bars, options.results)


def kills(count: int, seed: int, parent: Path) -> tuple[Row, list[Bar]]:
    """Kill a writer so many times, always on the same folder."""
    rng, begin = random.Random(seed), time.perf_counter()
    checked = found = lost = corrupt = leaked = 0
    with tempfile.TemporaryDirectory(prefix="kvtier-crash-", dir=parent) as folder:
        victim = Victim(Path(folder) / "store", "large")
        try:
            for number in told("kills", count):
                victim.kill_after(rng.randint(0, 25), rng.randrange(8_000_000), number, rng.choice([*Sync]))
                damage = victim.inspect()
                checked, found = checked + NUMBERS, found + damage.found
                lost, corrupt = lost + damage.lost, corrupt + damage.corrupt
                leaked += damage.leaked_bytes + damage.evicted
        finally:
            victim.close()
        store = victim.workload.open(victim.folder)
        refilled = sum(put(store, i, nbytes=700_000).ok for i in range(1000, 1070))  # 70 % of the room
        store.check()
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


def cuts(count: int, seed: int) -> tuple[Row, list[Bar]]:
    """Let the power fail so many times, each time under a new store with other calls, half of them short of room."""
    rng, begin = random.Random(seed), time.perf_counter()
    found = durable = lost = refilled = leaked = 0
    for number in told("power failures", count):
        room, sync = rng.choice((64 << 10, 1 << 20)), rng.choice([*Sync])
        with tempfile.TemporaryDirectory() as folder:  # for the lock; all else is in the simulation
            failure = PowerFailure(folder, room, sync, rng.randint(1, 150), number)
            failure.run_until_it_fails(some_calls(rng))
            checked = failure.inspect()  # raises at a wrong byte
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
    """Up to twenty calls on twelve objects."""
    kinds = ("write", "write", "write", "remove", "read")
    return [
        (rng.choice(kinds), rng.sample(range(12), rng.randint(1, 4)), rng.choice((100, 5000)))
        for _ in range(rng.randint(1, 20))
    ]


def told(what: str, count: int) -> Iterator[int]:
    """The numbers from 1 on, with a line that says how far it is."""
    for number in range(1, count + 1):
        yield number
        if number % max(1, count // 20) == 0:
            print(f"\r{number} of {count} {what}", end="\n" if number == count else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
