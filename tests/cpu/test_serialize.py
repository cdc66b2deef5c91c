"""Records of buffers: save and load, the file format, damaged records, and the targets of save."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import resource
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import dtype as dt
from kvtier.errors import (
    ArgumentError,
    ClosedError,
    FormatError,
    RangeError,
    StateError,
    VersionError,
)
from kvtier.memory import CPU, Buffer, Loaded, Stream, clear, context, load, save, saved_nbytes

names = [dtype.name for dtype in dt.ALL]
PAGE = 4096


def record_of(buffer: Buffer, **options: Any) -> bytes:
    memory = bytearray(saved_nbytes(buffer))
    assert save(buffer, memory, **options) == len(memory)
    return bytes(memory)


def numbers(count: int = 5, name: str = "i32") -> Buffer:
    return Buffer.wrap(np.arange(count).astype(dt.dtype(name).numpy))


def with_valid_checksum(record: bytes) -> bytes:
    """Return the record with the header checksum recomputed."""
    block = bytearray(record[:PAGE])
    block[60:64] = bytes(4)
    struct.pack_into("<I", block, 60, zlib.crc32(block))
    return bytes(block) + record[PAGE:]


def changed(record: bytes, offset: int, layout: str, *values: Any) -> bytes:
    """Return the record with values written at an offset. `layout` is a struct format, for example "<H"."""
    block = bytearray(record)
    struct.pack_into(layout, block, offset, *values)
    return bytes(block)


# All ways to load a record. The arguments are the bytes of the record and a directory for files.
READERS: dict[str, Callable[[bytes, Path], Loaded]] = {
    "bytes": lambda record, _: load(record),
    "bytearray": lambda record, _: load(bytearray(record)),
    "memoryview": lambda record, _: load(memoryview(record)),
    "file object": lambda record, _: load(io.BytesIO(record)),
    "path": lambda record, folder: load(stored(record, folder)),
    "text path": lambda record, folder: load(str(stored(record, folder))),
    "mapped": lambda record, folder: load(stored(record, folder), map_file=True),
}


def stored(record: bytes, folder: Path) -> Path:
    path = folder / "stored"
    path.write_bytes(record)
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(params=READERS.values(), ids=READERS)
def reader(request: pytest.FixtureRequest, folder: Path) -> Callable[[bytes], Loaded]:
    return lambda record: request.param(record, folder)


# ---- round trips ----


@pytest.mark.parametrize("name", names)
@pytest.mark.parametrize("size", [0, 1, 13])
def test_save_then_load_round_trips(name, size, reader, make, read):
    nbytes = dt.dtype(name).nbytes(size)
    raw = np.arange(1, nbytes + 1, dtype=np.uint8) if name != "bool" else np.ones(nbytes, np.uint8)
    loaded = reader(record_of(make(CPU, raw, name, size)))
    assert (loaded.buffer.size, loaded.buffer.dtype.name, loaded.shape) == (size, name, (size,))
    assert read(loaded.buffer).tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", names)
def test_save_writes_the_same_record_to_every_target(name, tmp_path, make):
    buffer = make(CPU, bytes(8), name)
    expected = record_of(buffer)
    file, larger = io.BytesIO(), bytearray(b"\xee" * (len(expected) + 3))
    assert save(buffer, tmp_path / "a") == len(expected) == saved_nbytes(buffer)
    assert save(buffer, str(tmp_path / "b")) == len(expected)
    assert save(buffer, file) == len(expected)
    assert save(buffer, memoryview(larger)) == len(expected)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == file.getvalue() == expected
    assert larger == expected + b"\xee" * 3


@pytest.mark.parametrize("name", names)
def test_save_and_load_work_on_every_placement(name, placement, tmp_path, make, read):
    raw = np.arange(48, dtype=np.uint8) if name != "bool" else np.ones(48, np.uint8)
    buffer = make(placement, raw, name)
    save(buffer, tmp_path / "record")
    assert (tmp_path / "record").read_bytes() == record_of(make(CPU, raw, name)), "the record depends on the placement"
    for source in (tmp_path / "record", record_of(buffer)):
        loaded = load(source, placement)
        assert loaded.buffer.placement == placement
        assert read(loaded.buffer).tobytes() == raw.tobytes()
    assert load(record_of(buffer), str(placement)).buffer.placement == placement


def test_save_of_slice_stores_only_the_slice(placement, make):
    part = make(placement, np.arange(100, dtype=np.int16)).slice(10, 3)
    assert saved_nbytes(part) == PAGE + 6
    assert load(record_of(part)).buffer.tolist() == [10, 11, 12]


def test_empty_typed_buffer_round_trips(reader):
    loaded = reader(record_of(Buffer(dtype="bf16")))
    assert (loaded.buffer.size, loaded.buffer.dtype, loaded.shape) == (0, dt.bf16, (0,))


def test_load_from_memory_copies_the_bytes():
    memory = bytearray(record_of(numbers()))
    loaded = load(memory)
    memory[PAGE:] = bytes(len(memory) - PAGE)
    assert loaded.buffer.tolist() == [0, 1, 2, 3, 4]
    loaded.buffer.fill(9)


@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (1, 1, 1, 1, 1, 1, 4, 6), (24, 1)])
def test_record_shape_round_trips(shape, reader):
    assert reader(record_of(numbers(24), shape=shape)).shape == shape


def test_record_shape_of_zero_elements_or_dimensions_round_trips():
    assert load(record_of(numbers(0), shape=(3, 0, 2))).shape == (3, 0, 2)
    assert load(record_of(numbers(1), shape=())).shape == ()
    assert load(record_of(numbers(4), shape=np.zeros((2, 2)).shape)).shape == (2, 2)


@pytest.mark.parametrize("shape", [(23,), (5, 5), (-1, -24), (-24,), (1,) * 8 + (24,), ()])
def test_save_with_mismatched_shape_raises(shape):
    with pytest.raises(ArgumentError, match="24 elements in at most 8 dimensions"):
        record_of(numbers(24), shape=shape)


def test_file_with_several_records_is_loaded_in_order(tmp_path):
    with open(tmp_path / "records", "wb") as file:
        save(numbers(3, "i32"), file)
        save(numbers(0, "bf16"), file)
        save(numbers(5, "u8"), file, shape=(5, 1))
    with open(tmp_path / "records", "rb") as file:
        assert load(file).buffer.tolist() == [0, 1, 2]
        assert load(file).buffer.dtype == dt.bf16
        last = load(file)
        assert (last.buffer.tolist(), last.shape) == ([0, 1, 2, 3, 4], (5, 1))
        with pytest.raises(FormatError):
            load(file)


class Trickle(io.RawIOBase):
    """A raw file that reads and writes at most 1,000 bytes per call, like a slow pipe or socket."""

    def __init__(self, content: bytes = b"") -> None:
        self.content, self.position = bytearray(content), 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        part = self.content[self.position : self.position + min(len(target), 1000)]
        target[: len(part)] = part
        self.position += len(part)
        return len(part)

    def write(self, data: Any) -> int:
        part = bytes(data)[:1000]
        self.content += part
        return len(part)


def test_load_handles_short_reads():
    assert load(Trickle(record_of(numbers(3000)))).buffer.tolist() == list(range(3000))


def test_save_handles_short_writes():
    file = Trickle()
    assert save(numbers(3000), file) == len(file.content)
    assert load(bytes(file.content)).buffer.tolist() == list(range(3000))


def test_large_buffer_round_trips(tmp_path, placement, make, read):
    raw = np.random.default_rng(3).integers(0, 256, (5 << 20) + 7, np.uint8)
    save(make(placement, raw), tmp_path / "large")
    assert np.array_equal(read(load(tmp_path / "large", placement).buffer), raw)


def test_save_waits_for_context_stream(placement):
    buffer = Buffer(1 << 16, "u8", placement)
    clear(buffer)
    with context(stream=Stream(placement)):
        for value in range(1, 20):
            buffer.fill(value)
        record = record_of(buffer)
    assert record[PAGE:] == bytes([19]) * (1 << 16)


# ---- format ----


def test_record_header_matches_format(make):
    record = record_of(make(CPU, bytes([1, 2, 3]), "u4", 5), shape=(5, 1))
    magic, version, ndim, _, name, size, nbytes, offset, crc = struct.unpack_from("<8sHHI16sQQQI", record)
    assert (magic, version, ndim) == (b"\x89KVBUF\r\n", 1, 2)
    assert (name.rstrip(b"\0"), size, nbytes, offset) == (b"u4", 5, 3, PAGE)
    assert crc == zlib.crc32(bytes([1, 2, 3]))
    assert struct.unpack_from("<8Q", record, 64) == (5, 1, 0, 0, 0, 0, 0, 0)
    assert not any(record[128:PAGE])
    assert record == with_valid_checksum(record)


def test_record_payload_can_be_mapped_by_numpy(tmp_path):
    save(numbers(1000, "f32"), tmp_path / "record")
    mapped = np.memmap(tmp_path / "record", np.float32, "r", offset=PAGE, shape=(10, 100))
    assert np.array_equal(mapped, np.arange(1000, dtype=np.float32).reshape(10, 100))


def test_mapped_buffer_is_read_only_and_outlives_file(tmp_path):
    save(numbers(1000), tmp_path / "record")
    loaded = load(tmp_path / "record", map_file=True)
    os.unlink(tmp_path / "record")
    gc.collect()
    assert loaded.buffer.readonly
    assert loaded.buffer.data() % PAGE == 0
    assert loaded.buffer.tolist() == list(range(1000))
    assert loaded.buffer[10:12].view("u8").numpy().view(np.int32).tolist() == [10, 11]
    with pytest.raises(ArgumentError, match="read-only"):
        loaded.buffer.fill(0)


@pytest.mark.parametrize("source", [io.BytesIO, bytes, bytearray, memoryview])
def test_load_map_file_without_path_raises(source):
    with pytest.raises(ArgumentError, match="path"):
        load(source(record_of(numbers())), map_file=True)


def test_load_map_file_to_other_placement_raises(tmp_path, placement):
    save(numbers(), tmp_path / "record")
    if placement == CPU:
        assert load(tmp_path / "record", placement, map_file=True).buffer.placement == CPU
        return
    with pytest.raises(ArgumentError, match=str(placement)):
        load(tmp_path / "record", placement, map_file=True)


# ---- damage ----


@pytest.mark.parametrize("byte", range(128))
def test_load_with_flipped_header_bit_raises(byte):
    record = record_of(numbers(), shape=(5, 1))
    for bit in range(8):
        damaged = bytearray(record)
        damaged[byte] ^= 1 << bit
        with pytest.raises(FormatError):
            load(damaged)


@pytest.mark.parametrize("reader_name", READERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_load_with_any_flipped_bit_raises(reader_name, folder, data):
    record = record_of(Buffer.wrap(np.frombuffer(data.draw(st.binary(max_size=300)), np.uint8)))
    position = data.draw(st.integers(0, len(record) * 8 - 1))
    damaged = bytearray(record)
    damaged[position // 8] ^= 1 << position % 8
    with pytest.raises(FormatError):
        READERS[reader_name](bytes(damaged), folder)


@pytest.mark.parametrize("reader_name", READERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_load_of_truncated_record_raises(reader_name, folder, data):
    record = record_of(numbers(40))
    length = data.draw(st.one_of(st.integers(1, len(record) - 1), st.integers(PAGE - 1, len(record) - 1)))
    available = length if length < PAGE else length - PAGE  # bytes of the header, or of the payload after it
    with pytest.raises(FormatError, match=rf" {available}$"):
        READERS[reader_name](record[:length], folder)


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"\x89PNG\r\n\x1a\n" + bytes(5000),
        bytes(PAGE),
        b"KVBUF" * 1000,
        b"\x93NUMPY" + bytes(PAGE),
        b"PK\x03\x04",
        record_of(numbers())[1:],
        bytes(range(256)) * 32,
    ],
    ids=["empty", "png", "zeros", "text", "npy", "zip", "shifted", "bytes"],
)
def test_load_of_foreign_bytes_raises(foreign, reader):
    with pytest.raises(FormatError, match="not a kvtier buffer"):
        reader(foreign)


def test_load_with_converted_line_endings_raises(reader):
    with pytest.raises(FormatError):
        reader(record_of(numbers()).replace(b"\r\n", b"\n"))


@pytest.mark.parametrize("version", [2, 3, 0xFFFF])
def test_load_of_newer_version_raises_and_names_both_versions(version, reader):
    record = with_valid_checksum(changed(record_of(numbers()), 8, "<H", version))
    with pytest.raises(VersionError, match=rf"version {version}.* up to 1"):
        reader(record)


def test_load_of_version_zero_raises():
    with pytest.raises(FormatError):
        load(with_valid_checksum(changed(record_of(numbers()), 8, "<H", 0)))


@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (10, "<H", 9),  # number of dimensions
        (10, "<H", 0),
        (16, "16s", b"u7"),  # element type
        (16, "16s", b"null"),
        (16, "16s", b"\xff\xfe"),
        (16, "16s", b"i64"),
        (32, "<Q", 6),  # number of elements
        (32, "<Q", 1 << 63),
        (40, "<Q", 4),  # payload bytes
        (48, "<Q", 8192),  # offset of the payload
        (64, "<Q", 4),  # first dimension of the shape
    ],
)
def test_load_with_inconsistent_header_raises(offset, layout, value, reader):
    with pytest.raises(FormatError):
        reader(with_valid_checksum(changed(record_of(numbers()), offset, layout, value)))


def test_load_with_payload_of_another_record_raises(reader):
    one, other = record_of(numbers(5, "i32")), record_of(numbers(5, "f32"))
    with pytest.raises(FormatError, match=rf"{zlib.crc32(other[PAGE:]):#010x} over 20 bytes"):
        reader(one[:PAGE] + other[PAGE:])


@pytest.mark.parametrize("reader_name", ["bytes", "bytearray", "memoryview", "path", "mapped"])
@pytest.mark.parametrize("trailing", [b"\0", b"x" * 5000, record_of(numbers())])
def test_load_with_trailing_bytes_raises(reader_name, trailing, folder):
    with pytest.raises(FormatError):
        READERS[reader_name](record_of(numbers()) + trailing, folder)


def test_load_of_damaged_record_raises_on_every_placement(placement):
    damaged = bytearray(record_of(numbers()))
    damaged[-1] ^= 1
    with pytest.raises(FormatError):
        load(damaged, placement)


# ---- targets ----


@pytest.mark.parametrize("missing", [1, 20, PAGE])
def test_save_to_small_target_raises_without_writing(missing):
    buffer = numbers()
    target = bytearray(saved_nbytes(buffer) - missing)
    with pytest.raises(RangeError, match=rf"needs {saved_nbytes(buffer)} bytes, but the target has {len(target)}"):
        save(buffer, target)
    assert not any(target)


def test_save_to_read_only_target_raises():
    with pytest.raises(ArgumentError, match="read-only"):
        save(numbers(), memoryview(bytes(5000)))


def test_save_accepts_memoryview_of_larger_items():
    memory = np.zeros(saved_nbytes(numbers()) // 4, np.int32)
    assert save(numbers(), memoryview(memory)) == memory.nbytes
    assert load(memoryview(memory)).buffer.tolist() == [0, 1, 2, 3, 4]


def test_save_of_closed_or_untyped_buffer_raises(placement):
    closed = Buffer(4, "u8", placement)
    closed.close()
    with pytest.raises(ClosedError):
        save(closed, bytearray(5000))
    with pytest.raises(StateError):
        save(Buffer(), bytearray(5000))


def test_save_replaces_existing_file(tmp_path):
    save(numbers(1000), tmp_path / "record")
    save(numbers(3), tmp_path / "record")
    assert load(tmp_path / "record").buffer.tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == ["record"]


@contextlib.contextmanager
def files_limited_to(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("before", [False, True], ids=["new file", "existing file"])
def test_failed_save_keeps_existing_file(before, tmp_path):
    if before:
        save(numbers(3), tmp_path / "record")
    with files_limited_to(3 * PAGE), pytest.raises(OSError, match="too large"):
        save(numbers(100_000), tmp_path / "record")
    assert os.listdir(tmp_path) == (["record"] if before else [])
    if before:
        assert load(tmp_path / "record").buffer.tolist() == [0, 1, 2]


def test_save_into_missing_folder_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        save(numbers(), tmp_path / "missing" / "record")
    assert os.listdir(tmp_path) == []


def test_save_over_folder_raises_and_leaves_no_file(tmp_path):
    (tmp_path / "record").mkdir()
    with pytest.raises(OSError, match="record"):
        save(numbers(), tmp_path / "record")
    assert os.listdir(tmp_path) == ["record"]


def test_saved_file_has_default_permissions(tmp_path):
    save(numbers(), tmp_path / "record")
    (tmp_path / "other").write_bytes(b"")
    assert (tmp_path / "record").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_load_of_missing_file_raises(tmp_path):
    for options in ({}, {"map_file": True}):
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "missing", **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_record_of_gpu_memory_loads_as_pinned_or_gpu_memory(make):
    record = record_of(make(Buffer(0, "u8", "cuda:0").placement, np.arange(9, dtype=np.uint8)))
    assert load(record, "pinned").buffer.tolist() == load(record, "cuda:0").buffer.tolist() == list(range(9))
