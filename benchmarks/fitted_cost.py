"""FittedCost: the duration of a step, fitted to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.errors import ArgumentError
from kvtier.replay.cost import Work

# Tokens of a step up to which each token costs more than later ones, because few products share a read of the
# weights. The exact knees matter little (two Xeon cores, SmolLM2, 2026-11-15).
_KNEES = (16, 64)


class FittedCost:
    """A sum of costs per step, row, token, attended token and read token, fitted to measured steps.

    Errors are relative to the fit, so that short and long steps have equal weight. Errors above a tenth have a lower
    weight, because other processes delay some steps on a shared machine.
    """

    def __init__(self, samples: Sequence[tuple[Work, float]]) -> None:
        if len(samples) < _NUM_COSTS:
            raise ArgumentError(f"{_NUM_COSTS} costs need at least as many measured steps, got {len(samples)}")
        seconds = np.array([duration for _, duration in samples])
        amounts = np.array([_amounts(work) for work, _ in samples])
        weights = 1 / seconds
        for _ in range(_ROUNDS):
            self.costs = _not_negative(amounts * weights[:, None], seconds * weights)
            expected = np.maximum(amounts @ self.costs, seconds.min() / 2)
            off = np.abs(seconds / expected - 1)
            weights = np.sqrt(np.minimum(1, _NEAR / np.maximum(off, _NEAR))) / expected

    def seconds(self, work: Work) -> float:
        return float(self.costs @ np.array(_amounts(work)))


def _amounts(work: Work) -> tuple[float, ...]:
    tokens = work.num_tokens
    first = (min(tokens, knee) for knee in _KNEES)
    return 1.0, work.num_rows, tokens, *first, work.attended_tokens, work.read_tokens


_NUM_COSTS = 5 + len(_KNEES)
_ROUNDS = 8  # fits, each with errors relative to the fit before; costs change little after the fifth
_NEAR = 0.1


def _not_negative(
    amounts: np.ndarray[tuple[int, int], np.dtype[np.float64]], target: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return non-negative least squares: remove the most negative cost until none is negative."""
    used = list(range(amounts.shape[1]))
    scale = np.maximum(np.abs(amounts).max(axis=0), 1e-300)
    while True:
        solution = np.linalg.lstsq(amounts[:, used] / scale[used], target, rcond=None)[0]
        if solution.min() >= 0 or len(used) == 1:
            break
        used.pop(int(solution.argmin()))
    costs = np.zeros(amounts.shape[1])
    costs[used] = np.maximum(solution, 0) / scale[used]
    return costs
