"""Run a Model on sequences in chunks and batches that the test chooses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model import Model


class Driver:
    """Runs chunks of sequences. Each sequence has its own blocks, at random places in one cache."""

    def __init__(self, model: Model, num_sequences: int, tokens: int, block_tokens: int = 4, seed: int = 0) -> None:
        per_sequence = -(-tokens // block_tokens)
        blocks = np.random.default_rng(seed).permutation(num_sequences * per_sequence + 3)  # 3 blocks stay unused
        self.model = model
        self.block_tokens = block_tokens
        self.cache = model.new_cache(len(blocks), block_tokens)
        self.tables = [blocks[i * per_sequence : (i + 1) * per_sequence].tolist() for i in range(num_sequences)]
        self.computed = [0] * num_sequences

    def step(self, chunks: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run new tokens of some sequences as one batch. Return, for each sequence, the logits of every new token."""
        inputs = [SequenceInput(ids, self.computed[i], self.tables[i], len(ids)) for i, ids in chunks.items()]
        batch = ForwardBatch.build(inputs, self.block_tokens, self.model.weights.device)
        logits = self.model.logits(self.model.forward(batch, self.cache))
        for i, ids in chunks.items():
            self.computed[i] += len(ids)
        return dict(zip(chunks, logits.split([len(ids) for ids in chunks.values()]), strict=True))


def random_schedule(
    random: np.random.Generator, prompts: Sequence[Sequence[int]], max_chunk: int
) -> list[dict[int, list[int]]]:
    """Split the prompts into random chunks and combine the chunks into random batches."""
    left = {i: list(prompt) for i, prompt in enumerate(prompts)}
    steps = []
    while left:
        chosen = random.permutation(list(left))[: random.integers(1, len(left) + 1)].tolist()
        step = {}
        for i in chosen:
            count = int(random.integers(1, max_chunk + 1))
            step[i], left[i] = left[i][:count], left[i][count:]
        left = {i: rest for i, rest in left.items() if rest}
        steps.append(step)
    return steps


def run_schedule(driver: Driver, steps: list[dict[int, list[int]]]) -> dict[int, torch.Tensor]:
    """Run all steps. Return the logits of every token of every sequence."""
    found: dict[int, list[torch.Tensor]] = {}
    for i, logits in itertools.chain.from_iterable(driver.step(step).items() for step in steps):
        found.setdefault(i, []).append(logits)
    return {i: torch.cat(parts) for i, parts in found.items()}


def greedy(driver: Driver, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Add one prompt per step while the earlier sequences decode. Return `count` greedy tokens of each sequence."""
    found: list[list[int]] = [[] for _ in prompts]
    for step in range(len(prompts) + count):
        running = {i: [found[i][-1]] for i in range(min(step, len(prompts))) if len(found[i]) < count}
        if step < len(prompts):
            running[step] = list(prompts[step])
        if not running:
            break
        for i, logits in driver.step(running).items():
            found[i].append(int(logits[-1].argmax()))
    return found
