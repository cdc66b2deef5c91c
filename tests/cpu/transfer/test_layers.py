"""LayerDoneCounter: waits for layers, failures and timeouts."""

from types import SimpleNamespace

import pytest

from kvtier.errors import LayerSwapTimeoutError, RangeError, TransferError
from kvtier.memory import Event
from kvtier.transfer import LayerDoneCounter, layers
from support import held_back, new_stream
from transfer_support import WatchedCondition, run_in_thread

GROUPS = [range(1, 3), range(3, 6)]


@pytest.fixture
def clock(monkeypatch):
    """Give the counter a clock that only the test advances."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(layers, "time", clock)
    return clock


@pytest.mark.parametrize("stream_waits", [True, False])
def test_wait_for_a_pending_layer_returns_after_its_submission(clock, stream_waits):  # noqa: ARG001
    changed = WatchedCondition()
    counter = LayerDoneCounter(GROUPS, changed)
    with new_stream() as copies, new_stream() as compute:
        waiter = changed.start_waiter(lambda: counter.wait(4, compute if stream_waits else None, timeout=1.0))
        counter.submitted(1, copies.record())
        waiter.result(30)
        copies.synchronize()  # with a stream, counter.wait() can return before the copies end
        assert counter.is_done(3)
        assert not counter.is_done(1)


def test_wait_for_a_pending_layer_raises_after_its_failure():
    changed = WatchedCondition()
    counter = LayerDoneCounter(GROUPS, changed)
    waiter = changed.start_waiter(lambda: counter.wait(1, timeout=3600))
    counter.failed(0, OSError("first"))
    counter.failed(0, OSError("second"))
    with pytest.raises(TransferError, match="layer 1 did not arrive: first"):
        waiter.result(30)
    with new_stream() as compute:
        counter.wait(1, compute)  # the stream does not wait for a layer that will not arrive
        compute.synchronize()


def test_wait_on_the_host_returns_when_the_copy_ends():
    counter = LayerDoneCounter(GROUPS)
    reached = []
    with new_stream() as copies:
        with held_back(copies):
            copies.enqueue(lambda: reached.append("copied"))
            for group in range(2):
                counter.submitted(group, copies.record(Event(timing=True)))
            waits = [lambda: counter.wait(5, timeout=60), lambda: counter.wait_all(timeout=60)]
            waiters = [run_in_thread(lambda wait=wait: (wait(), reached.append("waited"))) for wait in waits]
        for waiter in waiters:
            waiter.result(30)
        assert reached == ["copied", "waited", "waited"]


@pytest.mark.parametrize("wait_all", [True, False])
def test_wait_for_a_pending_layer_raises_after_the_timeout(clock, wait_all):
    changed = WatchedCondition()
    counter = LayerDoneCounter(GROUPS, changed)
    wait = counter.wait_all if wait_all else lambda timeout: counter.wait(1, timeout=timeout)
    waiter = changed.start_waiter(lambda: wait(timeout=2.0))
    clock.now += 2.0
    with changed:
        changed.notify_all()
    with pytest.raises(LayerSwapTimeoutError, match="layer 1 has not been submitted"):
        waiter.result(30)


@pytest.mark.parametrize("wait_all", [True, False])
def test_wait_for_a_submitted_layer_raises_after_the_timeout(wait_all):
    counter = LayerDoneCounter(GROUPS)
    wait = counter.wait_all if wait_all else lambda timeout: counter.wait(4, timeout=timeout)
    with new_stream() as copies, held_back(copies):
        counter.submitted(0, Event())
        counter.submitted(1, copies.record())
        with pytest.raises(LayerSwapTimeoutError, match="was submitted, but has not arrived"):
            wait(timeout=0.01)


def test_wait_all_makes_a_stream_wait_for_every_layer():
    counter = LayerDoneCounter(GROUPS)
    order = []
    with new_stream() as first, new_stream() as second, new_stream() as compute:
        with held_back(second):
            first.enqueue(lambda: order.append(0))
            second.enqueue(lambda: order.append(1))
            counter.submitted(0, first.record())
            counter.submitted(1, second.record())
            counter.wait_all(compute)
            compute.enqueue(lambda: order.append("compute"))
            first.synchronize()
        compute.synchronize()
    assert order == [0, 1, "compute"]


@pytest.mark.parametrize("submitted", [False, True])
@pytest.mark.parametrize("reached", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_layer_is_done_if_its_event_is_reached_without_error(submitted, reached, failed):
    counter = LayerDoneCounter(GROUPS)
    with new_stream() as copies, held_back(copies):
        if submitted:
            counter.submitted(1, Event() if reached else copies.record())
        if failed:
            counter.failed(1, OSError())
        done = submitted and reached and not failed
        assert [counter.is_done(layer) for layer in range(1, 6)] == [False, False, done, done, done]


def test_wait_for_a_layer_outside_the_transfer_raises():
    counter = LayerDoneCounter(GROUPS)
    assert counter.groups == (range(1, 3), range(3, 6))
    for layer in (-1, 0, 6):
        with pytest.raises(RangeError, match=f"layer {layer} is not part of"):
            counter.wait(layer, timeout=0)
