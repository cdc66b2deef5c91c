"""CostModel: decides whether to load or to compute blocks, based on times that it predicts from measurements."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.messages import Route

_DECAY = 1 - 1 / 40  # per sample; slow enough for a stable fit, fast enough to follow changes of the speed
_BATCH_SAMPLES = 16  # samples per update of the fit
_MIN_PIVOT = 1e-7  # smaller pivots count as 0; the limit is absolute because the diagonal is scaled to 1
_TRY_AFTER = 32  # after this many consecutive decisions to compute, try one load: the link may have become faster
_CONFIRM_SHARE = 0.7  # a trial confirms the old measurements if it takes at least this share of the predicted time
Matrix = list[list[float]]
Link = tuple[Route, str]
"""A route and the name of its store. The name is empty for the routes between device and host."""


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Decision to load blocks from lower tiers or to compute them, with the predicted times."""

    load: bool
    num_tokens: int
    load_seconds: float | None
    """None if a link has no measurements."""
    compute_seconds: float | None

    def __str__(self) -> str:
        if self.load_seconds is None or self.compute_seconds is None:
            return f"load {self.num_tokens} tokens: not enough measurements yet"
        if self.load and self.load_seconds > self.compute_seconds:
            return f"load {self.num_tokens} tokens: a trial measures the link again"
        verb, than = ("load", "under") if self.load else ("recompute", "over")
        return (
            f"{verb} {self.num_tokens} tokens: loading takes {self.load_seconds * 1e3:.2f} ms, {than} the "
            f"{self.compute_seconds * 1e3:.2f} ms of computing"
        )


class OnlineLeastSquares:
    """Fits seconds = fixed cost + sum(cost * amount) by least squares, with exponential decay of old samples.

    Costs are never negative. If the samples do not determine all costs, several solutions are equally good. In this
    case `in_doubt` (min or max) selects one of their predictions.
    """

    def __init__(self, num_amounts: int, in_doubt: Callable[[Iterable[float]], float]) -> None:
        self._in_doubt = in_doubt
        self._squares = np.zeros((num_amounts + 1, num_amounts + 1))
        self._products = np.zeros(num_amounts + 1)
        self._num_samples = 0
        self._new: list[tuple[float, ...]] = []
        self._costs: list[list[float]] = []

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Record a sample. Samples are added to the fit in batches, so that most calls are cheap."""
        self._new.append((1.0, *amounts, seconds))
        if len(self._new) >= _BATCH_SAMPLES:
            self._add_samples()

    def predict(self, amounts: Sequence[float]) -> float | None:
        """Return the expected seconds, or None before the first sample. The fit can lack the newest samples."""
        if self._new and (not self._costs or 4 * len(self._new) > self._num_samples):  # new > fitted / 4
            self._add_samples()
        if not self._num_samples:
            return None
        if not self._costs:
            self._costs = self._solve()
        x = (1.0, *amounts)
        return self._in_doubt(_dot(costs, x) for costs in self._costs)

    def _add_samples(self) -> None:
        samples = np.array(self._new)
        x, seconds, count = samples[:, :-1], samples[:, -1], len(samples)
        faded = x * (_DECAY ** np.arange(count - 1, -1, -1.0))[:, None]
        self._squares = self._squares * _DECAY**count + faded.T @ x
        self._products = self._products * _DECAY**count + faded.T @ seconds
        self._num_samples += count
        self._new, self._costs = [], []

    def _solve(self) -> list[list[float]]:
        sums: Matrix = self._squares.tolist()
        used = [i for i, row in enumerate(sums) if row[i]]  # the fixed cost, and amounts that were not always 0
        scale = [math.sqrt(max(row[i], 1e-300)) for i, row in enumerate(sums)]
        squares = [[value / (scale[i] * scale[j]) for j, value in enumerate(row)] for i, row in enumerate(sums)]
        products = [value / scale[i] for i, value in enumerate(self._products.tolist())]
        solutions = _solutions(squares, products, used)
        # Keep the solutions that fit as well as the best one. `explained` contains the part of the sum of squares that
        # each solution explains.
        explained = [_dot(products, costs) for costs in solutions]
        enough = max(explained) * (1 - 1e-6)
        return [
            [cost / unit for cost, unit in zip(costs, scale, strict=True)]
            for costs, share in zip(solutions, explained, strict=True)
            if share >= enough
        ]


def _solutions(squares: Matrix, products: list[float], used: list[int]) -> list[list[float]]:
    """Return all best solutions. If amounts are collinear, leave out each amount in turn and collect the solutions."""
    best = _least_squares(squares, products, used)
    if best is not None:
        return [best]
    left = [[i for i in used if i != without] for without in used]
    return [costs for some in left for costs in _solutions(squares, products, some)]


def _least_squares(squares: Matrix, products: list[float], used: list[int]) -> list[float] | None:
    """Return the best non-negative costs of the used amounts, or None if the amounts are collinear.

    If the equations yield negative costs, at least one of these costs is 0 in the best solution. The function then sets
    each of them to 0 in turn and returns the best result.
    """
    solved = _solve_equations([[squares[i][j] for j in used] + [products[i]] for i in used])
    if solved is None:
        return None
    negative = [i for i, cost in zip(used, solved, strict=True) if cost < 0]
    if negative:
        tries = [_least_squares(squares, products, [i for i in used if i != zero]) for zero in negative]
        solvable = [costs for costs in tries if costs is not None]
        return max(solvable, key=lambda costs: _dot(products, costs), default=None)
    costs = [0.0] * len(products)
    for i, cost in zip(used, solved, strict=True):
        costs[i] = cost
    return costs


def _solve_equations(rows: Matrix) -> list[float] | None:
    """Solve up to three linear equations, or return None if the matrix is nearly singular.

    The last entry of a row is its right-hand side. The matrix is symmetric with ones on the diagonal. The solver does
    not use numpy: on the development machine, a fit takes 26 us in Python and 81 us with numpy.
    """
    for k, upper in enumerate(rows):
        if upper[k] < _MIN_PIVOT:
            return None
        for row in rows[k + 1 :]:
            factor = row[k] / upper[k]
            row[k:] = [value - factor * above for value, above in zip(row[k:], upper[k:], strict=True)]
    solution: list[float] = []
    for k in range(len(rows) - 1, -1, -1):
        known = _dot(rows[k][k + 1 : -1], solution)
        solution.insert(0, (rows[k][-1] - known) / rows[k][k])
    return solution


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    return float(sum(map(operator.mul, one, other)))


class CostModel:
    """Predicts times of transfers and computation from measurements on this machine."""

    def __init__(self) -> None:
        self._transfers: dict[Link, OnlineLeastSquares] = {}
        self._doubted: dict[Link, OnlineLeastSquares] = {}
        """Old measurements of links that a trial load measures again."""
        # In doubt, assume that computing is slow. More blocks are then loaded, and each load measures its link.
        self._compute = OnlineLeastSquares(2, in_doubt=max)
        self._num_refused = 0

    def observe_transfer(self, link: Link, num_blocks: int, seconds: float) -> None:
        """Record the time of a transfer. After a trial, this time confirms or replaces the old measurements."""
        before = self._doubted.pop(link, None)
        if before is not None and seconds >= _CONFIRM_SHARE * (before.predict((num_blocks,)) or 0.0):
            self._transfers[link] = before
        if link not in self._transfers:
            self._transfers[link] = OnlineLeastSquares(1, in_doubt=min)
        self._transfers[link].observe((num_blocks,), seconds)

    def observe_compute(self, num_tokens: int, attended_tokens: float, seconds: float) -> None:
        """Record the time of a step; `attended_tokens` is the sum of the context lengths of the step's tokens."""
        self._compute.observe((num_tokens, attended_tokens), seconds)

    def transfer_seconds(self, link: Link, num_blocks: int) -> float | None:
        """Return the expected time to transfer blocks, or None before the first measurement."""
        return self._transfers[link].predict((num_blocks,)) if link in self._transfers else None

    def compute_seconds(self, first: int, num_tokens: int) -> float | None:
        """Return the expected time to compute tokens [first, first + num_tokens), or None before any measurement."""
        return self._compute.predict((num_tokens, num_tokens * (first + num_tokens / 2)))

    def decide(self, num_blocks: dict[Link, int], first: int, num_tokens: int, *, again: bool = False) -> LoadDecision:
        """Decide whether to load or to compute tokens [first, first + num_tokens) of a request.

        `num_blocks` counts the blocks to load on each link, including blocks that are already queued there. Set `again`
        for a second decision on the same request, so that its refused load is not counted twice.
        """
        times = [self.transfer_seconds(link, count) for link, count in num_blocks.items() if count]
        load = sum(time for time in times if time is not None) if None not in times else None
        compute = self.compute_seconds(first, num_tokens)
        is_faster = load is None or compute is None or load <= compute
        self._num_refused = 0 if is_faster else self._num_refused + (not again)
        is_trial = self._num_refused >= _TRY_AFTER
        if is_trial:  # only loads measure a link, so try one load
            self._num_refused = 0
            self._doubted |= {link: self._transfers.pop(link) for link in num_blocks if link in self._transfers}
        return LoadDecision(is_faster or is_trial, num_tokens, load, compute)
