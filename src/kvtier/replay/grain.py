"""Grain: several steps of a scheduler simulated as one, so that an hour of a service takes a minute."""

from __future__ import annotations

import math
from dataclasses import replace

from kvtier.errors import RangeError
from kvtier.replay.cost import StepCost, Work
from kvtier.scheduler import Scheduler, Step

MAX_GRAIN = 64
_GUESSES = (0,) * (MAX_GRAIN - 1)


class Grain:
    """How many steps the next one stands for.

    Steps that take no more than `quantum` seconds together are one: answers grow by several tokens, as if all had been
    guessed and were right, prompts by several chunks, and what happens meanwhile is seen at the end. Where all that run
    generate and nobody waits, that goes as far as to the next event. 0: every step by itself.
    """

    def __init__(self, scheduler: Scheduler, cost: StepCost, quantum: float) -> None:
        if quantum < 0:
            raise RangeError(f"a quantum is 0 seconds or more, got {quantum}")
        self.count = 1
        self._scheduler, self._cost, self._quantum = scheduler, cost, quantum
        config = scheduler.config
        self._max_tokens = config.max_step_tokens
        self._limits = {
            count: replace(config, max_step_tokens=self._max_tokens * count) for count in range(1, MAX_GRAIN + 1)
        }
        full = self._max_tokens
        self._prompt_seconds = cost.seconds(Work(1, full, full * full / 2, full))
        self._decode_seconds = self._prompt_seconds

    def choose(self, until_event: float) -> None:
        """Before a step: nothing comes from outside for so many seconds."""
        if not self._quantum:
            return
        horizon, seconds, prompts = self._quantum, self._decode_seconds, self._prompt_share()
        if prompts:
            seconds = max(seconds, prompts * self._prompt_seconds)
        else:
            horizon = max(horizon, until_event)
        self.count = int(max(1, min(MAX_GRAIN, horizon / seconds)))
        self._scheduler.config = self._limits[self.count]
        for request in self._scheduler.running:
            if request.is_generating:
                left = request.max_new_tokens - request.num_new_tokens
                request.draft = _GUESSES[: min(self.count, left) - 1]

    def seconds(self, step: Step) -> float:
        """What the step takes in all."""
        seconds = self._cost.seconds(Work.of(step).part(self.count))
        if len(step.rows) * self.count >= step.num_tokens:  # nobody's prompt is in it
            self._decode_seconds = seconds
        return seconds * self.count

    def share(self, done: float) -> float:
        """When a share of a step's prompts is computed, as a share of its time: at the end of one of those it is."""
        return math.ceil(done * self.count) / self.count

    def _prompt_share(self) -> float:
        """How much of a step's tokens are prompts that wait to be computed."""
        pending = 0
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            if not request.is_generating:
                pending += request.chain.num_tokens - request.num_computed
                if pending >= self._max_tokens:
                    return 1.0
        return pending / self._max_tokens
