"""Order: which request has which row, from one batch to the next."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import numpy as np

from kvtier.batch.ticket import Ticket
from kvtier.state import Permutation


class Order:
    """The rows of a batch. Made when rows change, and shared by all batches in which they do not: those cost nothing.

    Rows: those that generate first; among them, and among the others, existing ones in their order, then resumed, then
    new.
    """

    __slots__ = ("row_of", "stay", "tickets")

    def __init__(self, tickets: Iterable[Ticket] = ()) -> None:
        self.tickets = tuple(tickets)
        self.row_of = dict(zip(self.tickets, range(len(self.tickets)), strict=True))
        self.stay = Permutation.identity(len(self.tickets))
        """The permutation of a batch with the rows of the one before."""

    def next(self, chosen: dict[Ticket, None], generating: Collection[Ticket]) -> tuple[Order, Permutation]:
        """The order of a batch of the chosen requests, and how it comes out of this one."""
        first = chosen.keys() & generating
        if chosen.keys() == self.row_of.keys() and self._begins_with(first):
            return self, self.stay
        newcomers = [ticket for ticket in chosen if ticket not in self.row_of]
        rows = [ticket for ticket in self.tickets if ticket in chosen]
        rows += [ticket for ticket in newcomers if ticket.has_run]
        rows += [ticket for ticket in newcomers if not ticket.has_run]
        if 0 < len(first) < len(rows):
            rows = [ticket for ticket in rows if ticket in first] + [ticket for ticket in rows if ticket not in first]
        size0 = len(self.tickets)
        index = np.fromiter(map(self.row_of.get, rows, itertools.repeat(size0)), np.int64, len(rows))
        return Order(rows), Permutation(index, size0)

    def _begins_with(self, first: Collection[Ticket]) -> bool:
        return max(map(self.row_of.__getitem__, first), default=-1) == len(first) - 1
