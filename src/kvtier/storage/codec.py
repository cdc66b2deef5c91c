"""Encoding of objects to stored bytes and back: compression, checksum, and alignment for direct I/O."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Sequence
from enum import Enum

import numpy as np

from kvtier.errors import RangeError
from kvtier.storage.checksum import address_of, checksum, checksum_joined, native, piece_table
from kvtier.storage.record import Flags, Record
from kvtier.storage.store import Label, ObjectResult, ObjectStatus, Read, Scattered, num_bytes

ALIGNMENT = 4096
"""Alignment of addresses, offsets and lengths for direct I/O. It is sufficient for all known disks."""
_HUGE = 2 << 20  # bytes of a huge page


def round_up(nbytes: int, multiple: int = ALIGNMENT) -> int:
    return -(-nbytes // multiple) * multiple


class Scratch:
    """Aligned memory for one thread. It grows to the largest size that was requested."""

    def __init__(self) -> None:
        self._memory, self._gathered = mmap.mmap(-1, ALIGNMENT), mmap.mmap(-1, ALIGNMENT)

    def take(self, nbytes: int) -> memoryview:
        """Return uninitialized bytes. They are valid until the next `take`."""
        self._memory = _at_least(self._memory, nbytes)
        return memoryview(self._memory)[:nbytes]

    def gather(self, pieces: Sequence[memoryview]) -> memoryview:
        """Return the bytes of all pieces. Several pieces are copied, and the copy is valid until the next gathering."""
        if len(pieces) == 1:
            return pieces[0]
        gathered = self._gathering(num_bytes(pieces))
        gather(gathered, pieces)
        return gathered

    def gather_checksum(self, pieces: Sequence[memoryview]) -> tuple[memoryview, int]:
        """Return a copy of the bytes of all pieces, and their checksum. The copy is valid until the next gathering."""
        gathered = self._gathering(num_bytes(pieces))
        return gathered, checksum_joined(pieces, gathered)

    def _gathering(self, nbytes: int) -> memoryview:
        self._gathered = _at_least(self._gathered, nbytes)
        return memoryview(self._gathered)[:nbytes]


def _at_least(memory: mmap.mmap, nbytes: int) -> mmap.mmap:
    if len(memory) >= nbytes:
        return memory
    larger = mmap.mmap(-1, round_up(nbytes, _HUGE))
    larger.madvise(mmap.MADV_HUGEPAGE)
    return larger


class Compression(Enum):
    """Lossless compression of payloads. Floating-point blocks shrink little, so measure first."""

    NONE = "none"
    ZLIB = "zlib"


def record_of(key: bytes, label: Label, nbytes: int, known: int) -> Record:
    """Return the record of an uncompressed object without token ids. `known` is the checksum of the object."""
    return Record(key, label.namespace, label.token_digest, nbytes, nbytes, known)


def encode(
    key: bytes,
    label: Label,
    payload: memoryview,
    compression: Compression = Compression.NONE,
    known: int | None = None,
) -> tuple[Record, memoryview]:
    """Return the record and the stored bytes of an object. Compressed bytes are stored only if they are shorter.

    `known` is the checksum of the stored bytes and the token ids, if the caller has computed it. Only an encrypted
    DiskStore passes another checksum: that of the first 4096 bytes of the payload (sealing.py).
    """
    stored, flags = payload, Flags.NONE
    if compression is Compression.ZLIB:
        packed = zlib.compress(payload, 1)
        if len(packed) < len(payload):
            stored, flags = memoryview(packed), Flags.ZLIB
    total = checksum(stored, label.token_ids) if known is None else known
    sizes = (len(payload), len(stored), total, len(label.token_ids))
    return Record(key, label.namespace, label.token_digest, *sizes, flags), stored


def is_aligned(pieces: Sequence[memoryview]) -> bool:
    """True if direct I/O can write these pieces without a copy."""
    if isinstance(pieces, Scattered):
        return pieces.is_aligned(ALIGNMENT, address_of(pieces.memory))
    return not any((address_of(piece) | len(piece)) % ALIGNMENT for piece in pieces)


def lay_out(stored: memoryview, token_ids: bytes, scratch: Scratch, *, aligned: bool) -> list[memoryview]:
    """Return the buffers to write to a slot on disk. With `aligned`, align them for direct I/O with few copies:

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
    """Verify stored bytes and return the payload. For invalid bytes, return empty memory and the reason."""
    empty = memoryview(b"")
    if len(data) < record.total_bytes:
        return empty, f"truncated: {len(data)} of {record.total_bytes} bytes"
    # If the payload was encrypted on disk (`seal`), its decryption has already verified the bytes.
    if record.seal is None and checksum(data[: record.total_bytes]) != record.checksum:
        return empty, "the checksum differs"
    stored = data[: record.stored_bytes]
    if not record.flags & Flags.ZLIB:
        if record.stored_bytes != record.nbytes:  # another client of a shared server can forge a valid checksum
            return empty, f"inconsistent: {record.stored_bytes} uncompressed bytes stored instead of {record.nbytes}"
        return stored, ""
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(stored, record.nbytes)
    except zlib.error as error:
        return empty, f"cannot decompress: {error}"
    if len(payload) != record.nbytes:
        return empty, f"decompressed to {len(payload)} instead of {record.nbytes} bytes"
    return memoryview(payload), ""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy without holding the GIL. native.c bypasses the CPU cache, because the GPU reads the bytes next."""
    if len(target) != len(source):
        raise RangeError(f"cannot copy {len(source)} bytes into {len(target)} bytes of memory")
    code = native().code
    if code is not None and len(source):
        code.copy(address_of(target), address_of(source), len(source))
    elif len(source):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def gather(target: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copy the bytes of all pieces into `target`, one after another. The sizes must match."""
    _copy_pieces(pieces, target, is_gather=True)


def scatter(pieces: Sequence[memoryview], source: memoryview) -> None:
    """Copy `source` into pieces of memory, one after another. The sizes must match."""
    if len(pieces) == 1:
        copy_bytes(pieces[0], source)
    else:
        _copy_pieces(pieces, source, is_gather=False)


def _copy_pieces(pieces: Sequence[memoryview], whole: memoryview, *, is_gather: bool) -> None:
    if num_bytes(pieces) != len(whole):
        raise RangeError(f"pieces of {num_bytes(pieces)} bytes do not match memory of {len(whole)} bytes")
    code = native().code
    if code is not None and len(whole):  # one call for all pieces, because a call takes longer than a small copy
        table = piece_table(pieces)
        first, row = table.ctypes.data, table.strides[0]
        (code.gather if is_gather else code.scatter)(len(pieces), first, first + row, address_of(whole))
        return
    at = 0
    for piece in pieces:
        part = whole[at : at + len(piece)]
        copy_bytes(part, piece) if is_gather else copy_bytes(piece, part)
        at += len(piece)


def joined(pieces: Sequence[memoryview]) -> memoryview:
    """Return the bytes of all pieces, in new memory if there are several."""
    if len(pieces) == 1:
        return pieces[0]
    target = memoryview(bytearray(num_bytes(pieces)))
    gather(target, pieces)
    return target


def mismatch(label: Label, nbytes: int, read: Read, wanted: int) -> ObjectResult | None:
    """Return a MISSING result if the stored object is not the expected one, else None."""
    reason = label.difference(read.label) or (nbytes != wanted and f"stored {nbytes} bytes, expected {wanted}")
    return ObjectResult(ObjectStatus.MISSING, reason=reason) if reason else None
