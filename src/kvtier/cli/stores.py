"""`kvtier inspect` and `kvtier verify`: what a store holds, and whether it still is what was stored."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.parser import Commands, ProgressLine, add_command
from kvtier.errors import ArgumentError, StoreError

if TYPE_CHECKING:
    from kvtier.storage import Store

_UNBOUNDED = 1 << 62  # nothing is written, so nothing must go
_WHERE = "the folder of a disk tier, or the URL of a store, such as redis://host or s3://bucket/prefix"


def add(commands: Commands) -> None:
    """Both of them."""
    text = "Show what is in a store: objects by model and layout. No server may have a disk tier open meanwhile."
    command = add_command(
        commands, "inspect", text, "kvtier inspect ~/kv\nkvtier inspect redis://cache --objects --json", inspect
    )
    command.add_argument("where", help=_WHERE)
    command.add_argument("--objects", action="store_true", help="list every object, too")
    text = "Read every object of a store, compare checksums, and quarantine what is damaged (exit code 1 then)."
    command = add_command(commands, "verify", text, "kvtier verify ~/kv\nkvtier verify s3://bucket/kv --json", verify)
    command.add_argument("where", help=_WHERE)


def inspect(options: argparse.Namespace) -> int:
    """Count, and list if asked to."""
    from kvtier.storage.audit import pages, take_inventory

    with closing(_open(options.where)) as store:
        if options.objects:
            for page in pages(store):
                for each in page.objects:
                    row = {"key": each.key.hex(), "namespace": each.label.namespace.hex()[:12], "bytes": each.nbytes}
                    _tell(options, row, "{key}  {namespace}  {bytes:>12,} bytes")
        found, stats = take_inventory(store), store.stats
    if found.reason:
        raise StoreError(f"{_shown(options.where)} could not be listed to its end: {found.reason}")
    told = {
        "store": _shown(options.where),
        "objects": found.num_objects,
        "bytes": found.nbytes,
        "used_bytes": stats.used_bytes,
        "unreadable": found.num_unreadable + stats.num_quarantined,
        "namespaces": {u.namespace.hex()[:12]: {"objects": u.num_objects, "bytes": u.nbytes} for u in found.usages},
    }
    if options.json:
        print(json.dumps(told))
        return 0
    files = f", files of {stats.used_bytes:,} bytes" if stats.used_bytes else ""
    print(f"{found.num_objects} objects of {found.nbytes:,} bytes{files} in {told['store']}")
    for usage in found.usages:
        name = usage.namespace.hex()[:12]
        print(f"  namespace {name}  {usage.num_objects:>8} objects  {usage.nbytes:>15,} bytes")
    if told["unreadable"]:
        print(f"{told['unreadable']} records, files or objects cannot be read")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Read everything. The store compares checksums and quarantines by itself."""
    from kvtier.storage import ObjectStatus
    from kvtier.storage.audit import verify as read_all

    with closing(_open(options.where)) as store:
        unreadable = store.stats.num_quarantined
        with ProgressLine(store.stats.num_objects, "objects") as bar:
            found = read_all(store, progress=lambda count, nbytes: bar.update(count, f"{nbytes / 1e9:.1f} GB"))
    for defect in found.defects:
        row = {"key": defect.key.hex(), "status": defect.status.value, "reason": defect.reason}
        _tell(options, row, "{key}  {status}: {reason}")
    if found.reason:
        raise StoreError(f"{_shown(options.where)} could not be read to its end: {found.reason}")
    damaged = sum(defect.status is ObjectStatus.CORRUPT for defect in found.defects)
    told = {
        "store": _shown(options.where),
        "objects": found.num_sound + len(found.defects),
        "bytes": found.nbytes,
        "damaged": damaged,
        "failed": len(found.defects) - damaged,
        "gone": found.num_gone,
        "unreadable": unreadable + found.num_unreadable,
        "seconds": round(found.seconds, 3),
    }
    text = "{objects} objects read, {bytes:,} bytes in {seconds} s: {damaged} damaged, {failed} could not be read"
    _tell(options, told, text)
    return 0 if found.ok and not unreadable else 1


def _open(where: str) -> Store:
    from kvtier.storage import DiskStore
    from kvtier.storage.open import open_store

    if re.match("[a-z0-9]+:", where) and not Path(where).exists():
        return open_store(where)
    if not Path(where).is_dir():
        raise ArgumentError(f"there is no folder {where}, and it is no URL of a store")
    if not (Path(where) / "LOCK").exists():
        raise ArgumentError(f"{where} is not the folder of a disk tier: it has no LOCK file, which each has")
    return DiskStore(where, _UNBOUNDED)


def _shown(where: str) -> str:
    """Without a password."""
    return re.sub("//[^/@]*@", "//", where)


def _tell(options: argparse.Namespace, row: dict[str, Any], text: str) -> None:
    print(json.dumps(row) if options.json else text.format(**row))
