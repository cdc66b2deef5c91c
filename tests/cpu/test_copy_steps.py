"""Planning of copy steps: directions, waves, scopes, memory lifetime and argument checks."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ArgumentError, DTypeError, RangeError
from kvtier.memory import CPU, PINNED, BatchCopy, Buffer, Placement, context
from kvtier.memory.copy_paths import CopyContext, Pieces, run_path, why_not
from kvtier.memory.copy_plan import MAX_WAVES, plan_copies
from kvtier.memory.copy_steps import CopyStep, plan_steps
from kvtier.memory.native import native
from support import held_back, new_stream

GPU = Placement("cuda", 0)
PLACES = [CPU, PINNED]  # both are host memory, so no GPU is needed


def numbers(size, seed=0):
    """Return random bytes."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


# ---- directions ----

places = st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES))


@given(
    st.lists(
        st.tuples(places, st.booleans(), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 3)), max_size=4)),
        max_size=6,
    ),
    st.integers(0, 99),
    st.sampled_from([None, "loop", "host"]),
)
@settings(max_examples=80, deadline=None)
def test_steps_copy_each_piece_in_the_requested_direction(chunks, seed, path):
    """No two copies have the same destination address, so that the address identifies the direction of a copy."""
    memory, expected = numbers(240, seed), numbers(240, seed)
    base, batch, at = memory.ctypes.data, BatchCopy(path=path), 0
    directions, num_moving = {}, 0
    for (source, target), grouped, copies in chunks:
        table = []
        for cell, size in copies:
            table.append((base + cell * 4, size, base + (at := at + 4)))
            expected[at : at + size] = expected[cell * 4 : cell * 4 + size].copy()
            directions[base + at] = (source, target)
            num_moving += size > 0
        columns = [list(column) for column in zip(*table, strict=True)] or [[], [], []]
        where = {"src_placement": source, "dst_placement": target}
        if grouped:
            with batch.group():
                batch.pointers(*columns, **where)
        else:
            batch.pointers(*columns, **where)
    result = batch.run()
    assert np.array_equal(memory, expected)
    assert (result.num_calls, result.num_entries) == (len(directions), num_moving)
    assert len(result.steps) >= result.num_waves
    for step in result.steps:
        assert {directions[address] for address in step.pieces.table[1].tolist()} == {(step.job.src, step.job.dst)}
        assert step.pieces.nbytes == step.pieces.table[2].sum()
    assert sum(len(step.pieces) for step in result.steps) == num_moving


def test_adjacent_copies_in_two_directions_do_not_merge():
    memory = numbers(64)
    base = memory.ctypes.data
    batch = BatchCopy()
    with batch.group():
        for k, target in enumerate((CPU, PINNED, PINNED, CPU)):
            batch.pointers([base + 4 * k], 4, [base + 32 + 4 * k], src_placement=CPU, dst_placement=target)
    result = batch.run()
    assert (result.num_calls, result.num_entries) == (4, 3)
    assert [(str(step.job), len(step.pieces)) for step in result.steps] == [("cpu to cpu", 2), ("cpu to pinned", 1)]
    assert memory[32:48].tolist() == numbers(64)[:16].tolist()


def test_long_copy_chain_in_two_directions_runs_in_order():
    count = MAX_WAVES + 10
    memory = numbers(4 * count + 4)
    base, batch = memory.ctypes.data, BatchCopy(path="loop")
    for k in range(count):
        target = PINNED if k // 3 % 2 else CPU
        batch.pointers([base + 4 * k], 4, [base + 4 * k + 4], src_placement=CPU, dst_placement=target)
    result = batch.run()
    assert memory.reshape(-1, 4).tolist() == [numbers(4 * count + 4)[:4].tolist()] * (count + 1)
    assert result.num_waves == count
    names = [str(step.job) for step in result.steps]
    assert names == ["cpu to pinned" if k % 2 else "cpu to cpu" for k in range(len(names))]
    assert [len(step.pieces) for step in result.steps] == [3] * (count // 3) + [count % 3]
    assert "was forced" not in result.reason


# ---- waves and self-overlapping pieces ----


def test_dependent_copies_run_one_step_per_wave():
    memory = numbers(64)
    buffer = Buffer.wrap(memory)
    with BatchCopy(path="host") as batch:
        batch.pieces(buffer, [0, 16, 32], 4, buffer, [16, 32, 48])
    assert (batch.result.num_waves, len(batch.result.steps)) == (3, 3)
    assert batch.result.reason == ("forced" if native().code else batch.result.reason)
    assert "refused" not in batch.result.reason
    assert memory[48:52].tolist() == numbers(64)[:4].tolist()


@pytest.mark.parametrize("forced", [None, "loop", "host"])
def test_only_self_overlapping_pieces_run_one_by_one(forced):
    memory = numbers(128)
    buffer = Buffer.wrap(memory)
    with BatchCopy(path=forced) as batch:  # source and destination overlap only in piece 1
        batch.pieces(buffer, [0, 20, 48], [8, 16, 8], buffer, [8, 24, 40])
    expected = numbers(128)
    for src, n, dst in ((0, 8, 8), (20, 16, 24), (48, 8, 40)):
        expected[dst : dst + n] = numbers(128)[src : src + n]
    assert memory.tolist() == expected.tolist()
    first, second = batch.result.steps
    assert (first.path, len(first.pieces), len(second.pieces)) == ("loop", 1, 2)
    assert first.pieces.table[2].tolist() == [16]
    reason = "source and destination of a piece overlap"
    assert first.reason == (f"host was forced, but {reason}" if forced == "host" else reason)
    assert batch.result.num_waves == 1


def test_single_self_overlapping_piece_is_one_step():
    buffer = Buffer.wrap(numbers(32))
    with BatchCopy() as batch:
        batch(buffer, 20, buffer.slice(4))
    assert [(step.path, len(step.pieces)) for step in batch.result.steps] == [("loop", 1)]
    assert buffer.tolist()[4:24] == numbers(32)[:20].tolist()


# ---- scopes ----


def test_pieces_merge_within_one_call_but_not_between_calls():
    src, dst = Buffer(64, "u8"), Buffer(64, "u8")
    with BatchCopy() as batch:
        batch.pieces(src, [0, 4], 4, dst, [0, 4])
        batch.pieces(src, [8, 12], 4, dst, [8, 12])
        batch(src.slice(16), 4, dst.slice(16))
    assert (batch.result.num_calls, batch.result.num_entries) == (5, 3)


def test_group_still_has_its_own_scope_after_discard():
    src, dst = Buffer(64, "u8"), Buffer(64, "u8")
    batch = BatchCopy()
    with batch.group():
        pass
    with batch.group():
        batch.discard()
        batch(src, 4, dst)
    for at in (4, 8, 12, 16):
        batch.pieces(src, [at], 4, dst, [at])
    assert batch.run().num_entries == 5


# ---- lifetime ----


@pytest.mark.parametrize("how", ["call", "pieces", "pointers", "table"])
def test_pending_batch_copy_keeps_memory_alive(how):
    array, out = numbers(8), np.zeros(8, np.uint8)
    alive, expected = weakref.ref(array), array.tolist()
    with new_stream() as stream:
        with held_back(stream):
            with context(stream=stream), BatchCopy() as batch:
                src, dst = Buffer.wrap(array), Buffer.wrap(out)
                if how == "call":
                    batch(src, 8, dst)
                elif how == "pieces":
                    batch.pieces(src, [0], 8, dst, [0])
                elif how == "pointers":
                    batch.pointers([src.data()], 8, [dst.data()], keep=[src])
                else:
                    table = np.array([[src.data()], [dst.data()], [8]])
                    batch.table(table, src_placement=CPU, dst_placement=CPU, keep=[src.holding])
            del src, array, batch
            gc.collect()
            assert alive() is not None
            assert not out.any()
        stream.synchronize()
        gc.collect()
        assert out.tolist() == expected
        assert alive() is None


# ---- invalid arguments ----


def test_invalid_addresses_and_sizes_raise():
    for src, n, dst in itertools.product((-1, 0, 1, 4096), (-1, 0, 1, 2), (-1, 0, 1, 4096)):
        batch = BatchCopy()
        where = {"src_placement": CPU, "dst_placement": CPU}
        if n < 0 or (n > 0 and (src <= 0 or dst <= 0)):
            with pytest.raises(RangeError, match=f"piece 1: cannot copy {n} bytes"):
                batch.pointers([4096, src, -1], [4096, n, 4096], [4096, dst, -1], **where)
            with pytest.raises(RangeError, match=f"cannot copy {n} bytes"):
                batch(src, n, dst)
            assert len(batch) == 0
        else:
            batch.pointers([4096, src], [4096, n], [4096, dst], **where)
            assert batch(src, n, dst) == dst + n
            assert len(batch) == 3
            batch.discard()


@given(
    st.lists(st.tuples(st.integers(-1, 11), st.integers(-1, 11), st.integers(-1, 11)), min_size=1, max_size=4),
    st.integers(1, 10),
    st.integers(1, 10),
)
@settings(max_examples=150, deadline=None)
def test_range_error_names_the_first_invalid_piece(pieces, src_size, dst_size):
    src, dst = Buffer(src_size, "u8"), Buffer(dst_size, "u8")
    bad = next(
        (k for k, (x, n, y) in enumerate(pieces) if min(x, n, y) < 0 or not (x + n <= src_size and y + n <= dst_size)),
        None,
    )
    batch = BatchCopy()
    columns = [[piece[k] for piece in pieces] for k in range(3)]
    if bad is None:
        batch.pieces(src, columns[0], columns[1], dst, columns[2])
        assert len(batch) == len(pieces)
        batch.discard()
    else:
        with pytest.raises(
            RangeError, match=f"piece {bad}: cannot copy {pieces[bad][1]} elements from offset {pieces[bad][0]} in"
        ):
            batch.pieces(src, columns[0], columns[1], dst, columns[2])


def test_pieces_with_invalid_array_type_raise():
    src, dst = Buffer(8, "u8"), Buffer(8, "u8")
    batch = BatchCopy()
    for wrong, message in (
        (np.array([0.5]), "float64"),
        (np.zeros((1, 1), np.int64), "one-dim"),
        (np.array(1), "one-dim"),
    ):
        with pytest.raises(ArgumentError, match=message):
            batch.pieces(src, wrong, 1, dst, [0])
    with pytest.raises(ArgumentError, match="bool"):
        batch.pieces(src, [True], 1, dst, [0])
    with pytest.raises(DTypeError, match=r"u8.*i8"):
        batch.pieces(src, [0], 1, Buffer(8, "i8"), [0])
    assert batch
    assert len(batch) == 0


def test_piece_offsets_count_elements():
    src, dst = Buffer.wrap(np.arange(8, dtype=np.int16)), Buffer.wrap(np.zeros(8, np.int16))
    with BatchCopy() as batch:
        batch.pieces(src, np.array([5, 1], np.uint8), [2, 1], dst, [0, 6])
    assert dst.tolist() == [5, 6, 0, 0, 0, 0, 1, 0]
    assert batch.result.nbytes == 6


# ---- contexts, pieces and paths ----


@pytest.mark.parametrize(
    ("src", "dst", "on_device", "over_link", "name"),
    [
        (CPU, PINNED, False, True, "cpu to pinned"),
        (CPU, GPU, True, True, "cpu to cuda:0"),
        (GPU, PINNED, True, True, "cuda:0 to pinned"),
        (GPU, GPU, True, False, "cuda:0 to cuda:0"),
    ],
)
def test_copy_context_reports_direction(src, dst, on_device, over_link, name):
    job = CopyContext(src, dst, None)
    assert (job.on_device, job.over_link, str(job)) == (on_device, over_link, name)


def test_why_not_returns_reason_for_unusable_path():
    between_hosts, to_gpu = CopyContext(CPU, CPU, None), CopyContext(CPU, GPU, None)
    assert why_not("loop", between_hosts) is why_not("loop", to_gpu) is None
    assert why_not("host", between_hosts) == (None if native().code else native().reason)
    for path in ("driver", "gather"):
        assert why_not(path, between_hosts) == f"{path} needs GPU memory on one side"
    assert why_not("host", to_gpu) == "the host copier cannot reach GPU memory"
    if not torch.cuda.is_available():
        assert why_not("driver", to_gpu)
        assert why_not("gather", to_gpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an NVIDIA GPU")
def test_gpu_copy_without_gpu_paths_is_planned_as_loop():
    plan = plan_copies(np.array([[4096], [8192], [16]]))
    (step,) = plan_steps(plan, (((GPU, CPU),), None), None, "gather")
    assert step.path == "loop"
    assert step.reason.startswith("gather was forced, but ")
    assert "no gather: " in step.reason
    assert "no driver: " in step.reason
    assert "no loop" not in step.reason


def test_part_of_pieces_keeps_ids_and_counts_its_own_bytes():
    table = np.array([[0, 100, 200], [1000, 1100, 1200], [1, 2, 4]])
    whole = Pieces(table, plan_copies(table))
    assert (len(whole), whole.nbytes, Pieces(table).nbytes) == (3, 7, 7)
    part = whole.part(slice(1, 3))
    assert (part.ids.tolist(), part.nbytes, len(part)) == ([1, 2], 6, 2)
    last = part.part(np.array([False, True]))
    assert (last.ids.tolist(), last.nbytes, last.table.tolist()) == ([2], 4, [[200], [1200], [4]])
    assert last.table.flags.c_contiguous


@pytest.mark.parametrize("path", ["loop", "host"])
def test_run_path_copies_pieces_and_returns_name_of_path(path):
    if path == "host" and native().code is None:
        pytest.skip("needs a C compiler")
    memory = numbers(32)
    base = memory.ctypes.data
    pieces = Pieces(np.array([[base, base + 4], [base + 16, base + 24], [4, 8]]))
    assert run_path(path, CopyContext(CPU, CPU, None), pieces) == path
    assert memory[16:32].tolist() == [*numbers(32)[:4], *numbers(32)[20:24], *numbers(32)[4:12]]


def test_step_reason_lists_estimates_in_ascending_order():
    pieces = Pieces(np.array([[0], [8], [8]]))
    job = CopyContext(CPU, CPU, None)
    step = CopyStep(job, pieces, "gather", "no loop: a test; ", {"driver": 30.2, "gather": 11.4})
    assert step.reason == "no loop: a test; estimated gather 11 us, driver 30 us"
    assert CopyStep(job, pieces, "host", "forced; ").reason == "forced"
