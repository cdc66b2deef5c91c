"""Spread tasks over forked processes, which inherit their input from the parent."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from kvtier.errors import StateError

T = TypeVar("T")
R = TypeVar("R")


def jobs_here(jobs: int) -> int:
    """Return `jobs`, or 1 if torch is loaded, because a forked process could inherit locks held by torch's threads."""
    return 1 if "torch" in sys.modules else jobs


def spread(work: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[tuple[int, R]]:
    """Yield the index and result of each completed task. With one task or one job, run in this process."""
    if jobs <= 1 or len(tasks) <= 1:
        for number, task in enumerate(tasks):
            yield number, work(task)
        return
    context = multiprocessing.get_context("fork")
    workers, readers = [], []
    for first in range(min(jobs, len(tasks))):
        reader, writer = context.Pipe(duplex=False)
        numbers = range(first, len(tasks), jobs)
        workers.append(context.Process(target=_work, args=(work, tasks, numbers, writer), daemon=True))
        workers[-1].start()
        writer.close()
        readers.append(reader)
    try:
        yield from _results(readers, len(tasks))
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _work(work: Callable[[T], R], tasks: Sequence[T], numbers: range, writer: Connection) -> None:
    try:
        for number in numbers:
            writer.send((number, work(tasks[number])))
    except Exception as error:  # raised again in the parent
        writer.send((-1, error))


def _results(readers: list[Connection], num_tasks: int) -> Iterator[tuple[int, R]]:
    num_done = 0
    while readers:
        for reader in wait(readers):
            assert isinstance(reader, Connection)
            try:
                number, result = reader.recv()
            except EOFError:
                readers.remove(reader)
                continue
            if number < 0:
                raise result
            num_done += 1
            yield number, result
    if num_done < num_tasks:
        raise StateError(f"{num_tasks - num_done} of {num_tasks} tasks were lost: a worker process was killed")
