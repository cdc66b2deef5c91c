"""Run engines with small caches and injected faults on a GPU, and check all answers.

PYTHONPATH=src:.:tests python -m gpu_answers --answers 50000 --processes 14

Every process runs engines one after the other, with one or two steps in flight. There are arrivals, aborts,
preemptions and failing modules. Two thirds of the engines have a host tier with failing copies, and a store with
errors, flipped bits and truncated objects. The model computes each logit from the tokens that it reads back from the
cache, so a wrong block changes the answer. Each answer must equal the answer of an engine without faults and without
prefix caching. The tokens of an aborted or failed request must be a prefix of this expected answer. The first
difference ends the run with an error.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import queue
import sys
import time
from collections import Counter


def run(first_seed: int, seed_step: int, device: str, wanted: int, results: multiprocessing.Queue) -> None:
    import torch

    from phases_support import CacheReader, check_lives

    torch.set_num_threads(1)
    model, seen = CacheReader(device), Counter()
    for seed in itertools.count(first_seed, seed_step):
        seen += check_lives(model, 1 + seed % 2, [seed], 400, lower_tiers=seed % 3 > 0)
        if seen["answers"] >= wanted:
            results.put(seen)
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=50_000)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    wanted = -(-options.answers // options.processes)
    numbers = range(options.processes)
    processes = [
        context.Process(target=run, args=(100 + number, options.processes, options.device, wanted, results))
        for number in numbers
    ]
    for process in processes:
        process.start()
    total: Counter[str] = Counter()
    waiting = len(processes)
    while waiting:
        try:
            total += results.get(timeout=5)
            waiting -= 1
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                sys.stderr.write("a process failed, for example because an answer differs: see the error above\n")
                return 1
    for process in processes:
        process.join()
    seconds = time.perf_counter() - begin
    sys.stdout.write(f"{total['answers']} answers compared, none different, {seconds:.0f} s\n{dict(total)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
