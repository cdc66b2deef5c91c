"""Classes of cached blocks for the learned policy.

A class is a combination of features. The features describe a block and the last request that used it:

    uses     number of earlier uses of the block                0 | 1 | 2-3 | 4 or more
    new      number of tokens that no recent request contained  < 512 | < 2048 | < 8192 | more
    output   number of tokens of the answer                     < 32 | < 256 | more
    finish   reason for the end of the answer                   unknown | stop | length | other
    app      first block of the prompt                          one of 7 frequent blocks, or another one
    tenant   tenant of the salt                                 none, one of 7 frequent tenants, or another one
    hint     the client's hint about the next request           see `Hints`; learned separately for each tenant

All tenants that are not frequent share one value of `tenant`. Their hints are ignored, because false hints of one
tenant would affect the others. The limits between values come from a prototype. No other limits were tried.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.errors import RangeError

USES = ("0", "1", "2-3", "4+")
NEW_LIMITS = (512, 2048, 8192)
OUTPUT_LIMITS = (32, 256)
FINISH = ("", "stop", "length", "other")
# Seven frequent apps or tenants (see `Busiest`), and all others. More groups would leave fewer observations per class.
NUM_GROUPS = 8
OTHER_TENANT = NUM_GROUPS  # value for tenants that are not frequent; 0 is for requests without a salt
OVER = 1  # index in HINTS
HINTS = ("none", "over", "back in 10 s", "back in 60 s", "back in 600 s", "back later")
RETURN_LIMITS = (10.0, 60.0, 600.0)  # seconds: typical for tool calls, for users, and for breaks
MAX_CELLS = 256  # maximum number of classes, which limits the memory and the time of a fit
# Number of values of each feature.
SIZES = (len(USES), 4, 3, len(FINISH), NUM_GROUPS, NUM_GROUPS + 1, (NUM_GROUPS + 1) * len(HINTS))
NUM_PLAIN = math.prod(SIZES[:3])  # combinations of the first three features
USES_BIN = (0, 1, 2, 2, 3)  # index in USES by number of uses; the last entry is for 4 or more uses

Features = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of a client about the next request of a session. All fields are optional.

    `session_id` is any name of the session within its tenant. `session_over` means that no further request of the
    session is expected. `expects_return_seconds` is the expected time from the end of this request to the next one.
    Hints may be wrong: the policy learns for each tenant what they mean.
    """

    session_id: str = ""
    session_over: bool = False
    expects_return_seconds: float | None = None

    def __post_init__(self) -> None:
        seconds = self.expects_return_seconds
        if seconds is not None and not 0 <= seconds < math.inf:
            raise RangeError(f"expects_return_seconds must be a finite number >= 0, got {seconds}")

    @property
    def label(self) -> int:
        """Index of the hint in HINTS."""
        if self.session_over:
            return OVER
        seconds = self.expects_return_seconds
        return 0 if seconds is None else 2 + bisect_right(RETURN_LIMITS, seconds)


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Facts about a finished request. All fields are optional."""

    output_tokens: int = 0
    finish_reason: str = ""
    hints: Hints = NO_HINTS


class Busiest:
    """Assigns the numbers 1 to 7 to at most seven frequent keys. All other keys have the number 0.

    A key gets a number when its count is at least 32 and a number is free. All counts are halved after every 4096
    occurrences of keys. A key whose count is then below 32 loses its number.
    """

    ENOUGH = 32  # count at which a key gets a number; fewer observations would be mostly noise
    PERIOD = 4096  # occurrences between two halvings; this also limits the size of the dict of counts

    def __init__(self) -> None:
        self._counts: dict[object, int] = {}
        self._numbers: dict[object, int] = {}
        self._free = list(range(NUM_GROUPS - 1, 0, -1))
        self._left = self.PERIOD

    def number(self, key: object) -> int:
        """Count one occurrence of a key. Return the number of the key."""
        counts = self._counts
        count = counts[key] = counts.get(key, 0) + 1
        self._left -= 1
        if not self._left:
            self._halve()
            count //= 2
        if count < self.ENOUGH:
            return 0
        number = self._numbers.get(key, 0)
        if not number and self._free:
            number = self._numbers[key] = self._free.pop()
        return number

    def known(self, key: object) -> int:
        """Return the number of a key without counting it."""
        return self._numbers.get(key, 0)

    def _halve(self) -> None:
        self._left = self.PERIOD
        self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
        for key in [key for key in self._numbers if self._counts.get(key, 0) < self.ENOUGH]:
            self._free.append(self._numbers.pop(key))


class Cells:
    """Assigns a number to each class, in the order of first occurrence. The number of a class is called its cell.

    The first NUM_PLAIN classes are called plain, and exist from the start. They differ only in `uses`, `new` and
    `output`. All their other features are 0.
    """

    def __init__(self) -> None:
        self.features: Features = np.zeros((MAX_CELLS, len(SIZES)), np.int64)
        """One row per class with the value of each feature."""
        self.apps, self.tenants = Busiest(), Busiest()
        self.numbers: dict[tuple[int, ...], int] = {}
        """Features of a class -> its number."""
        for plain in np.ndindex(*SIZES[:3]):
            self._add((*plain, 0, 0, 0, 0))

    @property
    def count(self) -> int:
        return len(self.numbers)

    def labels(self, salt: bytes, head: bytes, new_tokens: int, outcome: Outcome) -> tuple[int, ...]:
        """Return the features of a request: all except `uses`. `head` is the first block of the prompt."""
        output = bisect_right(OUTPUT_LIMITS, outcome.output_tokens)
        reason = outcome.finish_reason
        finish = 0 if not reason else FINISH.index(reason) if reason in FINISH else len(FINISH) - 1
        tenant = self.tenants.number(salt.partition(b"\0")[0]) or OTHER_TENANT if salt else 0
        hint = 0 if outcome.hints is NO_HINTS or tenant == OTHER_TENANT else outcome.hints.label
        return new_label(new_tokens), output, finish, self.apps.number(hash(head)), tenant, tenant * len(HINTS) + hint

    def number(self, uses: int, labels: tuple[int, ...]) -> int:
        """Return the number of a class. Beyond MAX_CELLS, a new class shares the number of a similar plain class."""
        key = (USES_BIN[uses] if uses < len(USES_BIN) else 3, *labels)
        number = self.numbers.get(key)
        if number is None:
            number = self._add(key) if self.count < MAX_CELLS else self.numbers[*key[:3], 0, 0, 0, 0]
        return number

    def when_over(self, cell: int) -> int:
        """Return the cell of the class that differs from `cell` only by the hint "over", or `cell` if there is none."""
        *others, tenant, _ = (int(value) for value in self.features[cell])
        if tenant == OTHER_TENANT:
            return cell
        key = (*others, tenant, tenant * len(HINTS) + OVER)
        number = self.numbers.get(key)
        if number is None:
            number = self._add(key) if self.count < MAX_CELLS else cell
        return number

    def describe(self, cell: int) -> str:
        """Return the features of a class as text."""
        uses, new, output, finish, app, tenant, hint = (int(value) for value in self.features[cell])
        parts = [f"uses {USES[uses]}", f"new {_range(new, NEW_LIMITS)}", f"output {_range(output, OUTPUT_LIMITS)}"]
        parts += [f"finish {FINISH[finish]}"] if finish else []
        parts += [f"app {app}"] if app else []
        parts += ["other tenant" if tenant == OTHER_TENANT else f"tenant {tenant}"] if tenant else []
        parts += [HINTS[hint % len(HINTS)]] if hint % len(HINTS) else []
        return ", ".join(parts)

    def _add(self, key: tuple[int, ...]) -> int:
        number = self.numbers[key] = len(self.numbers)
        self.features[number] = key
        return number


def new_label(new_tokens: int) -> int:
    """Return the value of the feature `new`."""
    return bisect_right(NEW_LIMITS, new_tokens)


def _range(value: int, limits: tuple[int, ...]) -> str:
    return f"< {limits[value]}" if value < len(limits) else f">= {limits[-1]}"
