"""Native code for host memory: results compared with numpy, compilation, safe loading, files, and usable cores."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.errors import ArgumentError
from kvtier.files import cache_dir, write_atomically
from kvtier.memory import BatchCopy, Buffer
from kvtier.memory.copy_plan import scan
from kvtier.memory.gather import fill_rows
from kvtier.memory.native import MemoryNative, native
from kvtier.native_code import Native, num_usable_cores

MIB = 1 << 20
KIB = 1 << 10
NOT_A_FOLDER = "/dev/null/kvtier"


def compiled() -> MemoryNative:
    loaded = native()
    return loaded.code or pytest.skip(loaded.reason)


def c_compiler() -> str:
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return compiler or pytest.skip("this machine has no C compiler")


def load_as_new_process(monkeypatch: pytest.MonkeyPatch, **environment: str | None) -> Native:
    """Set environment variables until the end of the test, and load the native code again as a new process would.

    The value None removes a variable.
    """
    for name, value in environment.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    return native.__wrapped__()


def assert_copies(loaded: Native) -> None:
    assert loaded.code is not None, loaded.reason
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    loaded.code.copy(table_of(source, [(10, 50, 20)], target))
    assert target[50:70].tolist() == list(range(10, 30))
    assert np.count_nonzero(target) == 20


def table_of(source: np.ndarray, pieces: Sequence[tuple[int, int, int]], target: np.ndarray) -> np.ndarray:
    """Return a table whose three rows are source addresses, target addresses and sizes.

    Each piece is (source offset, target offset, size).
    """
    table = np.empty((3, len(pieces)), np.int64)
    table[:] = np.array(pieces, np.int64).reshape(-1, 3).T
    table[0] += source.ctypes.data
    table[1] += target.ctypes.data
    return table


def python(script: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={name: value for name, value in {**os.environ, **environment}.items() if name != "CC"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


# ---- copying ----


sizes_of_pieces = st.lists(
    st.one_of(st.just(1), st.integers(0, 100), st.integers(1, 9000), st.integers(100_000, 400_000)),
    min_size=1,
    max_size=30,
)


@given(sizes=sizes_of_pieces, threads=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@example(sizes=[1], threads=8, seed=0)  # seven threads copy nothing
@example(sizes=[0, 0], threads=8, seed=0)
@example(sizes=[3 * MIB + 1], threads=5, seed=1)  # all threads except the first begin inside the piece
@example(sizes=[1] * 50 + [2 * MIB] + [1] * 50, threads=4, seed=2)
@example(sizes=[512 * KIB] * 4, threads=4, seed=3)  # each thread begins at the start of a piece
@example(sizes=[0, 700 * KIB, 0, 0, 700 * KIB, 0], threads=2, seed=4)
@example(sizes=[MIB - 1, 1, 1, MIB - 1], threads=3, seed=5)
@example(sizes=[255, 256, 257, 319, 320, 16 * MIB], threads=1, seed=6)  # batches from 16 MiB use non-temporal stores
@example(sizes=[16 * MIB - 3, 4097, 63, 64, 65, 511], threads=3, seed=7)
@example(sizes=[100], threads=1000, seed=7)  # more threads than the maximum of 64
@settings(max_examples=60, deadline=None)
def test_native_copy_with_any_thread_count_matches_numpy(sizes, threads, seed):
    code = compiled()
    random = np.random.default_rng(seed)
    gaps = random.integers(0, 64, 2 * len(sizes))
    total = sum(sizes) + int(gaps.sum())
    source = random.integers(0, 256, total, np.uint8)
    target = random.integers(0, 256, total, np.uint8)
    src_at = np.cumsum([0, *sizes[:-1]]) + np.cumsum(gaps[: len(sizes)])
    order = random.permutation(len(sizes))  # the target order differs from the source order
    ends = np.cumsum(np.array(sizes)[order] + gaps[len(sizes) :])
    dst_at = np.empty(len(sizes), np.int64)
    dst_at[order] = ends - np.array(sizes)[order]
    expected = target.copy()
    pieces = list(zip(src_at.tolist(), dst_at.tolist(), sizes, strict=True))
    for src, dst, nbytes in pieces:
        expected[dst : dst + nbytes] = source[src : src + nbytes]

    table = table_of(source, pieces, target)
    used = code._library.kvtier_copy_pieces(len(sizes), *(row.ctypes.data for row in table), sum(sizes), threads)

    np.testing.assert_array_equal(target, expected)
    assert used == min(threads, 64)


def test_native_copy_thread_count_grows_with_size():
    code = compiled()
    source, target = np.arange(12 * MIB // 4, dtype=np.uint32).view(np.uint8), np.zeros(12 * MIB, np.uint8)
    max_threads = min(8, len(os.sched_getaffinity(0)))
    # each thread copies at least 2 MiB
    assert code.copy(table_of(source, [(0, 0, 12 * MIB)], target)) == min(max_threads, 6)
    np.testing.assert_array_equal(target, source)
    assert code.copy(table_of(source, [(0, 0, 2 * MIB)], target)) == 1


def test_native_copy_of_empty_table_succeeds():
    assert compiled().copy(np.zeros((3, 0), np.int64)) == 1


def test_native_copy_accepts_slice_of_columns():
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    table = table_of(source, [(10 * k, 10 * k, 10) for k in range(10)], target)
    compiled().copy(table[:, 3:5])
    assert target.nonzero()[0].tolist() == list(range(30, 50))


def test_native_copy_accepts_single_column_of_any_strides():
    """numpy treats a single column as contiguous for any strides, so ascontiguousarray does not change the strides."""
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    table = np.ascontiguousarray(np.array([[source.ctypes.data, target.ctypes.data, 20]]).T)
    assert table.strides != (8, 8)
    compiled().copy(table)
    assert target[:20].tolist() == list(range(20))
    assert compiled().scan(table).disjoint


def test_batch_copy_of_one_piece_copies_it():
    source, target = Buffer.wrap(bytes(range(100))), Buffer(100, "u8")
    with BatchCopy() as copy:
        copy(source, 100, target)
    assert target.tolist() == list(range(100))


def test_native_copy_with_non_contiguous_rows_raises():
    with pytest.raises(ArgumentError, match="contiguous rows"):
        compiled().copy(np.zeros((4, 3), np.int64).T)
    with pytest.raises(ArgumentError, match="contiguous rows"):
        compiled().copy(np.zeros((3, 8), np.int64)[:, ::2])


# ---- native code against numpy ----

# Source offset, target offset and size of each entry. The offsets are small, so that entries often touch or overlap.
entries_close_together = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 4, 4, 4, 9])), min_size=1, max_size=20
)


@given(
    rows=entries_close_together, ascending=st.booleans(), scopes=st.lists(st.integers(-1, 2), min_size=20, max_size=20)
)
@example(rows=[(0, 0, 4), (4, 4, 4), (8, 8, 4)], ascending=False, scopes=[0] * 20)
@example(rows=[(0, 0, 4), (4, 4, 4), (8, 8, 4)], ascending=False, scopes=[-1] * 20)
@example(rows=[(0, 0, 4), (4, 4, 4), (8, 8, 4)], ascending=False, scopes=[0, 0, 1] + [0] * 17)
def test_native_scan_of_touching_entries_matches_numpy(rows, ascending, scopes):
    rows = sorted(rows, key=lambda row: row[1]) if ascending else rows
    table = np.array(rows, np.int64).T.copy(order="C")
    for scope in (None, np.array(scopes[: len(rows)], np.int64)):
        expected, result = scan(table, scope), compiled().scan(table, scope)
        for name in ("disjoint", "independent", "nbytes"):
            assert getattr(result, name) == getattr(expected, name), name
        assert (result.starts is None) == (expected.starts is None)
        if expected.starts is not None:
            np.testing.assert_array_equal(result.starts, expected.starts)


@given(
    places=st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 20)), min_size=1, max_size=16),
    unit=st.sampled_from([1, 2, 4, 8, 16, 32, 4096, 1 << 14, 1 << 20]),
    sizes=st.one_of(st.integers(1, 1 << 20), st.lists(st.integers(1, 2), min_size=16, max_size=16)),
)
@example(places=[(1, 1), (1 << 20, 1)], unit=1 << 16, sizes=16)  # the second source offset is just below 2^32 * 16
@example(places=[(1, 1), ((1 << 20) + 1, 1)], unit=1 << 16, sizes=16)  # the offset is 2^32 * 16 and does not fit
def test_native_fill_rows_matches_numpy(places, unit, sizes):
    capacity = 20
    counts = np.full(len(places), sizes) if isinstance(sizes, int) else np.array(sizes[: len(places)])
    table = np.ascontiguousarray(np.vstack([np.array(places, np.int64).T * unit, counts]))
    expected, block = (np.zeros(10 + 2 * capacity, np.uint32) for _ in range(2))
    size = fill_rows(table, capacity, expected)
    assert compiled().fill_rows(table, capacity, block) == size
    if size:
        assert size == counts[0]
        np.testing.assert_array_equal(block, expected)


def test_native_copies_run_on_two_streams_at_once():
    script = """
        import numpy as np
        from kvtier.memory import BatchCopy, Buffer, Stream, context

        source = Buffer.wrap(np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8))
        targets, streams = [Buffer(source.size, "u8") for _ in range(2)], [Stream() for _ in range(2)]
        at = np.arange(1024)[::-1] * 4096
        for target, stream in zip(targets, streams):
            with context(stream=stream), BatchCopy() as copy:
                copy.pieces(source, at, 4096, target, at)
        for target, stream in zip(targets, streams):
            stream.synchronize()
            assert np.array_equal(target.numpy(), source.numpy())
    """
    output_of(python(script))


# ---- compiling ----


def test_native_code_is_compiled_into_cache_directory(monkeypatch, tmp_path):
    c_compiler()
    loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path), CC=None)
    assert_copies(loaded)
    [library] = tmp_path.iterdir()
    assert library.suffix == ".so"
    assert str(library) in loaded.reason


def test_native_code_in_cache_is_reused(monkeypatch, tmp_path):
    c_compiler()
    load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path), CC=None)
    [library] = tmp_path.iterdir()
    before = library.stat()
    loaded = load_as_new_process(monkeypatch, CC="false", PATH=NOT_A_FOLDER)  # no compiler is available
    assert_copies(loaded)
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_damaged_native_code_in_cache_is_recompiled(monkeypatch, tmp_path):
    c_compiler()
    load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path / "whole"), CC=None)
    [library] = (tmp_path / "whole").iterdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / library.name).write_bytes(b"")  # as after a full disk or a crash
    loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path / "damaged"), CC=None)
    assert_copies(loaded)


PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Compile the library once for this module and return its path."""
    c_compiler()
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        load_as_new_process(patch, KVTIER_CACHE_DIR=str(folder), CC=None)
    [library] = folder.iterdir()
    return library


@pytest.fixture
def quick_compiler(monkeypatch, tmp_path, built) -> None:
    """Set CC to a script that only copies the compiled library, to save time."""
    script = tmp_path / "quick-cc"
    script.write_text(f'#!/bin/sh\nfor last; do :; done\ncat {built} > "$last"\nchmod +x "$last"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))


@pytest.fixture
def planted(monkeypatch, tmp_path, built, quick_compiler):  # noqa: ARG001
    """Put a foreign library into the cache directory.

    Return the path of the library, and the path of a file that the library creates when it is loaded.
    """
    folder, mark = tmp_path / "cache", tmp_path / "was-loaded"
    folder.mkdir(mode=0o700)
    source = tmp_path / "planted.c"
    source.write_text(PLANTED % mark)
    subprocess.run([c_compiler(), "-shared", "-fPIC", source, "-o", folder / built.name], check=True)
    (folder / built.name).chmod(0o755)
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(folder))
    return folder / built.name, mark


def test_native_code_planted_in_own_folder_is_loaded(monkeypatch, planted):
    """Check that the foreign library creates its file when it is loaded.

    The other tests with `planted` take a missing file as proof that the library was not loaded.
    """
    _, mark = planted
    load_as_new_process(monkeypatch)
    assert mark.exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_native_code_in_shared_folder_is_not_loaded(monkeypatch, planted, mode):
    library, mark = planted
    library.parent.chmod(mode)
    before = library.read_bytes()
    with pytest.warns(RuntimeWarning, match=rf"cache can be written by others \(mode {mode:o}\).*KVTIER_CACHE_DIR"):
        loaded = load_as_new_process(monkeypatch)
    assert_copies(loaded)
    assert "for this process only" in loaded.reason
    assert not mark.exists()
    assert library.read_bytes() == before


def test_native_code_below_shared_folder_is_not_loaded(monkeypatch, planted, tmp_path):
    _, mark = planted
    tmp_path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        loaded = load_as_new_process(monkeypatch)
    tmp_path.chmod(0o700)
    assert_copies(loaded)
    assert not mark.exists()


@pytest.mark.usefixtures("quick_compiler")
def test_native_code_below_sticky_folder_is_cached(monkeypatch, tmp_path):
    """In a sticky folder such as /tmp, users cannot replace the files of other users."""
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path / "sticky" / "own"))
    assert_copies(loaded)
    assert len(list((tmp_path / "sticky" / "own").iterdir())) == 1


def test_native_code_in_folder_of_another_user_is_not_loaded(monkeypatch, planted):
    library, mark = planted
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(library.parent, 12345, 12345)
    with pytest.warns(RuntimeWarning, match="belongs to user 12345, but this process runs as user 0"):
        loaded = load_as_new_process(monkeypatch)
    assert_copies(loaded)
    assert not mark.exists()


@pytest.mark.parametrize("how", ["mode", "owner", "link"])
def test_native_code_in_untrusted_file_is_replaced(monkeypatch, planted, tmp_path, how):
    library, mark = planted
    if how == "mode":
        library.chmod(0o775)
    elif how == "link":
        library.rename(tmp_path / "elsewhere.so")
        library.symlink_to(tmp_path / "elsewhere.so")
    elif os.geteuid():
        pytest.skip("only root can give a file to another user")
    else:
        os.chown(library, 12345, 12345)
    loaded = load_as_new_process(monkeypatch)
    assert_copies(loaded)
    assert not mark.exists()
    assert stat.S_IMODE(library.lstat().st_mode) == 0o755
    assert_copies(load_as_new_process(monkeypatch, CC="false"))


@pytest.mark.usefixtures("quick_compiler")
def test_native_code_compiled_under_open_umask_is_used_again(monkeypatch, tmp_path):
    before = os.umask(0)
    try:
        load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path / "own"))
    finally:
        os.umask(before)
    assert_copies(load_as_new_process(monkeypatch, CC="false"))


@pytest.mark.usefixtures("quick_compiler")
def test_native_code_in_folder_reached_by_link_is_cached(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path / "link"))
    assert_copies(load_as_new_process(monkeypatch, CC="false"))


@pytest.mark.usefixtures("quick_compiler")
def test_native_code_with_read_only_cache_is_compiled_privately(monkeypatch, tmp_path):
    """The cache is read-only in a container with a read-only root file system."""
    (tmp_path / "own").mkdir(mode=0o700)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path / "own"))
    assert_copies(loaded)
    assert list((tmp_path / "own").iterdir()) == []


def test_native_accepts_compiler_with_arguments(monkeypatch, tmp_path):
    loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path), CC=f"{c_compiler()} -O1")
    assert_copies(loaded)


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler", "/dev/null"])
def test_native_reason_contains_compiler_that_failed(monkeypatch, tmp_path, compiler):
    loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path), CC=compiler)
    assert loaded.code is None
    assert f"compiling with {compiler} failed" in loaded.reason
    assert list(tmp_path.iterdir()) == []


def test_native_reason_includes_compiler_output(monkeypatch, tmp_path):
    loaded = load_as_new_process(
        monkeypatch, KVTIER_CACHE_DIR=str(tmp_path), CC=f"{c_compiler()} -include no_such_header.h"
    )
    assert loaded.code is None
    assert "no_such_header.h" in loaded.reason


def test_native_reason_says_that_no_compiler_was_found(monkeypatch, tmp_path):
    loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=str(tmp_path), CC=None, PATH=NOT_A_FOLDER)
    assert loaded.code is None
    assert "no C compiler found (looked for $CC, cc, gcc, clang)" in loaded.reason


def test_native_reason_contains_unusable_cache_directory(monkeypatch):
    loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=NOT_A_FOLDER, CC=None)
    assert loaded.code is None
    assert NOT_A_FOLDER in loaded.reason


def test_native_reason_says_that_home_directory_is_missing(monkeypatch):
    """A process has no home directory if HOME is not set and its user id has no passwd entry."""

    def raise_key_error(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", raise_key_error)
    loaded = load_as_new_process(monkeypatch, KVTIER_CACHE_DIR=None, XDG_CACHE_HOME=None, HOME=None)
    assert loaded.code is None
    assert "home" in loaded.reason


def test_batch_copy_without_compiler_uses_loop(tmp_path):
    script = """
        import json
        import numpy as np
        from kvtier.memory import BatchCopy, Buffer

        values = np.random.default_rng(0).integers(0, 256, 64 * 4096, np.uint8)
        source, target = Buffer.wrap(values), Buffer(values.size, "u8")
        slots = np.random.default_rng(1).permutation(64)
        with BatchCopy() as copy:
            copy.pieces(source, slots * 4096, 4096, target, np.arange(64) * 4096)
        is_equal = np.array_equal(target.numpy().reshape(64, -1), values.reshape(64, -1)[slots])
        print(json.dumps([bool(is_equal), copy.result.path, copy.result.reason]))
    """
    is_equal, path, reason = json.loads(output_of(python(script, PATH=str(tmp_path), KVTIER_CACHE_DIR=str(tmp_path))))
    assert is_equal
    assert path == "loop"
    assert "no C compiler found" in reason


def test_native_code_can_be_compiled_by_two_processes_at_once(tmp_path):
    c_compiler()
    script = """
        import sys
        import kvtier.memory.native
        print("ready", flush=True)
        sys.stdin.readline()
        loaded = kvtier.memory.native.native()
        assert loaded.code is not None, loaded.reason
    """
    processes = [python(script, KVTIER_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [output_of(process) for process in processes] == ["", ""]
    [library] = tmp_path.iterdir()
    assert library.suffix == ".so"


# ---- the cache directory ----


@pytest.mark.parametrize(
    ("set_variables", "expected"),
    [
        ({"KVTIER_CACHE_DIR": "named", "XDG_CACHE_HOME": "xdg", "HOME": "home"}, "named"),
        ({"KVTIER_CACHE_DIR": "", "XDG_CACHE_HOME": "xdg", "HOME": "home"}, "xdg/kvtier"),
        ({"XDG_CACHE_HOME": "xdg", "HOME": "home"}, "xdg/kvtier"),
        ({"XDG_CACHE_HOME": "", "HOME": "home"}, "home/.cache/kvtier"),
        ({"HOME": "home"}, "home/.cache/kvtier"),
    ],
)
def test_cache_dir_follows_environment_variables(monkeypatch, tmp_path, set_variables, expected):
    for name in ("KVTIER_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_variables.items():
        monkeypatch.setenv(name, value and str(tmp_path / value))
    assert cache_dir() == tmp_path / expected
    assert cache_dir().is_dir()


def test_cache_dir_is_writable_by_owner_only(monkeypatch, tmp_path):
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "new"))
    assert stat.S_IMODE(cache_dir().stat().st_mode) == 0o700


def test_write_atomically_replaces_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old and long")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomically_failure_leaves_no_temporary_file(tmp_path):
    taken = tmp_path / "taken"
    (taken / "by a folder").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write_atomically(taken, b"content")
    assert list(tmp_path.iterdir()) == [taken]


def test_reader_sees_one_version_during_write_atomically(tmp_path: Path):
    path = tmp_path / "file"
    versions = [bytes([number]) * 100_000 for number in range(20)]
    write_atomically(path, versions[0])
    with path.open("rb") as reader:
        for version in versions[1:]:
            write_atomically(path, version)
            assert path.read_bytes() == version
        assert reader.read() == versions[0]


def cgroup(root: Path, limits: dict[str, str]) -> None:
    """Write proc and sys files below `root` that describe a process in the cgroup /a/b.

    `limits` maps the paths of cgroups to the texts of their cpu.max files.
    """
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    for folder, text in limits.items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / folder / "cpu.max").write_text(text)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 8),
        ({"a/b": "max 100000\n"}, 8),
        ({"a/b": "350000 100000\n"}, 3),
        ({"a/b": "50000 100000\n"}, 1),
        ({"a/b": "400000 100000\n", "a": "200000 100000\n"}, 2),
        ({"a/b": "1600000 100000\n"}, 8),
        ({"a/b": "nonsense\n"}, 8),
    ],
)
def test_usable_cores_follow_affinity_and_cgroups(monkeypatch, tmp_path, limits, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    cgroup(tmp_path, limits)
    assert num_usable_cores(tmp_path) == expected


def test_usable_cores_without_cgroups_v2_follow_affinity(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    assert num_usable_cores(tmp_path) == 2
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/x\n")  # version 1
    assert num_usable_cores(tmp_path) == 2
