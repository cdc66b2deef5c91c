"""Checksums, copies, and the bytes of records and superblocks. Parsing damaged bytes raises an error."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvtier.errors import FormatError, RangeError, VersionError
from kvtier.native_code import Native
from kvtier.storage import ObjectStatus, Read, Scattered, Write
from kvtier.storage.checksum import checksum, checksum_in_python, checksum_joined, checksums
from kvtier.storage.codec import Compression, Scratch, copy_bytes, encode, gather, scatter
from kvtier.storage.disk.segment import SegmentHeader
from kvtier.storage.disk.space import slot_bytes_for
from kvtier.storage.record import BLANK, Flags, Record
from kvtier.storage.remote.envelope import Envelope
from storage_support import LABEL, key_of, payload_of, resealed

RECORD = Record(key_of(1), LABEL.namespace, bytes(16), 5000, 4000, 2**63 + 5, 64, Flags.ZLIB, 77, 3, 9)


@given(st.binary(max_size=300), st.binary(max_size=9), st.integers(0, 20))
def test_checksum_equals_formula_and_python_implementation(data, then, shift):
    view = memoryview(bytes(shift) + data)[shift:]
    whole = data + then
    words = np.frombuffer(whole + bytes(-len(whole) % 4), "<u4")
    expected = zlib.crc32(whole) | int(words.sum(dtype=np.uint32)) << 32
    assert checksum(view, then) == checksum_in_python(data, then) == expected


@pytest.mark.parametrize("nbytes", [4096, 100_001, 1 << 20])
def test_checksum_of_two_parts_equals_checksum_of_whole(nbytes):
    data = random.Random(nbytes).randbytes(nbytes)
    split = nbytes & ~3  # the second part has at most three bytes
    assert checksum(data) == checksum_in_python(data)
    assert checksum(memoryview(data)[:split], data[split:]) == checksum(data)


@pytest.mark.parametrize("sizes", [(), (1 << 20,) * 5, (1 << 21, 64, 1 << 20), (1 << 21, 0, 1 << 21), (1 << 21, 65)])
def test_checksums_of_batch_equal_single_checksums(sizes):
    random_bytes = random.Random(len(sizes)).randbytes
    pieces = [memoryview(random_bytes(size + 1))[1:] for size in sizes]
    assert checksums(pieces) == [checksum_in_python(piece) for piece in pieces]


@pytest.mark.parametrize("compression", list(Compression))
def test_packing_batch_equals_packing_objects_one_by_one(compression):
    envelope, payloads = Envelope(compression=compression), [memoryview(bytes([n]) * (1 << 20)) for n in range(3)]
    objects = [(Write(key_of(n), LABEL, payload), payload) for n, payload in enumerate(payloads)]
    together, alone = envelope.pack_all(objects), [envelope.pack(*each) for each in objects]
    assert together == alone


def test_checksum_and_copy_work_without_compiler(monkeypatch):
    data = random.Random(0).randbytes(100_000)
    expected = checksum(data)
    monkeypatch.setattr("kvtier.storage.checksum.native", lambda: Native(None, "no compiler"))
    monkeypatch.setattr("kvtier.storage.codec.native", lambda: Native(None, "no compiler"))
    assert checksum(data) == expected
    assert checksums([memoryview(data)]) == [expected]
    target = bytearray(len(data))
    copy_bytes(memoryview(target), memoryview(data))
    assert target == data


@pytest.mark.parametrize(("start", "nbytes"), [(0, 0), (0, 1), (3, 4096), (1, 100_003), (16, 65536)])
def test_copy_bytes_copies_any_length_and_alignment(start, nbytes):
    target, source = bytearray(nbytes + 32), payload_of(1, nbytes)
    copy_bytes(memoryview(target)[start : start + nbytes], memoryview(source))
    assert target == bytes(start) + source + bytes(32 - start)


@pytest.mark.parametrize("nbytes", [0, 63, 65])
def test_copy_bytes_between_different_lengths_raises(nbytes):
    target = bytearray(64)
    with pytest.raises(RangeError, match=f"cannot copy {nbytes} bytes into 64 bytes of memory"):
        copy_bytes(memoryview(target), memoryview(payload_of(1, nbytes)))
    assert target == bytes(64)


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("sizes", [[5], [0, 3, 0], [4096, 1, 5000, 63], [64] * 100, [70_001, 4096]])
def test_gather_and_scatter_are_inverse(sizes, has_compiler, monkeypatch):
    if not has_compiler:
        monkeypatch.setattr("kvtier.storage.checksum.native", lambda: Native(None, "no compiler"))
        monkeypatch.setattr("kvtier.storage.codec.native", lambda: Native(None, "no compiler"))
    content = payload_of(1, sum(sizes))
    pieces = [memoryview(bytearray(size)) for size in sizes]
    scatter(pieces, memoryview(content))
    assert b"".join(pieces) == content
    assert checksum_joined(pieces) == checksum(content)
    target = memoryview(bytearray(len(content)))
    gather(target, [piece.toreadonly() for piece in pieces])
    assert target == content
    assert Scratch().gather_checksum(pieces) == (content, checksum(content))
    memory = memoryview(bytearray(b"".join(pieces)))
    sizes = np.array([size for size in sizes if size])
    scattered = Scattered(memory, np.cumsum(sizes) - sizes, sizes)
    assert (b"".join(scattered), scattered[0:1], scattered.nbytes) == (content, [memory[: sizes[0]]], len(content))
    assert Scratch().gather_checksum(scattered) == (content, checksum(content))
    with pytest.raises(RangeError, match="bytes"):
        scatter(pieces, memoryview(content + b"1"))


def test_scratch_take_keeps_gathered_bytes():
    scratch, content = Scratch(), payload_of(1, 4096)
    gathered = scratch.gather([memoryview(content[:100]), memoryview(content[100:])])
    scratch.take(4096)[:] = bytes(4096)
    assert gathered == content


@pytest.mark.parametrize("nbytes", [4000, 6000])
def test_object_with_inconsistent_lengths_is_corrupt(nbytes):
    """Any client of a shared store can write an object with valid checksums and inconsistent lengths."""
    record, payload = encode(key_of(1), LABEL, memoryview(payload_of(1, nbytes)))
    value = replace(record, nbytes=5000).pack() + payload
    outcome, payload = Envelope().open(Read(key_of(1), LABEL, bytearray(5000)), 5000, memoryview(value))
    assert (outcome.status, payload) == (ObjectStatus.CORRUPT, None)
    assert f"inconsistent: {nbytes} uncompressed bytes stored instead of 5000" in outcome.reason


def test_record_bytes_equal_documented_format():
    data = RECORD.pack()
    assert len(data) == 256
    assert data[:8] == b"\x89KVOBJ\r\n"
    assert struct.unpack_from("<HHIQII", data, 8) == (1, 1, 64, 77, 3, 9)
    assert (data[32:64], data[64:96], data[96:112]) == (key_of(1), LABEL.namespace, bytes(16))
    assert struct.unpack_from("<QQQ", data, 112) == (5000, 4000, 2**63 + 5)
    assert (data[136:252], data[252:]) == (bytes(116), struct.pack("<I", zlib.crc32(data[:252])))
    assert Record.unpack(data) == RECORD


def test_flipped_bit_in_record_or_superblock_raises():
    for good, unpack in ((RECORD.pack(), Record.unpack), (SegmentHeader(3, 8192, 5).pack(), SegmentHeader.unpack)):
        # flip every bit of a record, but only every seventh bit of a superblock, because superblocks are larger
        for bit in range(0, len(good) * 8, 1 if len(good) == 256 else 7):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            with pytest.raises(FormatError):
                unpack(bytes(bad))


def test_blank_or_short_record_raises():
    for data in (BLANK, b"", RECORD.pack()[:-1]):
        with pytest.raises(FormatError):
            Record.unpack(data)


def test_newer_format_version_raises_version_error():
    with pytest.raises(VersionError, match="version 2"):
        Record.unpack(resealed(RECORD.pack(), 8, b"\2\0"))
    with pytest.raises(VersionError, match="version 9"):
        SegmentHeader.unpack(resealed(SegmentHeader(3, 8192, 5).pack(), 8, b"\x09\0"))


def test_inconsistent_superblock_raises():
    for changed in (
        resealed(SegmentHeader(3, 8192, 5).pack(), 16, b"\1"),  # the size of a slot
        resealed(SegmentHeader(3, 8192, 5).pack(), 24, b"\0"),  # the number of slots
    ):
        with pytest.raises(FormatError):
            SegmentHeader.unpack(changed)
    with pytest.raises(FormatError):
        SegmentHeader.unpack(SegmentHeader(3, 8192, 5).pack()[:-1] + b"\xff")


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20))
def test_segment_file_fits_into_segment_bytes(segment_bytes, pages):
    shape = SegmentHeader.fitting(1, pages * 4096, segment_bytes)
    assert shape.num_slots == 1 or shape.file_bytes <= segment_bytes


@given(st.integers(0, 1 << 32))
def test_slot_overhead_is_bounded(nbytes):
    slot = slot_bytes_for(nbytes)
    assert slot % 4096 == 0
    assert nbytes <= slot <= max(4096, nbytes + nbytes // 16 + 4096)


def test_is_same_object_ignores_location_on_disk():
    assert RECORD.is_same_object(RECORD.at(1, 2, 3))
    for field, value in (("key", key_of(2)), ("checksum", 1), ("nbytes", 1), ("flags", Flags.NONE)):
        assert not RECORD.is_same_object(replace(RECORD, **{field: value}))
