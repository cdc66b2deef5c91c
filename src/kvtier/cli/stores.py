"""Store commands: `inspect` lists the contents, `verify` reads all objects, `keys` lists or deletes tenant keys."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.parser import Commands, add_command, progress_bar
from kvtier.errors import ArgumentError, StoreError

if TYPE_CHECKING:
    from kvtier.storage import Store

_UNBOUNDED = 1 << 62  # with this capacity in bytes, a store never evicts objects
_SECRET = "file with the 32 bytes that encrypt the store"
_WHERE = "folder of a disk tier, or URL of a store such as redis://host or s3://bucket/prefix"


def add(commands: Commands) -> None:
    text = "Show the contents of a store by model and layout. Works while a server uses the store."
    examples = "kvtier inspect ~/kv\nkvtier inspect redis://cache --objects --json"
    command = add_command(commands, "inspect", text, examples, inspect, "STORE")
    command.add_argument("where", metavar="STORE", help=_WHERE)
    command.add_argument("--objects", action="store_true", help="also list every object")
    command.add_argument("--secret", metavar="FILE", help=_SECRET)
    text = "Verify the checksums of all objects in a store. Quarantines damaged objects. Exits with 1 for any defect."
    examples = "kvtier verify ~/kv\nkvtier verify s3://bucket/kv --json"
    command = add_command(commands, "verify", text, examples, verify, "STORE")
    command.add_argument("where", metavar="STORE", help=_WHERE)
    command.add_argument("--secret", metavar="FILE", help=_SECRET)
    text = "List the tenants of an encrypted disk tier. Deleting the key of a tenant deletes its data on this disk."
    examples = "kvtier keys ~/kv/keys --secret secret\nkvtier keys ~/kv/keys --secret secret --delete shop"
    command = add_command(commands, "keys", text, examples, keys, "FOLDER")
    command.add_argument("folder", metavar="FOLDER", help="folder with the keys; works while a server uses it")
    command.add_argument("--secret", metavar="FILE", required=True, help=_SECRET)
    command.add_argument("--delete", metavar="TENANT", help="delete the key of this tenant")


def inspect(options: argparse.Namespace) -> int:
    from kvtier.storage.audit import pages, take_inventory

    with closing(_open(options.where, options.secret)) as store:
        if options.objects:
            for page in pages(store):
                for item in page.objects:
                    row = {"key": item.key.hex(), "namespace": item.label.namespace.hex()[:12], "bytes": item.nbytes}
                    _print_row(options, row, "{key}  {namespace}  {bytes:>12,} bytes")
        inventory, stats = take_inventory(store), store.stats
    if inventory.reason:
        raise StoreError(f"{_shown(options.where)} could not be listed completely: {inventory.reason}")
    summary = {
        "store": _shown(options.where),
        "objects": inventory.num_objects,
        "bytes": inventory.nbytes,
        "used_bytes": stats.used_bytes,
        "unreadable": inventory.num_unreadable + stats.num_quarantined,
        "namespaces": {key.hex()[:12]: {"objects": n, "bytes": size} for key, (n, size) in inventory.usages.items()},
    }
    if options.json:
        print(json.dumps(summary))
        return 0
    files = f", files of {stats.used_bytes:,} bytes" if stats.used_bytes else ""
    print(f"{inventory.num_objects} objects ({inventory.nbytes:,} bytes{files}) in {summary['store']}")
    for namespace, (num_objects, nbytes) in inventory.usages.items():
        print(f"  namespace {namespace.hex()[:12]}  {num_objects:>8} objects  {nbytes:>15,} bytes")
    if summary["unreadable"]:
        print(f"{summary['unreadable']} records, files or objects cannot be read")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Read all objects. The store verifies their checksums and quarantines damaged objects."""
    from kvtier.storage import ObjectStatus
    from kvtier.storage.audit import verify as read_all

    with closing(_open(options.where, options.secret)) as store:
        unreadable = store.stats.num_quarantined
        with progress_bar(store.stats.num_objects, "objects") as update:
            result = read_all(store, progress=lambda count, nbytes: update(count, f"{nbytes / 1e9:.1f} GB"))
    for key, defect in result.defects:
        row = {"key": key.hex(), "status": defect.status.value, "reason": defect.reason}
        _print_row(options, row, "{key}  {status}: {reason}")
    if result.reason:
        raise StoreError(f"{_shown(options.where)} could not be read completely: {result.reason}")
    damaged = sum(defect.status is ObjectStatus.CORRUPT for _, defect in result.defects)
    summary = {
        "store": _shown(options.where),
        "objects": result.num_sound + len(result.defects),
        "bytes": result.nbytes,
        "damaged": damaged,
        "failed": len(result.defects) - damaged,
        "gone": result.num_gone,
        "unreadable": unreadable + result.num_unreadable,
        "seconds": round(result.seconds, 3),
    }
    counts = "{damaged} damaged, {failed} could not be read, {unreadable} invalid records or files"
    _print_row(options, summary, "{objects} objects checked, {bytes:,} bytes in {seconds} s: " + counts)
    return 0 if result.ok and not unreadable else 1


def keys(options: argparse.Namespace) -> int:
    """List the tenants with a key, or delete the key of one tenant."""
    from kvtier.storage.disk.keys import TenantKeys

    if not Path(options.folder).is_dir():
        raise ArgumentError(f"{options.folder} is not a folder")
    keys = TenantKeys(options.folder, Path(options.secret).read_bytes())
    if options.delete is None:
        for tenant in keys.tenants:
            _print_row(options, {"tenant": tenant.decode(errors="replace")}, "{tenant}")
        return 0
    if not keys.delete(options.delete.encode("utf-8", "surrogatepass")):
        raise ArgumentError(f"{options.folder} has no key of tenant {options.delete!r} that this secret can decrypt")
    _print_row(options, {"deleted": options.delete}, "deleted the key of {deleted}")
    return 0


def _open(where: str, secret_file: str | None) -> Store:
    from kvtier.storage import DiskStore
    from kvtier.storage.open import open_store

    secret = Path(secret_file).read_bytes() if secret_file else None
    if re.match("[a-z0-9]+:", where) and not Path(where).exists():
        return open_store(where, secret=secret)
    if not Path(where).is_dir():
        raise ArgumentError(f"{where} is neither a folder nor the URL of a store")
    if not (Path(where) / "LOCK").exists():
        raise ArgumentError(f"{where} is not the folder of a disk tier: it has no LOCK file")
    return DiskStore(where, _UNBOUNDED, secret=secret)


def _shown(where: str) -> str:
    """Remove user name and password from a URL."""
    return re.sub("//[^/@]*@", "//", where)


def _print_row(options: argparse.Namespace, row: dict[str, Any], text: str) -> None:
    print(json.dumps(row) if options.json else text.format(**row))
