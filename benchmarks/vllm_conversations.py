"""The requests of benchmarks.vllm_cpu. These functions run in the process of a vLLM engine (tests/vllm_driver)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK_TOKENS = 32
VOCABULARY = (100, 40_000)


@dataclass(frozen=True)
class Load:
    """Conversations that share a system prompt. `in_flight` requests of different users are sent together."""

    system_tokens: int = 128
    users: int = 10
    turns: int = 6
    tokens_in: int = 96
    tokens_out: int = 12
    in_flight: int = 2

    @property
    def num_blocks(self) -> int:
        """Blocks of all conversations."""
        own = self.turns * (self.tokens_in + self.tokens_out)
        return -(-(self.system_tokens + self.users * own) // BLOCK_TOKENS)

    @property
    def max_tokens(self) -> int:
        return self.system_tokens + self.turns * (self.tokens_in + self.tokens_out)

    def order(self) -> list[int]:
        """Return the user of each request. Users take turns at random; the same user comes again after three others."""
        random, left, chosen = np.random.default_rng(1), [self.turns] * self.users, list[int]()
        for _ in range(self.users * self.turns):
            waiting = [user for user in range(self.users) if left[user]]
            rested = [user for user in waiting if user not in chosen[-3:]]
            chosen.append(int(random.choice(rested or waiting)))
            left[chosen[-1]] -= 1
        batches = [chosen[first : first + self.in_flight] for first in range(0, len(chosen), self.in_flight)]
        assert all(len(set(batch)) == len(batch) for batch in batches), "a user would send two requests at a time"
        return chosen


@dataclass(frozen=True)
class Turn:
    """One request: its times in seconds and its tokens."""

    user: int
    ttft: float
    seconds: float
    num_prompt: int
    num_cached: int
    answer: tuple[int, ...]


class Conversations:
    """The histories of all users, and the order of their requests."""

    def __init__(self, load: Load) -> None:
        random = np.random.default_rng(0)
        system = random.integers(*VOCABULARY, load.system_tokens).tolist()
        self._messages = random.integers(*VOCABULARY, (load.users, load.turns, load.tokens_in)).tolist()
        self.histories = [list(system) for _ in range(load.users)]
        self.order = load.order()

    def next_prompt(self, user: int) -> list[int]:
        self.histories[user] += self._messages[user].pop(0)
        return self.histories[user]


def converse(driver: Any, load: Load) -> list[Turn]:
    """Send the next requests of the conversations together, and return them when all have ended."""
    from vllm.sampling_params import RequestOutputKind

    talk: Conversations = driver.kept.setdefault("conversations", Conversations(load))
    running, turns = dict[str, _Running](), list[Turn]()
    users, talk.order = talk.order[: load.in_flight], talk.order[load.in_flight :]
    for user in users:
        prompt = talk.next_prompt(user)
        sent = time.perf_counter()
        # Without an output per step, the first output would be the whole answer.
        name = driver.add(prompt, max_tokens=load.tokens_out, output_kind=RequestOutputKind.CUMULATIVE)
        running[name] = _Running(user, len(prompt), sent)
    while running:
        turns += _step(driver, running)
    assert load.tokens_out == 1 or all(turn.ttft < turn.seconds for turn in turns), "the first token came with the last"
    for turn in turns:
        talk.histories[turn.user] += turn.answer
    return turns


def answer_new_prompts(driver: Any, seed: int, count: int, num_tokens: int, tokens_out: int) -> float:
    """Answer `count` random prompts at a time. Return the seconds."""
    prompts = np.random.default_rng(seed).integers(*VOCABULARY, (count, num_tokens)).tolist()
    begin = time.perf_counter()
    names = [driver.add(prompt, max_tokens=tokens_out) for prompt in prompts]
    running = {name: _Running(0, num_tokens, begin) for name in names}
    while running:
        _step(driver, running)
    return time.perf_counter() - begin


@dataclass
class _Running:
    user: int
    num_prompt: int
    sent: float
    first: float = 0.0


def _step(driver: Any, running: dict[str, _Running]) -> Sequence[Turn]:
    """Run one step of vLLM and return the requests that ended."""
    ended, outputs, now = [], driver.engine.step(), time.perf_counter()
    for output in outputs:
        each, (completion,) = running[output.request_id], output.outputs
        if completion.token_ids and not each.first:
            each.first = now
        if output.finished:
            assert completion.finish_reason == "length", f"{output.request_id} ended with {completion.finish_reason}"
            del running[output.request_id]
            driver.waiting.discard(output.request_id)
            times = each.first - each.sent, now - each.sent
            cached = output.num_cached_tokens or 0
            ended.append(Turn(each.user, *times, each.num_prompt, cached, tuple(completion.token_ids)))
    return ended
