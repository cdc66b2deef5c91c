"""`kvtier inspect` and `kvtier verify`: what a disk tier holds, and whether it still is what was stored."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.parser import Commands, add_command
from kvtier.cli.progress import Progress
from kvtier.errors import ArgumentError

if TYPE_CHECKING:
    from kvtier.storage import DiskStore, StoredObject

_UNBOUNDED = 1 << 62  # nothing is written, so nothing must go
_BATCH = 64


def add(commands: Commands) -> None:
    """Both of them."""
    text = "Show what is in the folder of a disk tier: objects by model and layout. No server may have it open."
    command = add_command(
        commands, "inspect", text, "kvtier inspect ~/kv\nkvtier inspect ~/kv --objects --json", inspect
    )
    command.add_argument("folder", help="the folder of the disk tier")
    command.add_argument("--objects", action="store_true", help="list every object, too")
    text = "Read every object of a disk tier, compare checksums, and quarantine what is damaged (exit code 1 then)."
    command = add_command(commands, "verify", text, "kvtier verify ~/kv\nkvtier verify ~/kv --json", verify)
    command.add_argument("folder", help="the folder of the disk tier")


def inspect(options: argparse.Namespace) -> int:
    """Count, and list if asked to."""
    with closing(_open(options.folder)) as store:
        objects = list(_objects(store))
        spaces = Counter(each.label.namespace.hex()[:12] for each in objects)
        sizes: Counter[str] = Counter()
        for each in objects:
            sizes[each.label.namespace.hex()[:12]] += each.nbytes
        stats = store.stats
    if options.objects:
        for each in objects:
            _tell(options, _row(each), "{key}  {namespace}  {bytes:>12,} bytes")
    told = {
        "folder": options.folder,
        "objects": len(objects),
        "bytes": sum(sizes.values()),
        "used_bytes": stats.used_bytes,
        "unreadable": stats.num_quarantined,
        "namespaces": {name: {"objects": count, "bytes": sizes[name]} for name, count in spaces.most_common()},
    }
    if options.json:
        print(json.dumps(told))
        return 0
    print(f"{len(objects)} objects of {told['bytes']:,} bytes, files of {stats.used_bytes:,} bytes in {options.folder}")
    for name, count in spaces.most_common():
        print(f"  namespace {name}  {count:>8} objects  {sizes[name]:>15,} bytes")
    if stats.num_quarantined:
        print(f"{stats.num_quarantined} records or files cannot be read and are in quarantine")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Read everything. The store compares checksums and quarantines by itself."""
    from kvtier.storage import Read, Status

    began, num_bytes, failed = time.monotonic(), 0, 0
    damaged: list[dict[str, Any]] = []
    with closing(_open(options.folder)) as store:
        objects = list(_objects(store))
        unreadable = store.stats.num_quarantined
        with Progress(len(objects), "objects") as bar:
            for first in range(0, len(objects), _BATCH):
                batch = objects[first : first + _BATCH]
                results = store.read_into([Read(each.key, each.label, bytearray(each.nbytes)) for each in batch])
                for each, outcome in zip(batch, results, strict=True):
                    num_bytes += outcome.nbytes
                    failed += outcome.status is Status.FAILED
                    if outcome.status is not Status.FOUND:
                        damaged.append({**_row(each), "status": outcome.status.value, "reason": outcome.reason})
                bar.update(first + len(batch), f"{num_bytes / 1e9:.1f} GB")
    for row in damaged:
        _tell(options, row, "{key}  {status}: {reason}")
    seconds = time.monotonic() - began
    told = {
        "folder": options.folder,
        "objects": len(objects),
        "bytes": num_bytes,
        "damaged": len(damaged) - failed,
        "failed": failed,
        "unreadable": unreadable,
        "seconds": round(seconds, 3),
    }
    text = "{objects} objects read, {bytes:,} bytes in {seconds} s: {damaged} damaged, {failed} could not be read"
    _tell(options, told, text)
    return 1 if damaged or unreadable else 0


def _open(folder: str) -> DiskStore:
    from kvtier.storage import DiskStore

    path = Path(folder)
    if not path.is_dir():
        raise ArgumentError(f"there is no folder {folder}")
    if not (path / "LOCK").exists():
        raise ArgumentError(f"{folder} is not the folder of a disk tier: it has no LOCK file, which each has")
    return DiskStore(folder, _UNBOUNDED)


def _objects(store: DiskStore) -> Iterator[StoredObject]:
    cursor = ""
    while True:
        page = store.scan(cursor)
        yield from page.objects
        cursor = page.cursor
        if not cursor:
            return


def _row(each: StoredObject) -> dict[str, Any]:
    return {"key": each.key.hex(), "namespace": each.label.namespace.hex()[:12], "bytes": each.nbytes}


def _tell(options: argparse.Namespace, row: dict[str, Any], text: str) -> None:
    print(json.dumps(row) if options.json else text.format(**row))
