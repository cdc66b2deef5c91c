"""The cost model fits measured times, adapts to speed changes and decides between loading and recomputing."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache_support import BLOCK, Lab, disk, prompt
from kvtier.cache.cost_model import CostModel, OnlineLeastSquares
from kvtier.messages import Route

DECAY = 1 - 1 / 40  # each new sample multiplies the weights of older samples by this factor, as in OnlineLeastSquares
LOAD, FETCH = (Route.HOST_TO_DEVICE, ""), (Route.STORE_TO_HOST, "disk")


def nonnegative_least_squares(samples: list[tuple[list[float], float]]) -> tuple[np.ndarray, float]:
    """Return the non-negative costs with the smallest weighted sum of squared errors, and this sum.

    Try every subset of the costs: set the other costs to 0, and solve the unconstrained problem for the subset. Keep
    the best non-negative result.
    """
    weights = np.sqrt(DECAY ** np.arange(len(samples))[::-1])
    x = np.array([[1.0, *amounts] for amounts, _ in samples]) * weights[:, None]
    y = np.array([seconds for _, seconds in samples]) * weights
    best, least = np.zeros(x.shape[1]), float(y @ y)
    for count in range(1, x.shape[1] + 1):
        for used in itertools.combinations(range(x.shape[1]), count):
            found = np.linalg.lstsq(x[:, used], y, rcond=None)[0]
            rest = float(((x[:, used] @ found - y) ** 2).sum())
            if found.min() >= 0 and rest < least - 1e-12:
                least = rest
                best = np.zeros(x.shape[1])
                best[list(used)] = found
    return best, least


def loss(costs: np.ndarray, samples) -> float:
    weights = DECAY ** np.arange(len(samples))[::-1]
    x = np.array([[1.0, *amounts] for amounts, _ in samples])
    y = np.array([seconds for _, seconds in samples])
    return float((weights * (x @ costs - y) ** 2).sum())


@st.composite
def timed_samples(draw):
    num_amounts = draw(st.integers(1, 2))
    true = [draw(st.floats(0.0, 10.0)) for _ in range(num_amounts + 1)]
    noise, correlation = draw(st.floats(0.0, 5.0)), draw(st.floats(0.0, 0.9))
    source = random.Random(draw(st.integers(0, 1 << 30)))
    samples = []
    for _ in range(draw(st.integers(num_amounts + 2, 40))):
        amounts = [source.uniform(0.1, 10.0) for _ in range(num_amounts)]
        if num_amounts == 2:  # make the two amounts correlated, like tokens and attended tokens
            amounts[1] = amounts[1] * (1 - correlation) + amounts[0] * correlation
        seconds = true[0] + sum(cost * amount for cost, amount in zip(true[1:], amounts, strict=True))
        samples.append((amounts, max(0.0, seconds + source.gauss(0, noise))))
    return samples


@given(timed_samples())
# a fit that allows negative costs has two negative costs here
@example([([9.3, 5.7], 6.7), ([3.4, 2.5], 0.3), ([2.9, 2.3], 0.9), ([8.0, 5.3], 7.3)])
def test_fit_equals_nonnegative_least_squares(samples):
    fit = OnlineLeastSquares(len(samples[0][0]), min)
    for amounts, seconds in samples:
        fit.observe(amounts, seconds)
    _, least = nonnegative_least_squares(samples)
    num_amounts = len(samples[0][0])
    costs = np.array([fit.predict([0.0] * num_amounts)] + [0.0] * num_amounts)
    for i in range(num_amounts):
        unit = [float(i == j) for j in range(num_amounts)]
        costs[i + 1] = fit.predict(unit) - costs[0]
    assert (costs >= -1e-9).all()
    assert loss(costs, samples) <= least * (1 + 1e-6) + 1e-6


def test_fit_to_samples_without_noise_is_exact():
    fit = OnlineLeastSquares(1, min)
    for count in (1, 5, 20, 60):
        fit.observe((count,), 0.004 + 0.0005 * count)
    assert fit.predict((100,)) == pytest.approx(0.004 + 0.05)
    assert fit.predict((0,)) == pytest.approx(0.004)


def test_fit_without_samples_predicts_none():
    assert OnlineLeastSquares(2, min).predict((1.0, 1.0)) is None


@pytest.mark.parametrize("count", [1, 50])
def test_fit_to_equal_samples_predicts_lower_and_upper_bounds(count):
    """All samples have the amounts (10, 50) and take 2 s. Three models fit these samples, and so do their mixtures.

    The first model has a fixed cost of 2 s. The second model has a cost of 0.2 s per unit of the first amount, and the
    third model has a cost of 0.04 s per unit of the second amount.
    """
    least, most = OnlineLeastSquares(2, min), OnlineLeastSquares(2, max)
    for fit in (least, most):
        for _ in range(count):
            fit.observe((10.0, 50.0), 2.0)
    for amounts, low, high in (((20.0, 100.0), 2.0, 4.0), ((5.0, 25.0), 1.0, 2.0), ((10.0, 500.0), 2.0, 20.0)):
        assert (least.predict(amounts), most.predict(amounts)) == (pytest.approx(low), pytest.approx(high))


def test_fit_to_collinear_amounts_predicts_upper_bound():
    fit = OnlineLeastSquares(2, max)
    for count in (1, 5, 20):  # the second amount is always ten times the first
        fit.observe((count, 10.0 * count), 1.0 + 0.5 * count)
    assert fit.predict((2.0, 20.0)) == pytest.approx(2.0)
    assert fit.predict((2.0, 0.0)) == pytest.approx(2.0)
    assert fit.predict((0.0, 20.0)) == pytest.approx(2.0)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_fit_does_not_depend_on_units(scale):
    fit = OnlineLeastSquares(2, max)
    for tokens, context in ((10, 100), (100, 100), (10, 5000), (70, 900), (1, 10)):
        fit.observe((tokens * scale, context * scale), 0.01 + 0.001 * tokens + 1e-5 * context)
    assert fit.predict((50 * scale, 1000 * scale)) == pytest.approx(0.07, rel=1e-6)


def test_cost_model_adapts_to_slower_link():
    """After a link becomes ten times slower, 200 transfers bring the estimate within 5 % of the new time."""
    model, amounts = CostModel(), itertools.cycle((4, 16, 64))
    for _, count in zip(range(300), amounts, strict=False):
        model.observe_transfer(LOAD, count, 0.001 + 0.0001 * count)
    for number, count in zip(range(200), amounts, strict=False):
        model.observe_transfer(LOAD, count, 0.01 + 0.001 * count)
        if number == 40:
            assert model.transfer_seconds(LOAD, 32) > 0.5 * 0.042
    assert model.transfer_seconds(LOAD, 32) == pytest.approx(0.042, rel=0.05)


def test_cost_model_measures_each_store_separately():
    model = CostModel()
    for count in (1, 10, 100):
        model.observe_transfer((Route.STORE_TO_HOST, "near"), count, 0.001 * count)
        model.observe_transfer((Route.STORE_TO_HOST, "far"), count, 0.1 * count)
    assert model.transfer_seconds((Route.STORE_TO_HOST, "near"), 10) == pytest.approx(0.01)
    assert model.transfer_seconds((Route.STORE_TO_HOST, "far"), 10) == pytest.approx(1.0)
    assert model.transfer_seconds((Route.STORE_TO_HOST, "other"), 10) is None


def test_decision_text_contains_load_and_compute_times():
    model = CostModel()
    assert str(model.decide({LOAD: 4}, 0, 16)) == "load 16 tokens: not enough measurements yet"
    for count in (1, 10, 50):
        model.observe_transfer(LOAD, count, 0.002 * count)
        model.observe_compute(count, count * count / 2, 0.001 * count)
    decision = model.decide({LOAD: 4}, 0, 16)
    assert decision.load
    assert str(decision) == "load 16 tokens: loading takes 8.00 ms, under the 16.00 ms of computing"
    decision = model.decide({LOAD: 4 + 40}, 0, 16)  # 40 other blocks are queued before these 4
    assert not decision.load
    assert str(decision) == "recompute 16 tokens: loading takes 88.00 ms, over the 16.00 ms of computing"
    assert model.decide({LOAD: 4, FETCH: 4}, 0, 16).load_seconds is None  # no fetch has been measured


def test_early_blocks_are_computed_and_late_blocks_are_loaded():
    """The cost of computing a token grows with its position, but the cost of loading it does not."""
    model = CostModel()
    for first in (0, 1000, 10000, 30000):
        for count in (16, 64):
            model.observe_compute(count, count * (first + count / 2), 1e-5 * count + 1e-8 * count * (first + count / 2))
    for count in (1, 4, 16):
        model.observe_transfer(LOAD, count, 0.0005 * count)
    assert not model.decide({LOAD: 4}, 0, 64).load
    assert model.decide({LOAD: 4}, 30000, 64).load


class Machine:
    """A simulated machine whose load and compute times have no noise, and a cost model that observes these times."""

    def __init__(self, latency: float) -> None:
        self.latency, self.model = latency, CostModel()

    def steps(self, first: int, stop: int):
        """Compute tokens `first` to `stop` in steps of up to 512. Yield (tokens, attended tokens, seconds) per step."""
        for begin in range(first, stop, 512):
            count = min(512, stop - begin)
            attended = count * (begin + count / 2)
            yield count, attended, 0.003 + 6e-5 * count + 2e-8 * attended

    def seconds(self, num_tokens: int, *, load: bool) -> float:
        """Return the time of a request. If `load`, all full blocks before the last token come from the store."""
        blocks = (num_tokens - 1) // 16 if load else 0
        loading = self.latency + 0.0036 + 0.00023 * blocks if load else 0.0  # FETCH time plus LOAD time, as in `serve`
        return loading + sum(seconds for _, _, seconds in self.steps(blocks * 16, num_tokens))

    def serve(self, num_tokens: int, *, is_new: bool) -> bool:
        """Serve one request and observe its times. Return True if its blocks were loaded."""
        blocks = (num_tokens - 1) // 16
        load = not is_new and self.model.decide({LOAD: blocks, FETCH: blocks}, 0, blocks * 16).load
        if load:
            self.model.observe_transfer(FETCH, blocks, self.latency + 0.003 + 0.0002 * blocks)
            self.model.observe_transfer(LOAD, blocks, 0.0006 + 0.00003 * blocks)
        for step in self.steps(blocks * 16 if load else 0, num_tokens):
            self.model.observe_compute(*step)
        return load


@pytest.mark.parametrize("seed", range(5))
def test_cost_model_chooses_faster_option_after_12_requests(seed):
    """At least 95 % of the choices are right. A choice is right if it is at most 10 % slower than the other choice."""
    lengths = (48, 96, 192, 384, 768, 1536)
    right = []
    for latency in (0.0, 0.005, 0.02, 0.05, 0.1, 0.25):
        machine = Machine(latency)
        requests = [(length, is_new) for length in lengths for is_new in (False, True)]
        random.Random(seed).shuffle(requests)
        for length, is_new in requests:
            machine.serve(length, is_new=is_new)
        for length in lengths:
            load = machine.serve(length, is_new=False)
            chosen, other = (machine.seconds(length, load=choice) for choice in (load, not load))
            right.append(chosen <= 1.1 * other)
    assert sum(right) >= 0.95 * len(right)


# ---- in the manager ------------------------------------------------------------------------------------------------


def with_measured_costs(lab: Lab, load: float, compute: float) -> Lab:
    for count in (1, 10, 100):
        lab.manager.cost_model.observe_transfer(LOAD, count, load * count)
        lab.manager.cost_model.observe_transfer(FETCH, count, load * count)
        lab.manager.cost_model.observe_compute(count, 0.0, compute * count)
    return lab


@pytest.mark.parametrize("is_faster", [False, True])
def test_host_blocks_are_loaded_only_if_faster_than_computing(is_faster):
    lab = Lab(20, always_load=False)
    lab.serve(prompt(1, 6))
    lab.evict("device")
    with_measured_costs(lab, load=0.001 if is_faster else 10.0, compute=0.01)
    allocation = lab.start(prompt(1, 6))
    assert allocation.decision.load == is_faster
    assert allocation.decision.num_tokens == 6 * BLOCK
    assert allocation.num_cached_tokens == (6 * BLOCK if is_faster else 0)
    assert allocation.tokens_from == ({"host": 6 * BLOCK, "device": 0} if is_faster else {"device": 0})
    lab.compute(allocation)
    assert lab.num_in("device", prompt(1, 6)) == 6


def test_decision_counts_only_blocks_missing_on_device():
    lab = Lab(20, always_load=False)
    lab.serve(prompt(1, 6))
    lab.manager.tree.evict(lab.control.tier("device"), 2)
    with_measured_costs(lab, load=10.0, compute=0.01)
    allocation = lab.start(prompt(1, 6))
    assert allocation.decision.num_tokens == 2 * BLOCK
    assert allocation.tokens_from == {"device": 4 * BLOCK}


@pytest.mark.parametrize("is_faster", [False, True])
def test_store_blocks_are_fetched_only_if_faster_than_computing(is_faster):
    lab = Lab(20, stores=[disk()], always_load=False)
    lab.serve(prompt(1, 6))
    lab.manager.reset()
    with_measured_costs(lab, load=0.001 if is_faster else 10.0, compute=0.01)
    fetch = lab.fetched(prompt(1, 6))
    assert fetch.decision.load == is_faster
    assert fetch.num_fetched == ({"disk": 6} if is_faster else {})
    assert ("recompute" in str(fetch.decision)) != is_faster


def test_cost_model_ignores_failed_transfer():
    lab = Lab(20, always_load=False)
    lab.serve(prompt(1, 6))
    lab.evict("device")
    lab.start(prompt(1, 6), lose=lambda move, _: [True] * move.num_blocks)
    assert lab.manager.cost_model.transfer_seconds(LOAD, 6) is None
    lab.start(prompt(1, 6))


def test_cost_model_tries_slow_link_again():
    """One slow sample must not prevent all later loads. Without loads, the model would never see a faster sample."""
    model = CostModel()
    link = (Route.HOST_TO_DEVICE, "")
    model.observe_transfer(link, 1, 10.0)
    for _ in range(50):
        model.observe_compute(100, 0.0, 1.0)
    decisions = []
    for _ in range(200):
        decision = model.decide({link: 1}, 0, 100)
        decisions.append(decision.load)
        if decision.load:
            model.observe_transfer(link, 1, 0.001)
    assert not any(decisions[:31])
    assert all(decisions[31:])
    assert "a trial" in str(next(trial_decisions()))


def test_each_trial_of_slow_link_allows_one_load():
    """The link is too slow, but every 32nd decision is a trial, which loads in order to measure the link again.

    The model must keep the samples from before the trial. Otherwise, it would allow more loads after the trial.
    """
    model, link = CostModel(), (Route.STORE_TO_HOST, "disk")
    for count in (1, 4, 16, 64):
        model.observe_transfer(link, count, 1.0 + 0.01 * count)
        model.observe_compute(16 * count, 0.0, 0.1)
    loads = 0
    for number in range(200):  # includes six trials
        count = (1, 4, 16, 64)[number // 8 % 4]
        if model.decide({link: count}, 0, 16 * count).load:
            loads += 1
            model.observe_transfer(link, count, 1.0 + 0.01 * count)
    assert loads == 6
    assert model.transfer_seconds(link, 64) == pytest.approx(1.64, rel=0.01)


def trial_decisions():
    model = CostModel()
    model.observe_transfer((Route.HOST_TO_DEVICE, ""), 1, 10.0)
    model.observe_compute(100, 0.0, 1.0)
    while True:
        decision = model.decide({(Route.HOST_TO_DEVICE, ""): 1}, 0, 100)
        if decision.load:
            yield decision


@pytest.mark.parametrize("exponent", range(1, 14))
def test_prediction_for_nearly_collinear_amounts_is_in_range(exponent):
    """The larger the exponent, the more nearly collinear are the two amounts.

    With these noisy samples, an unconstrained fit would find negative costs.
    """
    random = np.random.default_rng(exponent)
    for in_doubt in (min, max):
        fit = OnlineLeastSquares(2, in_doubt)
        for x in random.uniform(1, 100, 60).tolist():
            fit.observe((x, x * (1 + random.normal() * 10.0**-exponent)), x * random.uniform(0.5, 1.5))
            found = fit.predict((50.0, 50.0))
            assert found is not None
            assert 5 < found < 500
