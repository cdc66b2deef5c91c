"""From an object to the bytes of a slot and back: compression, checksum, and the alignment that direct I/O needs."""

from __future__ import annotations

import zlib
from enum import Enum

import numpy as np

from kvtier.errors import RangeError
from kvtier.storage.checksum import address_of, checksum, native
from kvtier.storage.record import Flags, Record
from kvtier.storage.store import Label, ObjectResult, ObjectStatus, Read
from kvtier.storage.workers import ALIGNMENT, Scratch, round_up


class Compression(Enum):
    """Lossless forms of a payload. Blocks of floating-point numbers shrink little: measure before choosing one."""

    NONE = "none"
    ZLIB = "zlib"


def encode(
    key: bytes,
    label: Label,
    payload: memoryview,
    compression: Compression = Compression.NONE,
    known: int | None = None,
) -> tuple[Record, memoryview]:
    """What is stored of an object, and its record; compressed only if that is shorter. `known`: the payload's checksum,
    where nothing is compressed and no token ids follow it."""
    stored, flags = payload, Flags.NONE
    if compression is Compression.ZLIB:
        packed = zlib.compress(payload, 1)
        if len(packed) < len(payload):
            stored, flags = memoryview(packed), Flags.ZLIB
    total = checksum(stored, label.token_ids) if known is None else known
    sizes = (len(payload), len(stored), total, len(label.token_ids))
    return Record(key, label.namespace, label.token_digest, *sizes, flags), stored


def lay_out(stored: memoryview, token_ids: bytes, scratch: Scratch, *, aligned: bool) -> list[memoryview]:
    """The buffers to write to a slot, without copying what is aligned already.

    stored     [ whole pages, in place        | rest ]
    scratch                                   [ rest | token ids | zeros ]
    """
    if not aligned:
        return [stored, memoryview(token_ids)]
    in_place = 0 if address_of(stored) % ALIGNMENT else len(stored) - len(stored) % ALIGNMENT
    rest = stored[in_place:]
    used = len(rest) + len(token_ids)
    page = scratch.take(round_up(used))
    copy_bytes(page[: len(rest)], rest)
    page[len(rest) : used] = token_ids
    page[used:] = bytes(len(page) - used)
    return [stored[:in_place], page]


def decode(record: Record, data: memoryview) -> tuple[memoryview, str]:
    """The object in a slot's bytes, verified; or nothing, and what is wrong with them."""
    empty = memoryview(b"")
    if len(data) < record.total_bytes:
        return empty, f"cut short: {len(data)} of {record.total_bytes} bytes"
    if checksum(data[: record.total_bytes]) != record.checksum:
        return empty, "the checksum differs"
    stored = data[: record.stored_bytes]
    if not record.flags & Flags.ZLIB:
        if record.stored_bytes != record.nbytes:  # checksums tell damage, not who made it: servers are shared
            return empty, f"contradicts itself: {record.stored_bytes} bytes stored of {record.nbytes}, uncompressed"
        return stored, ""
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(stored, record.nbytes)
    except zlib.error as error:
        return empty, f"cannot be decompressed: {error}"
    if len(payload) != record.nbytes:
        return empty, f"decompressed to {len(payload)} instead of {record.nbytes} bytes"
    return memoryview(payload), ""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as both have, without holding the GIL or filling the cache with what the GPU reads next."""
    if len(target) != len(source):
        raise RangeError(f"{len(source)} bytes cannot be copied to memory of {len(target)}")
    code = native().code
    if code is not None and len(source):
        code.copy(address_of(target), address_of(source), len(source))
    elif len(source):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def mismatch(label: Label, nbytes: int, read: Read, wanted: int) -> ObjectResult | None:
    """The miss of a reader who expects something else than what is stored."""
    reason = label.difference(read.label) or (nbytes != wanted and f"stored {nbytes} bytes, asked for {wanted}")
    return ObjectResult(ObjectStatus.MISSING, reason=reason) if reason else None
