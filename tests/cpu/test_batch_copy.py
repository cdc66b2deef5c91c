"""BatchCopy on every available placement, compared with numpy."""

import gc
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import (
    ArgumentError,
    ClosedError,
    DTypeError,
    RangeError,
    StateError,
)
from kvtier.memory import CPU, BatchCopy, Buffer, Stream, context, copy
from kvtier.memory.copy_paths import PATH_NAMES

paths = pytest.mark.parametrize("path", [None, *PATH_NAMES])


def numbers(size, seed=0):
    """Return random bytes."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


# ---- calls ----


def test_batch_copy_copies_at_run_and_not_before(placement, make, read):
    src, dst = make(placement, numbers(8)), make(placement, np.zeros(8, np.uint8))
    batch = BatchCopy()
    batch(src, 8, dst)
    assert read(dst).tolist() == [0] * 8
    assert len(batch) == 1
    batch.run()
    assert read(dst).tolist() == numbers(8).tolist()
    assert len(batch) == 0


def test_batch_copy_call_returns_end_of_destination(placement, make, read):
    a, b, dst = make(placement, numbers(4, 1)), make(placement, numbers(4, 2)), make(placement, np.zeros(8, np.uint8))
    with BatchCopy() as batch:
        end = batch(a, 4, dst)
        assert (end.size, end.data()) == (4, dst.data() + 4)
        assert batch(b, 3, end).size == 1
        assert batch(a.data(), 2, dst.data() + 1) == dst.data() + 3
    expected = np.concatenate([numbers(4, 1), numbers(4, 2)[:3], [0]])
    expected[1:3] = numbers(4, 1)[:2]
    assert read(dst).tolist() == expected.tolist()


def test_batch_copy_sizes_count_elements():
    src, dst = Buffer.wrap(np.arange(6, dtype=np.int32)), Buffer.wrap(np.zeros(6, np.int32))
    with BatchCopy() as batch:
        batch(src, 2, dst)
        batch.pieces(src, [4], 2, dst, [3])
    assert dst.tolist() == [0, 1, 0, 4, 5, 0]
    assert batch.result.nbytes == 16


def test_empty_batch_copy_runs():
    result = BatchCopy().run()
    assert (result.num_calls, result.num_entries, result.nbytes, result.path) == (0, 0, 0, "")
    assert result.merge_ratio == 1.0


def test_zero_size_copies_count_as_calls_but_not_as_entries():
    src, dst = Buffer(8, "u8"), Buffer(8, "u8")
    with BatchCopy() as batch:
        batch(src, 0, dst)
        batch.pieces(src, [0, 1], [0, 0], dst, [3, 2])
        batch.pieces(src, [], [], dst, [])
        batch.pointers([0, 0], 0, [0, 0])
    assert (batch.result.num_calls, batch.result.num_entries, batch.result.steps) == (5, 0, ())


def test_batch_copy_can_run_repeatedly():
    src, dst = Buffer.wrap(numbers(8)), Buffer.wrap(np.zeros(8, np.uint8))
    batch = BatchCopy()
    for k in range(3):
        batch(src.slice(k, 1), 1, dst.slice(k))
        assert batch.run().num_calls == 1
    assert dst.tolist()[:3] == numbers(8)[:3].tolist()


# ---- groups ----


def test_adjacent_copies_without_group_do_not_merge():
    src, dst = Buffer(8, "u8"), Buffer(8, "u8")
    with BatchCopy() as batch:
        end = batch(src, 4, dst)
        batch(src.slice(4), 4, end)
    assert (batch.result.num_calls, batch.result.num_entries) == (2, 2)


def test_adjacent_copies_in_group_merge():
    src, dst = Buffer.wrap(numbers(64)), Buffer.wrap(np.zeros(64, np.uint8))
    with BatchCopy() as batch:
        with batch.group():
            for k in (3, 0, 2, 1):
                batch(src.slice(4 * k), 4, dst.slice(4 * k))
        with batch.group():
            batch(src.slice(16), 4, dst.slice(16))
    assert (batch.result.num_calls, batch.result.num_entries, batch.result.merge_ratio) == (5, 2, 2.5)
    assert dst.tolist()[:20] == numbers(64)[:20].tolist()


def test_pieces_and_pointers_in_group_merge_with_adjacent_copies():
    src, dst = Buffer(64, "u8"), Buffer(64, "u8")
    with BatchCopy() as batch, batch.group():
        batch(src, 4, dst)
        batch.pieces(src, [8, 4], 4, dst, [8, 4])
        batch.pointers([src.data() + 12], [4], [dst.data() + 12])
    assert batch.result.num_entries == 1


def test_nested_group_raises():
    batch = BatchCopy()
    with batch.group(), pytest.raises(StateError, match="do not nest"), batch.group():
        pass
    with batch.group():
        pass  # the failed attempt did not leave a group open


def test_run_inside_group_raises_and_keeps_copies():
    src, dst = Buffer.wrap(numbers(4)), Buffer.wrap(np.zeros(4, np.uint8))
    batch = BatchCopy()
    with batch.group():
        batch(src, 4, dst)
        with pytest.raises(StateError, match="open group"):
            batch.run()
    batch.run()
    assert dst.tolist() == numbers(4).tolist()


def test_discard_in_group_keeps_group_open():
    batch, src = BatchCopy(), Buffer(8, "u8")
    with batch.group():
        batch(src, 4, Buffer(8, "u8"))
        batch.discard()
        with pytest.raises(StateError):
            batch.run()
        dst = Buffer(8, "u8")
        batch(src, 4, batch(src.slice(4), 4, dst))
    assert batch.run().num_calls == 2


def test_exception_in_group_closes_group():
    batch = BatchCopy()
    with pytest.raises(KeyError), batch.group():
        raise KeyError
    with batch.group():
        pass


# ---- lifetime ----


def test_exception_in_batch_copy_discards_copies():
    src, dst = Buffer.wrap(numbers(4)), Buffer.wrap(np.zeros(4, np.uint8))
    batch = BatchCopy()

    def fail():
        with batch:
            batch(src, 4, dst)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (len(batch), batch.result) == (0, None)
    batch.run()
    assert dst.tolist() == [0] * 4


def test_dropping_batch_with_pending_copies_warns():
    def drop():
        BatchCopy()(Buffer(4, "u8"), 4, Buffer(4, "u8"))
        gc.collect()

    with pytest.warns(RuntimeWarning, match="with 1 copies was dropped"):
        drop()


def test_dropping_finished_batch_copy_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with BatchCopy() as batch:
            batch(Buffer(4, "u8"), 4, Buffer(4, "u8"))
        batch(Buffer(4, "u8"), 4, Buffer(4, "u8"))
        batch.discard()
        del batch
        gc.collect()


def test_batch_copy_keeps_buffers_until_run():
    target = Buffer.wrap(np.zeros(4, np.uint8))
    batch = BatchCopy()
    batch(Buffer.wrap(numbers(4).copy()), 4, target)
    gc.collect()
    batch.run()
    assert target.tolist() == numbers(4).tolist()


# ---- invalid arguments ----


def test_batch_copy_with_invalid_arguments_raises():
    src, dst = Buffer(8, "u8"), Buffer(4, "u8")
    batch = BatchCopy()
    with pytest.raises(RangeError, match=r"5 elements from a Buffer of 8 into a Buffer of 4"):
        batch(src, 5, dst)
    with pytest.raises(RangeError, match="-1"):
        batch(src, -1, dst)
    with pytest.raises(DTypeError, match=r"u8.*i8"):
        batch(src, 1, Buffer(4, "i8"))
    with pytest.raises(ArgumentError, match="both be Buffers or both addresses"):
        batch(src, 1, dst.data())
    with pytest.raises(RangeError, match="-3 bytes"):
        batch(src.data(), -3, dst.data())
    with pytest.raises(RangeError, match="0x0"):
        batch(0, 3, dst.data())
    with pytest.raises(ArgumentError, match="read-only"):
        batch(dst, 1, Buffer.wrap(b"abcd"))
    assert len(batch) == 0


def test_pieces_error_names_the_first_invalid_piece():
    src, dst = Buffer(100, "u8"), Buffer(50, "u8")
    batch = BatchCopy()
    with pytest.raises(RangeError, match=r"piece 1: cannot copy 10 elements from offset 95 in a Buffer of 100"):
        batch.pieces(src, [0, 95, 99], 10, dst, [0, 1, 2])
    with pytest.raises(RangeError, match=r"piece 2: cannot copy 1 elements .* to offset 50 in a Buffer of 50"):
        batch.pieces(src, [0, 1, 2], 1, dst, [0, 1, 50])
    with pytest.raises(RangeError, match="piece 0: cannot copy -1"):
        batch.pieces(src, [0], -1, dst, [0])
    with pytest.raises(RangeError, match="piece 0"):
        batch.pieces(src, [-1], 1, dst, [0])
    with pytest.raises(ArgumentError, match="2, 1 and 1"):
        batch.pieces(src, [0, 1], 1, dst, [0])
    with pytest.raises(ArgumentError, match="2, 2 and 3"):
        batch.pieces(src, [0, 1], [1, 1, 1], dst, [0, 1])
    with pytest.raises(ArgumentError, match="float"):
        batch.pieces(src, [0.5], 1, dst, [0])
    with pytest.raises(ArgumentError, match="one-dimensional"):
        batch.pieces(src, np.zeros((2, 2), np.int64), 1, dst, [0])
    with pytest.raises(RangeError, match="piece 1: cannot copy 4 bytes from 0x0"):
        batch.pointers([src.data(), 0], 4, [dst.data(), dst.data()])
    with pytest.raises(ArgumentError, match="read-only"):
        batch.pieces(dst, [0], 1, Buffer.wrap(b"abcd"), [0])
    with pytest.raises(RangeError, match="piece 0"):
        batch.pieces(src, [2**63 - 1], [1], dst, [0])  # offset + count overflows
    with pytest.raises(RangeError, match="piece 0"):
        batch.pieces(src, [0], [2**63 - 1], dst, [1])
    with pytest.raises(TypeError):
        batch(src.data(), 2.5, dst.data())
    assert len(batch) == 0


def test_batch_copy_accepts_numpy_integers():
    src, dst = Buffer.wrap(numbers(8)), Buffer.wrap(np.zeros(8, np.uint8))
    with BatchCopy() as batch:
        batch.pieces(src, [0], np.int64(2), dst, [0])
        batch(np.int64(src.data() + 2), np.int32(2), np.uint64(dst.data() + 2))
    assert dst.tolist()[:4] == numbers(8)[:4].tolist()


def test_batch_copy_accepts_empty_buffers():
    with BatchCopy() as batch:
        batch.pieces(Buffer(dtype="u8"), [0], 0, Buffer(dtype="u8"), [0])
        batch(Buffer(dtype="u8"), 0, Buffer(dtype="u8"))
    assert batch.result.num_calls == 2


def test_batch_copy_of_closed_buffer_raises():
    closed = Buffer(4, "u8")
    closed.close()
    with pytest.raises(ClosedError):
        BatchCopy()(closed, 1, Buffer(4, "u8"))
    with pytest.raises(ClosedError):
        BatchCopy().pieces(Buffer(4, "u8"), [0], 1, closed, [0])


def test_batch_copy_with_unknown_path_raises():
    with pytest.raises(ArgumentError, match=r"'dma'.*host, loop, driver, gather"):
        BatchCopy(path="dma")


def test_packed_elements_are_copied_only_in_whole_bytes():
    src, dst = Buffer.pack(np.arange(8, dtype=np.uint8), "u4"), Buffer.pack(np.full(8, 15, np.uint8), "u4")
    with BatchCopy() as batch:
        batch(src, 2, dst.slice(4))
        batch.pieces(src, [2, 6], 2, dst, [0, 6])
    assert dst.tolist() == [2, 3, 15, 15, 0, 1, 6, 7]
    batch = BatchCopy()
    with pytest.raises(ArgumentError, match="3 elements of u4 end inside a byte"):
        batch(src, 3, dst)
    with pytest.raises(ArgumentError, match="multiples of 2"):
        batch.pieces(src, [1], 2, dst, [0])


@given(size=st.integers(1, 9), n=st.integers(0, 9), start=st.integers(0, 4))
def test_batch_copy_of_packed_elements_equals_copy_or_raises(size, n, start):
    # A copy may raise only if it ends inside a byte and copies less than the whole source.
    def fresh():
        return Buffer.pack(np.full(2 * start + size, 9, np.uint8), "u4").slice(2 * start)

    n, src = min(n, size), Buffer.pack(np.arange(size, dtype=np.uint8), "u4")
    expected, copied = fresh(), fresh()
    copy(src, n, expected)
    batch = BatchCopy()
    try:
        batch(src, n, copied)
    except ArgumentError:
        assert n % 2
        assert n < size
        return
    batch.run()
    assert copied.tolist() == expected.tolist()


def test_batch_copy_copies_whole_packed_buffer_of_odd_size():
    src, dst = Buffer.pack(np.arange(3, dtype=np.uint8), "u4"), Buffer(3, "u4")
    with BatchCopy() as batch:
        batch(src, 3, dst)
    assert dst.tolist() == [0, 1, 2]


# ---- paths and results ----


@paths
def test_every_copy_path_copies_the_same_bytes(path, placement, make, read):
    src, dst = make(placement, numbers(1000, 1)), make(placement, numbers(1000, 2))
    random = np.random.default_rng(3)
    src_at, dst_at = random.permutation(100) * 10, random.permutation(100) * 10
    sizes = random.integers(0, 11, 100)
    expected = numbers(1000, 2)
    for x, y, n in zip(src_at, dst_at, sizes, strict=True):
        expected[y : y + n] = numbers(1000, 1)[x : x + n]
    with BatchCopy(path=path) as batch:
        batch.pieces(src, torch.from_numpy(src_at), sizes.tolist(), dst, dst_at.astype(np.uint32))
    assert np.array_equal(read(dst), expected)
    assert batch.result.path == path or path is None or f"{path} was forced, but" in batch.result.reason
    assert batch.result.reason


def test_batch_result_gives_reason_for_replacing_forced_path():
    with BatchCopy(path="driver") as batch:
        batch(Buffer(4, "u8"), 4, Buffer(4, "u8"))
    assert batch.result.path == "host"
    assert "driver was forced, but driver needs GPU memory on one side" in batch.result.reason


def test_long_dependency_chain_counts_each_piece_as_one_wave():
    buffer = Buffer.wrap(numbers(300))
    with BatchCopy(path="host") as batch:
        batch.pieces(buffer, np.arange(100), 1, buffer, np.arange(100) + 1)
    assert (batch.result.num_waves, batch.result.path) == (100, "loop")
    assert "host was forced, but the pieces have too many dependencies" in batch.result.reason
    assert buffer.tolist()[:101] == [numbers(300)[0]] * 101


def test_batch_copy_mixes_placements(placement, make, read):
    a, b = make(placement, numbers(64, 1)), make(CPU, numbers(64, 2))
    c, d = make(CPU, np.zeros(64, np.uint8)), make(placement, np.zeros(64, np.uint8))
    with BatchCopy() as batch:
        with batch.group():
            batch(a, 32, c)
            batch(b, 32, d)
            batch(a.slice(32), 32, c.slice(32))
        batch(d, 16, a)  # reads bytes that the group wrote
    assert read(c).tolist() == numbers(64, 1).tolist()
    assert read(d).tolist()[:32] == numbers(64, 2)[:32].tolist()
    assert read(a).tolist()[:16] == numbers(64, 2)[:16].tolist()
    assert batch.result.num_waves == 2


# ---- streams ----


def test_batch_copy_queued_on_host_stream_keeps_memory_alive():
    gate, stream = threading.Event(), Stream()
    src, dst = Buffer.wrap(np.zeros(1 << 16, np.uint8)), Buffer(1 << 16, "u8")
    out, source_array = dst.numpy(), src.numpy()
    stream.enqueue(gate.wait)
    stream.enqueue(lambda: source_array.fill(7))
    with context(stream=stream), BatchCopy() as batch:
        batch.pieces(src, np.arange(0, 1 << 16, 256), 256, dst, np.arange(0, 1 << 16, 256)[::-1].copy())
    del src, dst, batch
    gc.collect()
    assert not stream.query()
    gate.set()
    stream.synchronize()
    assert (out == 7).all()


def test_batch_copy_of_gpu_memory_on_host_stream_raises():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    batch = BatchCopy()
    batch(Buffer(4, "u8"), 4, Buffer(4, "u8", "cuda:0"))
    with context(stream=Stream()), pytest.raises(ArgumentError, match="cuda:0"):
        batch.run()


# ---- random batches compared with numpy ----


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_dependent_copies_in_one_buffer_keep_order(placement, make, read, data):
    size = data.draw(st.integers(30, 400))
    seed = data.draw(st.integers(0, 1000))
    buffer, expected = make(placement, numbers(size, seed)), numbers(size, seed)
    random = np.random.default_rng(seed)
    count = data.draw(st.integers(1, 80))
    lengths = random.integers(0, 30, count)
    src_at, dst_at = random.integers(0, size - lengths + 1), random.integers(0, size - lengths + 1)
    for x, y, n in zip(src_at, dst_at, lengths, strict=True):
        expected[y : y + n] = expected[x : x + n].copy()
    with BatchCopy(path=data.draw(st.sampled_from([None, *PATH_NAMES]))) as batch:
        batch.pieces(buffer, src_at, lengths, buffer, dst_at)
    assert np.array_equal(read(buffer), expected)


class BatchMachine(RuleBasedStateMachine):
    """Adds random copies between three buffers to a batch, runs the batch, and compares the bytes with numpy arrays."""

    SIZE = 60

    @initialize(path=st.sampled_from([None, "loop", "host", "gather"]))
    def start(self, path):
        self.buffers = [Buffer.wrap(numbers(self.SIZE, k)) for k in range(3)]
        self.model = [numbers(self.SIZE, k) for k in range(3)]
        self.batch, self.pending, self.group = BatchCopy(path=path), [], None

    @rule(a=st.integers(0, 2), b=st.integers(0, 2), data=st.data(), raw=st.booleans())
    def copy_one(self, a, b, data, raw):
        n = data.draw(st.integers(0, 12))
        x, y = data.draw(st.integers(0, self.SIZE - n)), data.draw(st.integers(0, self.SIZE - n))
        src, dst = self.buffers[a].slice(x), self.buffers[b].slice(y)
        if raw:
            assert self.batch(src.data(), n, dst.data()) == dst.data() + n
        else:
            assert self.batch(src, n, dst).size == dst.size - n
        self.pending.append((a, x, n, b, y))

    @rule(a=st.integers(0, 2), b=st.integers(0, 2), count=st.integers(0, 10), seed=st.integers(0, 999))
    def copy_pieces(self, a, b, count, seed):
        random = np.random.default_rng(seed)
        n = random.integers(0, 12, count)
        x, y = random.integers(0, self.SIZE - n + 1), random.integers(0, self.SIZE - n + 1)
        self.batch.pieces(self.buffers[a], x, n, self.buffers[b], y)
        self.pending += [(a, *entry) for entry in zip(x, n, [b] * count, y, strict=True)]

    @precondition(lambda self: self.group is None)
    @rule()
    def open_group(self):
        self.group = self.batch.group()
        self.group.__enter__()

    @precondition(lambda self: self.group is not None)
    @rule()
    def close_group(self):
        self.group.__exit__(None, None, None)
        self.group = None

    @rule()
    def run(self):
        if self.group is not None:
            with pytest.raises(StateError):
                self.batch.run()
            return
        result = self.batch.run()
        for a, x, n, b, y in self.pending:
            self.model[b][y : y + n] = self.model[a][x : x + n].copy()
        moved = [entry for entry in self.pending if entry[2]]
        assert result.num_calls == len(self.pending)
        assert result.num_entries <= len(moved)
        assert result.nbytes == sum(entry[2] for entry in moved)
        assert sum(len(step.pieces) for step in result.steps) == result.num_entries
        self.pending = []

    @precondition(lambda self: self.group is None)
    @rule()
    def discard(self):
        self.batch.discard()
        self.pending = []

    @invariant()
    def bytes_match_model(self):
        if hasattr(self, "model"):
            assert all((buffer.numpy() == model).all() for buffer, model in zip(self.buffers, self.model, strict=True))
            assert len(self.batch) == len(self.pending)

    def teardown(self):
        if hasattr(self, "batch"):
            self.batch.discard()


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_copy_and_batch_copy_have_same_call_signature(placement, make, read):
    def copy_twice(functor):
        src, dst = make(placement, numbers(8, 1)), make(placement, np.zeros(8, np.uint8))
        end = functor(src, 3, dst)
        functor(src.slice(5), 3, end)
        if isinstance(functor, BatchCopy):
            functor.run()
        return read(dst).tolist()

    assert copy_twice(copy) == copy_twice(BatchCopy())


def test_copy_table_runs_alone_and_with_dependent_table():
    memory = np.arange(64, dtype=np.uint8)
    at, held = memory.ctypes.data, Buffer.wrap(memory).holding
    table = np.array([[at, at + 8], [at + 32, at + 40], [4, 8]])
    where = {"src_placement": CPU, "dst_placement": CPU, "keep": [held]}
    with BatchCopy() as batch:
        batch.table(table, nbytes=12, **where)
    assert memory[32:48].tolist() == [0, 1, 2, 3, 36, 37, 38, 39, *range(8, 16)]
    assert (batch.result.num_calls, batch.result.num_entries, batch.result.nbytes) == (2, 2, 12)
    with BatchCopy() as batch:  # dependencies between two tables are detected
        batch.table(table, nbytes=12, **where)
        batch.table(np.array([[at + 40, at], [at + 48, at], [2, 0]]), **where)
    assert memory[48:50].tolist() == [8, 9]
    assert (batch.result.num_calls, batch.result.num_entries, batch.result.num_waves) == (4, 3, 2)
    with BatchCopy() as batch:
        batch.table(np.empty((3, 0), np.int64), **where)
    assert batch.result.num_calls == 0
