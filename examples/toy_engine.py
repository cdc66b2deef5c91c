"""Your own tensors and your own model on kvtier's index and scheduler: an engine in a hundred lines.

    python examples/toy_engine.py

The "model" is a toy: the KV of a token is a running sum of everything before it, so that a wrong block, a stale slot or
a forgotten copy would change the answer. The next token is that sum modulo the vocabulary.
"""

from __future__ import annotations

import numpy as np

from kvtier.cache.config import CacheConfig
from kvtier.cache.manager import CacheManager
from kvtier.index import Chain, Namespace
from kvtier.scheduler import Request, Row, RowResult, Scheduler, SchedulerConfig, Step

BLOCK_TOKENS, VOCAB = 4, 1000


class ToyEngine:
    """A scheduler, a manager, and one array that is the device's KV memory."""

    def __init__(self, num_blocks: int) -> None:
        self.namespace = Namespace("toy", block_tokens=BLOCK_TOKENS)
        self.manager = CacheManager(self.namespace, CacheConfig(num_blocks))
        self.scheduler = Scheduler(self.manager, SchedulerConfig(max_rows=8, max_step_tokens=16))
        self.kv = np.zeros((num_blocks, BLOCK_TOKENS), np.int64)  # your cache tensors
        self.now = 0.0

    def add(self, name: str, prompt: list[int], max_new_tokens: int) -> Request:
        """Take a request in."""
        request = Request(name, Chain(self.namespace, prompt), max_new_tokens)
        self.scheduler.add(request, self.now)
        return request

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.scheduler.has_work():
            self.now += 1.0
            step = self.scheduler.schedule(self.now)
            self.scheduler.update(step, self.compute(step), self.now)

    def compute(self, step: Step) -> list[RowResult]:
        """What your worker does with a step: copy blocks, compute the rows' new tokens, sample."""
        for copy in step.copies:
            self.kv[copy.target] = self.kv[copy.source]
        return [self.compute_row(row) for row in step.rows]

    def compute_row(self, row: Row) -> RowResult:
        """The new tokens of one request: read the KV before them, write theirs, and choose the next token."""
        hold = row.request.allocation
        assert hold is not None
        table = hold.table
        tokens = row.request.chain.token_range(row.first, row.stop)
        positions = np.arange(row.first, row.stop)
        before = self.kv[table[(row.first - 1) // BLOCK_TOKENS], (row.first - 1) % BLOCK_TOKENS] if row.first else 0
        sums = before + np.cumsum(tokens * (positions + 1))
        self.kv[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = sums
        return RowResult((int(sums[-1] % VOCAB),)) if row.wants_token else RowResult()


def alone(prompt: list[int], max_new_tokens: int) -> list[int]:
    """What the toy model answers without any cache."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(sum(token * (i + 1) for i, token in enumerate(tokens)) % VOCAB)
    return tokens[len(prompt) :]


def main() -> None:
    """Twelve requests over two system prompts, in a cache too small for all of them."""
    engine = ToyEngine(num_blocks=24)
    random = np.random.default_rng(0)
    systems = [random.integers(0, VOCAB, 18).tolist() for _ in range(2)]
    prompts = [systems[i % 2] + random.integers(0, VOCAB, 5).tolist() for i in range(12)]
    requests = []
    for i, prompt in enumerate(prompts):
        requests.append(engine.add(f"request {i}", prompt, 6))
        if i % 4 == 3:
            engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        answer = request.chain.tokens[len(prompt) :].tolist()
        assert answer == alone(prompt, 6), "the cache served a wrong block"
        print(f"{request.id}: {request.num_cached_tokens:2} of {len(prompt)} tokens were cached, answer {answer}")
    engine.scheduler.check()


if __name__ == "__main__":
    main()
