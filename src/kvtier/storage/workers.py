"""Threads for I/O, each with a piece of aligned memory of its own."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable

ALIGNMENT = 4096
"""What direct I/O needs of addresses, offsets and lengths, on any disk we know."""


_HUGE = 2 << 20  # bytes of a huge page


class Scratch:
    """Aligned memory of one thread, which grows to the largest piece that was asked for."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, nbytes: int) -> memoryview:
        """This many bytes, with whatever is in them; the previous ones are taken back."""
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = mmap.mmap(-1, -(-max(nbytes, 1) // _HUGE) * _HUGE)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._memory)[:nbytes]


Job = Callable[[Scratch], object]


class Workers:
    """A fixed number of daemon threads that take jobs in order. Jobs do not raise.

    Daemons, because a thread stuck in the kernel on a dead disk must not keep the process from ending.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Run a job as soon as a thread is free."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Let the threads finish what was submitted and end. False: some are still stuck after that time."""
        for _ in self._threads:
            self._jobs.put(None)
        give_up = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        scratch = Scratch()
        while (job := self._jobs.get()) is not None:
            job(scratch)
            del job  # nothing of a finished call stays alive here until the next one


def round_up(nbytes: int, multiple: int = ALIGNMENT) -> int:
    """The next multiple that is not smaller."""
    return -(-nbytes // multiple) * multiple
