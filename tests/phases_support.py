"""A state machine of random requests on an engine with one or two steps in flight.

Requests arrive, end, fail and are preempted during steps. The model computes each logit from the tokens that it reads
back from the cache, so a wrong block, row or position changes the answer.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from benchmarks.random_weights import random_weights

from engine_helpers import Answer, Answers, finish
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy, WritebackConfig, WritePolicy
from kvtier.engine import Model, Penalties, SamplingParams
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.modules import ModelForward, Sampler
from kvtier.engine.ops import TorchOps
from kvtier.engine.sequence import FinishReason
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import MemoryStore
from scheduler_support import check_scheduler
from storage_support import Fault, FaultyStore
from support import check_pipeline

SHAPE = ModelConfig("llama", 2, 32, 48, 2, 1, 16, 61, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
VOCAB, BLOCK, NUM_STATES = SHAPE.vocab_size, 4, 4093
STOPS = (5, 6, 7)


class Break(Exception):
    """Raised by an op of a module."""


class CacheReader(Model):
    """A model whose logits depend on all tokens of the context and their positions, as read from the cache."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(SHAPE, random_weights(SHAPE, torch.float32, torch.device(device)), TorchOps())
        table = np.random.default_rng(1).normal(0, 2, (NUM_STATES, VOCAB)).astype(np.float32)
        self._table = torch.from_numpy(table).to(device)
        self._answers: dict[int, Answer] = {}

    def forward(self, batch, cache, before_layer=None):
        for layer in range(SHAPE.num_layers):
            if before_layer is not None:
                before_layer(layer)
            kept = cache[:, layer, 0, :, 0, 0]
            kept[batch.slots // BLOCK, batch.slots % BLOCK] = (batch.input_ids * 1000 + batch.positions).float()
        found, start = [], 0
        for table, count, context in zip(batch.block_tables, batch.query_lens, batch.contexts, strict=True):
            blocks = table[: -(-context // BLOCK)]
            layers = [cache[blocks, layer, 0, :, 0, 0].flatten()[:context].long() for layer in (0, 1)]
            numbers = torch.arange(context, device=cache.device) + 1
            terms = (layers[0] * 7919 + layers[1] * 104729) % NUM_STATES * numbers
            found.append((terms.cumsum(0) % NUM_STATES)[context - count :])
            start += count
        return torch.cat(found)[batch.logit_rows]

    def logits(self, hidden):
        return self._table[hidden].clone()

    def expected(self, number: int) -> Answer:
        """Return the answer of case `number`.

        The answer comes from an engine that runs only this case, has one step in flight and does not cache prefixes.
        """
        if number not in self._answers:
            config = EngineConfig(BLOCK, CacheConfig(64, prefix_caching=False), graph_sizes=(), phases=1)
            engine = Engine(self, config=config)
            name = engine.add(*CASES[number])
            self._answers[number] = finish(engine)[name]
            engine.close()
        return self._answers[number]


class Alternating:
    """Allows an even token, then an odd token, and so on."""

    def __init__(self) -> None:
        self._next = 0

    def forbid(self, logits) -> None:
        logits[1 - self._next :: 2] = -torch.inf

    def accept(self, token_id) -> None:
        assert token_id % 2 == self._next
        self._next = 1 - self._next


class Proposer:
    """Drafts up to three tokens: tokens of the right answer, sometimes followed by a random token."""

    models, num_tokens = (), 3

    def __init__(self, model: CacheReader, chance: random.Random) -> None:
        self._model, self._chance = model, chance

    def propose(self, requests, groups):
        del groups
        numbers = [CASES_BY_PROMPT[tuple(each.chain.tokens[: each.num_prompt_tokens].tolist())] for each in requests]
        drafts = []
        for each, number in zip(requests, numbers, strict=True):
            right = self._model.expected(number).tokens[each.num_new_tokens :][: self._chance.randint(0, 3)]
            wrong = [self._chance.randrange(VOCAB)] if self._chance.random() < 0.3 else []
            drafts.append(tuple([*right, *wrong][:3]))
        return drafts


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20, "logprobs": 2},
    {"temperature": 0.8, "penalties": Penalties(1.3, 0.5, 0.5)},
    {"temperature": 0.0, "constraint": Alternating},
    {"temperature": 0.7, "min_tokens": 3, "bad_words": ((1, 2), (3,))},
    {"temperature": 1.0, "prompt_logprobs": 1},
]


def make_cases(count: int):
    chance, cases = random.Random(4), []
    stems = [[chance.randrange(VOCAB) for _ in range(20)] for _ in range(3)]
    for number in range(count):
        stem = chance.choice(stems)[: chance.randint(0, 20)]
        prompt = (*stem, number % VOCAB, *[chance.randrange(VOCAB) for _ in range(chance.randint(1, 9))])
        kind = KINDS[number % len(KINDS)]
        stops = {} if "constraint" in kind else {"stop_token_ids": STOPS}
        cases.append((prompt, SamplingParams(**kind, **stops, seed=number, max_tokens=chance.randint(3, 14))))
    return cases


CASES = make_cases(140)
CASES_BY_PROMPT = {prompt: number for number, (prompt, _) in enumerate(CASES)}


def random_faults(chance: random.Random):
    """Yield one Fault for each call of a store.

    About a third of the faults are an error, a flipped bit or a truncated object. The others do nothing.
    """
    while True:
        kinds = Fault("an error"), Fault(flip_bit=chance.randrange(1 << 12)), Fault(cut_to=100)
        yield chance.choice(kinds) if chance.random() < 0.33 else Fault()


def break_copies(engine: Engine, chance: random.Random, share: float) -> None:
    """Make a share of the copies between device and host raise RuntimeError."""
    for lane in engine.tiers._controller._transfers._lanes.values():

        def sometimes(*arguments, mover=lane._mover):
            if chance.random() < share:
                raise RuntimeError("the link is down")
            return mover(*arguments)

        lane._mover = sometimes


class Life:
    """Random requests on one engine.

    With `lower_tiers`, the engine has host memory and a store, and some copies and store calls fail. Otherwise it has
    no store, and for some seeds no host memory.
    """

    def __init__(self, model: CacheReader, seed: int, phases: int, *, lower_tiers: bool = False) -> None:
        self.model = model
        self.chance, self.seen = random.Random(seed), Counter()
        pick = self.chance.choice
        saving = WritebackConfig(pick(list(WritePolicy)), max_blocks=pick([1, 100]))
        cache = CacheConfig(
            pick([12, 14, 20, 60]),
            prefix_caching=lower_tiers or pick([True, True, False]),
            host=HostConfig(24, saving=saving)
            if lower_tiers
            else pick([None, HostConfig(pick([4, 40]), saving=saving)]),
            stores=(StoreConfig("disk", wait=pick(list(WaitPolicy))),) if lower_tiers else (),
            always_load=True,
        )
        limits = SchedulerConfig(max_rows=pick([1, 3, 5]), max_step_tokens=pick([6, 16, 40]))
        proposer = Proposer(model, self.chance) if self.chance.random() < 0.25 else None
        ticks = itertools.count()
        self.engine = Engine(
            model,
            config=EngineConfig(BLOCK, cache, limits, graph_sizes=(), phases=phases),
            proposer=proposer,
            stores={"disk": FaultyStore(MemoryStore(1 << 28), random_faults(self.chance))} if lower_tiers else {},
            clock=lambda: float(next(ticks)),
        )
        if lower_tiers:
            break_copies(self.engine, self.chance, 0.03)
        self.answers, self.numbers = Answers(), {}
        self.broken: set[str] = set()  # failed and aborted requests, whose answers may be incomplete
        self.fails_at = None  # the op whose next call raises Break
        for module, op in ((ModelForward, "setup"), (ModelForward, "forward"), (Sampler, "fetch"), (Sampler, "update")):
            self._break(next(each for each in self.engine._pipeline.modules if type(each) is module), op)

    def _break(self, module, op: str) -> None:
        run = getattr(module, op)

        def breaking(env):
            if self.fails_at == op:
                self.fails_at = None
                raise Break(op)
            run(env)

        setattr(module, op, breaking)

    def step(self) -> None:
        act = self.chance.random()
        if act < 0.35 and len(self.engine._live) < 8:
            self.add()
        elif act < 0.39 and self.engine._live:
            name = self.chance.choice(sorted(each.id for each in self.engine._live.values()))
            self.seen["cancelled"] += self.engine.abort(name)
            self.broken.add(name)
        elif act < 0.41 and self.fails_at is None:
            self.fails_at = self.chance.choice(["setup", "forward", "fetch", "update"])
        elif act < 0.415 and self.engine.config.cache.host is not None:
            self.engine.tiers.sleep()
            self.engine.tiers.wake()
            self.seen["slept"] += 1
        running = self.engine.scheduler.running
        self.seen["overlapping"] += any(each.in_flight for each in running)
        before = [each.num_preempted for each in running]
        self.take(self.engine.step())
        self.seen["preempted"] += [each.num_preempted for each in running] != before
        check_scheduler(self.engine.scheduler)

    def add(self) -> None:
        number = self.chance.randrange(len(CASES))
        name = f"r{len(self.numbers)}"
        self.numbers[name] = number
        self.engine.add(*CASES[number], request_id=name, priority=self.chance.randrange(2))

    def take(self, outputs) -> None:
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                assert output.error.startswith("Break: ")
                self.seen[output.error] += 1
                self.broken.add(output.request_id)
        self.answers.take(outputs)

    def end(self) -> None:
        self.fails_at = None
        for _ in range(3000):
            if not self.engine.has_work():
                break
            self.take(self.engine.step())
            check_scheduler(self.engine.scheduler)
        assert not self.engine._live
        check_pipeline(self.engine._pipeline)
        assert self.engine.manager.stats.num_allocations == 0
        assert self.engine.manager.num_available == self.engine.config.cache.num_blocks
        for name, number in self.numbers.items():
            right = self.model.expected(number)
            if name in self.broken:
                tokens = self.answers[name].tokens if (name, 0) in self.answers else []
                assert tokens == right.tokens[: len(tokens)]
                continue
            answer = self.answers[name]
            got = answer.tokens, answer.reason, answer.logprobs, len(answer.prompt_logprobs)
            expected = right.tokens, right.reason, right.logprobs, len(right.prompt_logprobs)
            assert got == expected, f"{name}, case {number}: {got} instead of {expected}"
        self.seen["answers"] += len(self.numbers) - len(self.broken)
        self.engine.close()


def check_lives(
    model: CacheReader, phases: int, seeds: Iterable[int], num_steps: int, *, lower_tiers: bool = False
) -> Counter[str]:
    """Run engines one after the other for `num_steps` steps each. Check the answers, and return event counts."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        life = Life(model, seed, phases, lower_tiers=lower_tiers)
        for _ in range(num_steps):
            life.step()
        life.end()
        if lower_tiers:
            life.seen.update({f"tokens from {tier.name}": tier.hit_tokens for tier in life.engine.manager.stats.tiers})
        seen += life.seen
    return seen
