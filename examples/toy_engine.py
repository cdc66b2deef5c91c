"""An engine of your own on kvtier's scheduler and cache index, with one device tier.

The toy model's KV of a token is a running sum over all tokens before it, so a wrong block, a stale slot or a missing
copy would change the answer. The next token is that sum modulo the vocabulary size.
"""

from __future__ import annotations

import numpy as np

from kvtier.cache import CacheConfig, CacheManager
from kvtier.index import Chain, Namespace
from kvtier.scheduler import Request, Row, RowResult, Scheduler, SchedulerConfig, Step

BLOCK_TOKENS, VOCAB = 4, 1000


class ToyEngine:
    def __init__(self, num_blocks: int) -> None:
        self.namespace = Namespace("toy", block_tokens=BLOCK_TOKENS)
        manager = CacheManager(self.namespace, CacheConfig(num_blocks))
        self.scheduler = Scheduler(manager, SchedulerConfig(max_rows=8, max_step_tokens=16))
        self.kv = np.zeros((num_blocks, BLOCK_TOKENS), np.int64)  # the cache tensor
        self.now = 0.0

    def add(self, name: str, prompt: list[int], max_new_tokens: int) -> Request:
        request = Request(name, Chain(self.namespace, prompt), max_new_tokens)
        self.scheduler.add(request, self.now)
        return request

    def run(self) -> None:
        """Run steps until all requests are finished."""
        while self.scheduler.has_work():
            self.now += 1.0
            step = self.scheduler.schedule(self.now)
            self.scheduler.update(step, self.compute(step), self.now)

    def compute(self, step: Step) -> list[RowResult]:
        for copy in step.copies:  # a cached block that matches partly is copied, and the copy is continued
            self.kv[copy.target] = self.kv[copy.source]
        return [self.compute_row(row) for row in step.rows]

    def compute_row(self, row: Row) -> RowResult:
        """Compute tokens [first, stop) of a request: read the earlier KV, write the new KV, return the next token."""
        assert row.request.allocation is not None
        table = row.request.allocation.table
        tokens = row.request.chain.token_range(row.first, row.stop)
        positions = np.arange(row.first, row.stop)
        last = row.first - 1
        before = self.kv[table[last // BLOCK_TOKENS], last % BLOCK_TOKENS] if row.first else 0
        sums = before + np.cumsum(tokens * (positions + 1))
        self.kv[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = sums
        return RowResult((int(sums[-1] % VOCAB),)) if row.wants_token else RowResult()


def answer_without_cache(prompt: list[int], max_new_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(sum(token * (i + 1) for i, token in enumerate(tokens)) % VOCAB)
    return tokens[len(prompt) :]


def main() -> None:
    engine, random = ToyEngine(num_blocks=24), np.random.default_rng(0)
    systems = [random.integers(0, VOCAB, 18).tolist() for _ in range(2)]  # two system prompts
    prompts = [systems[i % 2] + random.integers(0, VOCAB, 5).tolist() for i in range(12)]
    requests = []
    for i, prompt in enumerate(prompts):
        requests.append(engine.add(f"request {i}", prompt, 6))
        if i % 4 == 3:  # four at a time
            engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        answer = request.chain.tokens[len(prompt) :].tolist()
        assert answer == answer_without_cache(prompt, 6)
        print(f"{request.id}: {request.num_cached_tokens:2} of {len(prompt)} tokens were cached, answer {answer}")


if __name__ == "__main__":
    main()
