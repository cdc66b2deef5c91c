"""ReuseTable: estimates the value of a block from its class and age.

A block that is held for one second costs one block-second. Let c be the class of a block, and a its age, which is the
time since its last use. Suppose that the block is kept until its next use, but at most until age s. We can then expect
a number of hits and a number of block-seconds. The value of the block is the highest ratio of these numbers for any s:

    value(c, a) = max over s > a of   expected hits in (a, s) / expected block-seconds in (a, s)

This is the Gittins index. It does not depend on a capacity, a horizon or a threshold. If all blocks have the same
class, and the value falls with age, the order of the values is LRU.

The hazard at an age is the expected number of hits per second at that age, given that the block has not been used
again before. A class is a combination of features, for example of `uses`, the number of uses so far (see labels.py):

    hazard(class, age) = common(age) * one factor per feature * factor(class) * shape(uses, age) * shape(class, age)

common(age) is the hazard of all classes together. Each factor and shape is a ratio (observed hits + k) / (expected hits
+ k), which is close to 1 if there are few observations. k is the weight of PRIOR typical observations. For
shape(class, age), 2 * k takes the place of k.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvtier.index.labels import MAX_CELLS, NUM_PLAIN, SIZES, USES_BIN, Cells
from kvtier.index.native import IndexNative

F64 = np.ndarray[Any, np.dtype[np.float64]]
I64 = np.ndarray[Any, np.dtype[np.int64]]

# Age buckets in seconds: [0, 1), [1, 1.5), [1.5, 2.25), .. up to 16 hours. The last bucket contains all higher ages
# too. In a prototype, a first bucket of 10 s was too coarse for agents.
RATIO, NUM_BUCKETS = 1.5, 28
EDGES: F64 = np.concatenate(([0.0], RATIO ** np.arange(NUM_BUCKETS)))
WIDTHS: F64 = np.diff(EDGES)
LIMITS: list[float] = EDGES[1:-1].tolist()
ENDS = [*LIMITS, math.inf]
NATIVE_ENDS, NATIVE_USES = np.array(ENDS), np.array(USES_BIN, np.int64)  # arrays for native code
# PRIOR and ENOUGH count typical observations, which have the weight max(1, sum(weight^2) / sum(weight)).
PRIOR = 4.0  # the hit rates of the prototype changed little with 1 and with 16
ENOUGH = 8.0  # needed for the first fit; the policy is LRU until then
DECAY, DECAY_REQUESTS = 0.98, 128  # the weight of an observation halves in about 4,400 requests, as in the prototype
MAX_FACTOR = 16.0  # limits a factor and its inverse, for example if no block with some feature value was used again
NOISE = 1.2  # values are rounded down to powers of this factor, because smaller differences are mostly noise
_IS_LATER = np.tri(NUM_BUCKETS, dtype=np.bool_).T
"""Entry [i, j] is True if j >= i."""
_ROUNDS = 3  # rounds of iterative proportional fitting, which starts with the factors of the previous fit


class ReuseTable:
    """Observations by class and age bucket, and the values that follow from them.

    An event is a further use of a block. The time at risk is the time in which blocks could have been used again.
    """

    def __init__(self, cells: Cells, code: IndexNative | None = None) -> None:
        self._cells, self._code = cells, code
        self._events: F64 = np.zeros((MAX_CELLS, NUM_BUCKETS))
        self._at_risk: F64 = np.zeros((MAX_CELLS, NUM_BUCKETS))
        self._weight = self._squares = 0.0
        self._factors = [np.ones(size) for size in SIZES]
        self._common: F64 = np.zeros(NUM_BUCKETS)
        self.all_values: F64 = np.zeros((MAX_CELLS, NUM_BUCKETS))
        self.all_floors: F64 = np.full(MAX_CELLS, np.inf)
        self.all_rises: F64 = np.zeros(MAX_CELLS)
        """These three arrays contain the same numbers as the next three lists. Native code reads the arrays."""
        self.values: list[list[float]] = []
        """Value by class and bucket. The list is extended for new classes by `row`."""
        self.floors: list[float] = []
        """By class: the lowest value of all buckets before a rise, or infinity if there is no such bucket.

        A bucket is before a rise if a later bucket has the highest value of the class, and if this value exceeds the
        value of the bucket by about the factor NOISE or more.
        """
        self.rises_until: list[float] = []
        """By class: the age at which the last bucket before a rise ends, or 0 if there is no such bucket."""
        self.is_fitted = False

    def add(self, cells: I64, ages: F64, weights: F64, is_use: bool) -> None:
        """Add observations that ended at these ages. Set `is_use` if they ended because the blocks were used."""
        flat = add_time(self._at_risk, cells, ages, weights)
        if is_use:
            self._events += np.bincount(flat, weights, self._events.size).reshape(self._events.shape)
            self._weight += float(weights.sum())
            self._squares += float((weights * weights).sum())

    def decay(self, num_requests: int) -> None:
        factor = DECAY ** (num_requests / DECAY_REQUESTS)
        self._events *= factor
        self._at_risk *= factor
        self._weight *= factor
        self._squares *= factor

    def fit(self, cells: I64, ages: F64, weights: F64) -> None:
        """Compute the values. The first fit needs ENOUGH events. The arguments are observations that have not ended."""
        typical = max(1.0, self._squares / max(self._weight, 1e-9))
        if self._weight <= ENOUGH * typical and not self.is_fitted:
            return
        count = self._cells.count
        at_risk = self._at_risk[:count].copy()
        add_time(at_risk, cells, ages, weights)
        features, k = self._cells.features[:count], PRIOR * typical
        hazard = self._hazard(self._events[:count], at_risk, features, k)
        values = gittins(hazard, self._code)
        is_unseen = ~at_risk.any(1)
        values[is_unseen] = self._common * self._product(features[is_unseen])[:, None]
        # Round values down to powers of NOISE, so that LRU decides between similar values.
        values = np.exp(np.floor(np.log(np.maximum(values, 1e-300)) / np.log(NOISE)) * np.log(NOISE))
        # Count only rises before the bucket in which the value of the class is highest. Later rises are mostly noise,
        # because few blocks become that old.
        rises = (np.arange(NUM_BUCKETS) < values.argmax(1)[:, None]) & (0.99 * NOISE * values <= values.max(1)[:, None])
        self.set(values, np.where(rises, values, np.inf).min(1), (rises * EDGES[1:]).max(1))

    def set(self, values: F64, floors: F64, rises_until: F64) -> None:
        count = len(values)
        self.all_values[:count], self.all_floors[:count], self.all_rises[:count] = values, floors, rises_until
        self.values, self.floors, self.rises_until = values.tolist(), floors.tolist(), rises_until.tolist()
        self.is_fitted = True

    def row(self, cell: int) -> list[float]:
        """Return the values of a class. Compute those of a new class from `_common` and the factors of its features."""
        for new in range(len(self.values), cell + 1):
            self.all_values[new] = self._common * self._product(self._cells.features[new : new + 1])[0]
            self.values.append(self.all_values[new].tolist())
            self.floors.append(np.inf)
            self.rises_until.append(0.0)
        return self.values[cell]

    def _product(self, features: I64) -> F64:
        product = np.ones(len(features))
        for number, factors in enumerate(self._factors):
            product *= factors[features[:, number]]
        return product

    def _hazard(self, events: F64, at_risk: F64, features: I64, k: float) -> F64:
        """Return the hazard of each class in each bucket. `k` is the weight of PRIOR typical observations."""
        self._common = common = _common_hazard(events.sum(0), at_risk.sum(0), k)
        num_events, expected = events.sum(1), at_risk @ common
        self._fit_factors(num_events, expected, features, k)
        factor = self._product(features)
        factor *= (num_events + k) / (expected * factor + k)
        level = common * factor[:, None]
        expected_at = at_risk * level
        uses = features[:, 0]
        seen, due = np.zeros((SIZES[0], NUM_BUCKETS)), np.zeros((SIZES[0], NUM_BUCKETS))
        np.add.at(seen, uses, events)
        np.add.at(due, uses, expected_at)
        shape = ((_smooth(seen) + k) / (_smooth(due) + k))[uses]
        # A class has few observations in each of the 28 buckets, so its shape uses 2 * k.
        return level * shape * (_smooth(events) + 2 * k) / (_smooth(expected_at * shape) + 2 * k)

    def _fit_factors(self, num_events: F64, expected: F64, features: I64, k: float) -> None:
        """Fit one factor per feature value (iterative proportional fitting)."""
        parts = [factors[features[:, number]] for number, factors in enumerate(self._factors)]
        product = self._product(features)
        varied = [number for number in range(len(SIZES)) if number < 3 or features[NUM_PLAIN:, number].any()]
        for _ in range(_ROUNDS):
            for number in varied:
                column, size = features[:, number], SIZES[number]
                others = product / parts[number]
                seen, due = np.bincount(column, num_events, size), np.bincount(column, expected * others, size)
                fitted = np.clip((seen + k) / (due + k), 1 / MAX_FACTOR, MAX_FACTOR)
                self._factors[number], parts[number] = fitted, fitted[column]
                product = others * parts[number]


def add_time(total: F64, cells: I64, ages: F64, weights: F64) -> I64:
    """Add to `total` the time that blocks spent in each bucket. Return the flat index of each block's last bucket."""
    buckets = np.searchsorted(EDGES[1:-1], ages, "right")
    flat = cells * NUM_BUCKETS + buckets
    counts = np.bincount(flat, weights, total.size).reshape(total.shape)
    parts = np.bincount(flat, weights * (ages - EDGES[buckets]), total.size).reshape(total.shape)
    beyond = counts[:, ::-1].cumsum(1)[:, ::-1] - counts
    total += parts + beyond * WIDTHS
    return flat


def gittins(hazard: F64, code: IndexNative | None = None) -> F64:
    """Return the value at the start of each bucket: the best ratio of expected hits to expected block-seconds."""
    dies = -np.expm1(-hazard * WIDTHS)
    survives = np.cumprod(1 - dies, 1)
    before = np.concatenate((np.ones((len(hazard), 1)), survives[:, :-1]), 1)
    zero = np.zeros((len(hazard), 1))
    hits = np.concatenate((zero, np.cumsum(before * dies, 1)), 1)
    seconds = np.concatenate((zero, np.cumsum(before * dies / np.maximum(hazard, 1e-15), 1)), 1)
    if code is not None:
        return code.best_ratios(hits, seconds)
    gained = hits[:, None, 1:] - hits[:, :-1, None]
    spent = seconds[:, None, 1:] - seconds[:, :-1, None]
    ratios = gained / np.maximum(spent, 1e-300)
    best: F64 = np.where(_IS_LATER, ratios, 0.0).max(2)
    return best


def _common_hazard(events: F64, at_risk: F64, k: float) -> F64:
    """Return the hazard of all classes together. The prior falls with age. With the prior alone, the order is LRU."""
    prior = 1 / (0.5 * (EDGES[:-1] + EDGES[1:]) + 1)
    prior *= events.sum() / max(float(prior @ at_risk), 1e-12)
    return prior * (_neighbours(events) + k) / (_neighbours(at_risk * prior) + k)


def _neighbours(counts: F64) -> F64:
    """To the count of each bucket, add half of the counts of its two neighbours."""
    total = counts.copy()
    total[1:] += 0.5 * counts[:-1]
    total[:-1] += 0.5 * counts[1:]
    return total


def _smooth(counts: F64) -> F64:
    """To the count of each bucket, add two thirds of the counts at distance one, and one third of those at two."""
    total = counts.copy()
    for distance, weight in ((1, 2 / 3), (2, 1 / 3)):
        total[:, distance:] += weight * counts[:, :-distance]
        total[:, :-distance] += weight * counts[:, distance:]
    return total
