"""Continuous batching with two batches in flight: the host prepares a step while the device computes the previous step.

Each request counts up from its start value. The current value of every row is in a State on the device. When rows are
added, removed or reordered, the State moves the values with their requests. No step waits for the previous result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvtier.batch import BATCH, COPY, Environment, Module, Pipeline
from kvtier.memory import CPU, current_stream
from kvtier.state import State

MAX_ROWS, PHASES = 4, 2


@dataclass
class Request:
    start: int
    num_values: int
    values: list[int] = field(default_factory=list)


class Counter(Module):
    def __init__(self) -> None:
        self.state = State((MAX_ROWS,), "i64")  # one value per row, on the device
        self.first = [torch.zeros(MAX_ROWS, dtype=torch.int64) for _ in range(PHASES)]  # values of new rows, by phase
        self.results = [torch.zeros(MAX_ROWS, dtype=torch.int64) for _ in range(PHASES)]

    def setup(self, env: Environment) -> None:  # engine thread
        batch = env.at(BATCH)
        for row, ticket in enumerate(batch.requests):
            self.first[batch.phase][row] = ticket.request.start

    def prepare(self, env: Environment) -> None:  # executor thread, like forward and unprep
        perm, new = env.at(BATCH).perm, self.first[env.at(BATCH).phase]
        self.state.warp(perm, env.at(COPY), new=new)  # bring rows into the order of this batch

    def forward(self, env: Environment) -> None:
        values, num_rows = self.state.front, env.at(BATCH).bsz
        enqueue(lambda: values[:num_rows].add_(1))

    def unprep(self, env: Environment) -> None:
        batch, values = env.at(BATCH), self.state.front
        enqueue(lambda: self.results[batch.phase].copy_(values))

    def update(self, env: Environment) -> None:  # engine thread again, when the results are complete
        batch = env.at(BATCH)
        for row, ticket in enumerate(batch.requests):
            if ticket.is_running:  # False for the step that was in flight when the request finished
                ticket.request.values.append(int(self.results[batch.phase][row]))
                if len(ticket.request.values) == ticket.request.num_values:
                    ticket.finish()


def enqueue(task: Callable[[], object]) -> None:
    stream = current_stream(CPU)
    assert stream is not None
    stream.enqueue(task)


def main() -> None:
    pipeline = Pipeline([Counter()], phases=PHASES)
    tickets = [pipeline.add(Request(100 * i, num_values=3 + i % 4)) for i in range(10)]
    while running := [ticket for ticket in tickets if ticket.is_running]:
        pipeline.step(running[:MAX_ROWS])  # submits a batch, and collects the previous one
    pipeline.close()
    for ticket in tickets:
        start, count = ticket.request.start, ticket.request.num_values
        assert ticket.request.values == [*range(start + 1, start + 1 + count)]
        print(f"{ticket.status.value}: {ticket.request.values}")


if __name__ == "__main__":
    main()
