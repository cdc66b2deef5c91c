"""Completion of transfers: deadlines, cancellation, failures, and the contents of the report."""

import time
from types import SimpleNamespace

import pytest

from kvtier.errors import CancelledTransferError, CopyError, TransferTimeoutError
from kvtier.transfer import TransferStatus, handle, manager
from transfer_support import SMALL, WatchedCondition, run_in_thread, stepped

SIZE = SMALL.block_bytes


@pytest.fixture
def clock(monkeypatch):
    """Give deadlines a clock that only the test advances."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(handle, "time", clock)
    monkeypatch.setattr(manager, "time", clock)
    return clock


@pytest.fixture
def watched(monkeypatch):
    """Give transfers a condition that reports waiting threads."""
    monkeypatch.setattr(handle, "threading", SimpleNamespace(Condition=WatchedCondition))


def wait_for_slices(save, count):
    """Wait until `count` slices of a queued transfer are in flight."""
    with save._changed:
        assert save._changed.wait_for(lambda: len(save._ends) >= count, 60)


# ---- deadlines ----


def test_queued_transfer_is_late_at_its_deadline(clock):
    transfers, mover, _ = stepped()
    with transfers:
        ahead = transfers.save(range(4), range(4))
        wait_for_slices(ahead, 2)
        late = transfers.save([5, 6], [5, 6], timeout=2.0)
        clock.now += 1.5
        assert (late.report, late.status) == (None, TransferStatus.QUEUED)
        clock.now += 0.5
        assert late.report.status is late.status is TransferStatus.LATE
        assert not late.cancel()
        mover.open()
        assert ahead.wait(60).status is TransferStatus.DONE


def test_late_transfer_is_skipped_by_the_lane():
    transfers, mover, _ = stepped()
    with transfers:
        ahead = transfers.save(range(4), range(4))
        wait_for_slices(ahead, 2)
        late = transfers.save([5], [5], timeout=0.0)
        behind = transfers.save([7], [7], timeout=3600)
        mover.open()
        assert behind.wait(60).status is TransferStatus.DONE
        assert mover.slots == [[0], [1], [2], [3], [7]]
        assert late.report.status is TransferStatus.LATE


def test_wait_returns_when_the_transfer_deadline_passes():
    transfers, mover, _ = stepped()
    with transfers:
        wait_for_slices(transfers.save(range(4), range(4)), 2)
        late = transfers.save([5], [5], timeout=0.05)
        assert late.wait(3600).status is TransferStatus.LATE
        assert transfers.save([6], [6], timeout=0.05).wait().status is TransferStatus.LATE
        mover.open()


@pytest.mark.usefixtures("clock")
def test_transfer_wait_raises_after_the_timeout_and_not_before():
    transfers, mover, _ = stepped()
    with transfers:
        save = transfers.save([0], [0])
        with pytest.raises(TransferTimeoutError, match="still running after 0 seconds"):
            save.wait(0)
        waiters = [run_in_thread(lambda: save.wait(1.0)), run_in_thread(lambda: transfers.wait_all(1.0))]
        mover.open()
        assert waiters[0].result(60).status is TransferStatus.DONE
        waiters[1].result(60)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("timeout", [None, 3600])
def test_cancel_or_copy_wakes_the_waiter_of_a_queued_transfer(timeout):
    transfers, mover, _ = stepped()
    with transfers:
        ahead = transfers.save(range(3), range(3))
        wait_for_slices(ahead, 2)
        cancelled, moved = transfers.save([5], [5]), transfers.save([6], [6])
        waiters = [each._changed.start_waiter(lambda each=each: each.settle(timeout)) for each in (cancelled, moved)]
        layer = moved._changed.start_waiter(lambda: moved.layers.wait(0, timeout=3600))
        assert cancelled.cancel()
        assert waiters[0].result(60).status is TransferStatus.CANCELLED
        mover.open()
        assert waiters[1].result(60).status is TransferStatus.DONE
        layer.result(60)


# ---- reports ----


def test_failed_status_takes_precedence_over_cancelled():
    transfers, mover, _ = stepped()
    with transfers:
        save = transfers.save(range(6), range(6))
        wait_for_slices(save, 2)
        save.failed(1, CopyError("the copy failed"))
        save.failed(1, CopyError("and again"))
        assert save.cancel()
        mover.open()
        report = save.wait(60)
    assert report.status is TransferStatus.FAILED
    assert report.moved == ((0, 0),)
    assert report.nbytes == SIZE
    assert [str(each.error) for each in report.failures][:1] == ["the copy failed"]
    assert [type(each.error) for each in report.failures[1:]] == [CancelledTransferError] * 4


def test_report_has_duration_and_strategy_and_number_of_copies():
    times = []

    class TimedMover:
        def __call__(self, path, job, pieces):
            times.append(time.perf_counter())
            done = mover(path, job, pieces)
            times.append(time.perf_counter())
            return done

    transfers, mover, _ = stepped(around=TimedMover())
    mover.open()
    with transfers:
        start = time.perf_counter()
        report = transfers.save(range(9), range(9)).wait(60)
        assert times[-1] - times[0] <= report.seconds <= time.perf_counter() - start
        assert (report.choice.strategy, report.choice.why) == ("direct", "the only strategy between host memories")
        assert report.num_copies == 9
        forced = transfers.save([0], [0], strategy="kernel").wait(60)
        assert forced.choice.why.startswith("kernel was forced, but there is no GPU")


def test_strategy_argument_overrides_the_config():
    transfers, _, _ = stepped(strategy="staged")
    with transfers:
        assert transfers.compile("d2h", [0], [0]).choice.why.startswith("staged was forced")
        assert transfers.compile("d2h", [0], [0], strategy="kernel").choice.why.startswith("kernel was forced")
        assert transfers.compile("d2h", [0], [0], strategy="direct").choice.why == "forced"
