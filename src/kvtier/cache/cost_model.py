"""CostModel: how long loading and computing will take, learned from before: what decides between the two."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.messages import Route

# What was seen 40 samples ago counts for a third: long enough for a stable fit, short enough to follow a busy link.
_DECAY = 1 - 1 / 40
_MOST_NEW = 16
_ALIKE = 1e-7  # what is left of an amount's squares, of 1, beside the others: from here on it cannot be told from them
_TRY_AFTER = 32  # loads refused in a row, after which one is made to see whether it is still that slow
_STILL = 0.7  # of what was expected: a trial that takes longer is no news
Matrix = list[list[float]]
Way = tuple[Route, str]
"""How blocks are moved, and from or to which store: each has a speed of its own."""


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Whether cached blocks below the device are loaded, and the numbers it was decided by."""

    load: bool
    num_tokens: int
    load_seconds: float | None
    """None where nothing was measured yet."""
    compute_seconds: float | None

    def __str__(self) -> str:
        if self.load_seconds is None or self.compute_seconds is None:
            return f"load {self.num_tokens} tokens: nothing measured yet"
        if self.load and self.load_seconds > self.compute_seconds:
            return f"load {self.num_tokens} tokens: to see how long it takes by now"
        verb, than = ("load", "under") if self.load else ("recompute", "over")
        return (
            f"{verb} {self.num_tokens} tokens: loading takes {self.load_seconds * 1e3:.2f} ms, {than} the "
            f"{self.compute_seconds * 1e3:.2f} ms of computing"
        )


class OnlineLeastSquares:
    """Seconds as a sum of costs times amounts, by least squares over what was seen, old samples fading.

    Costs are not negative. As long as what was seen does not tell them apart, such as a single sample, several are as
    good; `in_doubt`, min or max, says which of them count.
    """

    def __init__(self, num_amounts: int, in_doubt: Callable[[Iterable[float]], float]) -> None:
        self._in_doubt = in_doubt
        self._squares = np.zeros((num_amounts + 1, num_amounts + 1))
        self._products = np.zeros(num_amounts + 1)
        self._num_seen = 0
        self._new: list[tuple[float, ...]] = []
        self._costs: list[list[float]] = []

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """It took so long. Costs next to nothing: what was seen is taken in later, several at a time."""
        self._new.append((1.0, *amounts, seconds))
        if len(self._new) >= _MOST_NEW:
            self._take_in()

    def predict(self, amounts: Sequence[float]) -> float | None:
        """How long it would take, by what was seen but for the last few samples; None before anything was."""
        if self._new and (not self._costs or 4 * len(self._new) > self._num_seen):
            self._take_in()
        if not self._num_seen:
            return None
        if not self._costs:
            self._costs = self._solve()
        x = (1.0, *amounts)
        return self._in_doubt(_dot(costs, x) for costs in self._costs)

    def _take_in(self) -> None:
        seen = np.array(self._new)
        x, seconds, count = seen[:, :-1], seen[:, -1], len(seen)
        faded = x * (_DECAY ** np.arange(count - 1, -1, -1.0))[:, None]
        self._squares = self._squares * _DECAY**count + faded.T @ x
        self._products = self._products * _DECAY**count + faded.T @ seconds
        self._num_seen += count
        self._new, self._costs = [], []

    def _solve(self) -> list[list[float]]:
        seen: Matrix = self._squares.tolist()
        used = [i for i, row in enumerate(seen) if row[i]]  # of what never was there nothing is known
        scale = [math.sqrt(max(row[i], 1e-300)) for i, row in enumerate(seen)]
        squares = [[each / (scale[i] * scale[j]) for j, each in enumerate(row)] for i, row in enumerate(seen)]
        products = [each / scale[i] for i, each in enumerate(self._products.tolist())]
        found = _explanations(squares, products, used)
        explained = [_dot(products, costs) for costs in found]  # of the squares
        enough = max(explained) * (1 - 1e-6)
        return [
            [cost / each for cost, each in zip(costs, scale, strict=True)]
            for costs, share in zip(found, explained, strict=True)
            if share >= enough
        ]


def _explanations(squares: Matrix, products: list[float], used: list[int]) -> list[list[float]]:
    """The best costs; where amounts never varied, and so cannot be told apart, those without one or the other."""
    best = _least_squares(squares, products, used)
    if best is not None:
        return [best]
    left = [[i for i in used if i != without] for without in used]
    return [costs for some in left for costs in _explanations(squares, products, some)]


def _least_squares(squares: Matrix, products: list[float], used: list[int]) -> list[float] | None:
    """The best costs of those that are used, none negative; None if these cannot be told apart.

    Where some come out negative, at least one of these is 0 in the best solution: each is tried.
    """
    found = _solution([[squares[i][j] for j in used] + [products[i]] for i in used])
    if found is None:
        return None
    negative = [i for i, cost in zip(used, found, strict=True) if cost < 0]
    if negative:
        tries = [_least_squares(squares, products, [i for i in used if i != zero]) for zero in negative]
        found_some = [each for each in tries if each is not None]
        return max(found_some, key=lambda costs: _dot(products, costs), default=None)
    costs = [0.0] * len(products)
    for i, cost in zip(used, found, strict=True):
        costs[i] = cost
    return costs


def _solution(rows: Matrix) -> list[float] | None:
    """Solve two or three equations, each with its right side behind it, of a symmetric matrix with ones on its
    diagonal; None where that is next to singular. With numpy a fit took 81 us, with this 26 (dev, 2026-11-16)."""
    for k, upper in enumerate(rows):
        if upper[k] < _ALIKE:
            return None
        for row in rows[k + 1 :]:
            factor = row[k] / upper[k]
            row[k:] = [each - factor * above for each, above in zip(row[k:], upper[k:], strict=True)]
    found: list[float] = []
    for k in range(len(rows) - 1, -1, -1):
        known = _dot(rows[k][k + 1 : -1], found)
        found.insert(0, (rows[k][-1] - known) / rows[k][k])
    return found


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    return float(sum(map(operator.mul, one, other)))


class CostModel:
    """What moving blocks and computing tokens costs on this machine, as measured."""

    def __init__(self) -> None:
        self._moves: dict[Way, OnlineLeastSquares] = {}
        self._doubted: dict[Way, OnlineLeastSquares] = {}
        """What was known of ways that are being tried again."""
        self._compute = OnlineLeastSquares(2, in_doubt=max)  # in doubt it is loaded, which shows what that takes
        self._num_refused = 0

    def observe_transfer(self, way: Way, num_blocks: int, seconds: float) -> None:
        """A move of so many blocks took so long."""
        before = self._doubted.pop(way, None)
        if before is not None and seconds >= _STILL * (before.predict((num_blocks,)) or 0.0):
            self._moves[way] = before
        if way not in self._moves:
            self._moves[way] = OnlineLeastSquares(1, in_doubt=min)
        self._moves[way].observe((num_blocks,), seconds)

    def observe_compute(self, num_tokens: int, attended_tokens: float, seconds: float) -> None:
        """A step of so many tokens took so long; `attended_tokens` sums the context each of them looked back on."""
        self._compute.observe((num_tokens, attended_tokens), seconds)

    def transfer_seconds(self, way: Way, num_blocks: int) -> float | None:
        """How long it would take to move so many; None before anything was seen."""
        return self._moves[way].predict((num_blocks,)) if way in self._moves else None

    def compute_seconds(self, first: int, num_tokens: int) -> float | None:
        """How long it would take to compute tokens [first, first + num_tokens) of a request."""
        return self._compute.predict((num_tokens, num_tokens * (first + num_tokens / 2)))

    def decide(self, num_blocks: dict[Way, int], first: int, num_tokens: int, *, again: bool = False) -> LoadDecision:
        """Load, or recompute? `num_blocks` are to be moved for it, those queued before them included.

        `again`: it was asked for the same request before, which is refused once however often.
        """
        times = [self.transfer_seconds(way, count) for way, count in num_blocks.items() if count]
        load = sum(time for time in times if time is not None) if None not in times else None
        compute = self.compute_seconds(first, num_tokens)
        is_faster = load is None or compute is None or load <= compute
        self._num_refused = 0 if is_faster else self._num_refused + (not again)
        is_trial = self._num_refused >= _TRY_AFTER
        if is_trial:  # nobody measures a link that nobody uses: doubt what it was like, and see
            self._num_refused = 0
            self._doubted |= {way: self._moves.pop(way) for way in num_blocks if way in self._moves}
        return LoadDecision(is_faster or is_trial, num_tokens, load, compute)
