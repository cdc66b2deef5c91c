"""Inject faults into single rows of a batch. Some requests ("victims") fail at one stage; all others must succeed."""

import itertools
import os

import numpy as np
import tokenizers
import torch

from engine_helpers import VOCAB, Answers, finish, prompts
from kvtier.cache.config import CacheConfig
from kvtier.engine import Model, NgramProposer, Penalties, SamplingParams, Tokenizer
from kvtier.engine import engine as engine_module
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.sequence import FinishReason
from kvtier.scheduler import SchedulerConfig
from scheduler_support import check_scheduler
from support import check_pipeline

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
# The test of a stage ends after NUM_FAULTS steps with a failing row. At the stage "proposer", no row fails, so the test
# ends after NUM_FAULTS steps. `make soak` sets KVTIER_SOAK to 20 by default, so NUM_FAULTS is 2,000.
NUM_FAULTS = 12 if SOAK < 2 else min(2000, 100 * SOAK)
POISON = 197  # the only token that the broken tokenizer cannot decode
# Before each step, requests are added until LIVE_OTHERS others and LIVE_VICTIMS victims are waiting or running.
LIVE_OTHERS, LIVE_VICTIMS = 4, 2


class Break(Exception):
    """The error that the injected faults raise."""


class FaultyModel(Model):
    """Replaces the logits of a victim with `value` after `ages[victim]` tokens. A `value` of None replaces nothing.

    In all other rows, the logit of POISON is so low that this token is sampled only if a constraint forces it.
    """

    def __init__(self, model, value=None):
        super().__init__(model.config, model.weights, model.ops)
        self.value = value
        self.ages = {}
        self.engine = None

    def forward(self, batch, cache, before_layer=None):
        self.batch = batch
        return super().forward(batch, cache, before_layer)

    @torch.inference_mode()
    def logits(self, hidden):
        found = super().logits(hidden)
        found[:, POISON] = -1e4
        at = self.batch.logit_rows
        positions, blocks = self.batch.positions[at].cpu().numpy(), (self.batch.slots[at] // 4).cpu().numpy()
        for request in self.engine.scheduler.running if self.value is not None else ():
            if request.num_new_tokens < self.ages.get(request.id.split("#")[0], 1 << 30):
                continue
            table = np.asarray(request.allocation.table)
            # A block is written by only one request, so the block that a row writes identifies the request of the row.
            places = np.minimum(positions // 4, len(table) - 1)
            mine = (table[places] == blocks) & (places == positions // 4)
            found[torch.from_numpy(mine).to(found.device)] = torch.tensor(self.value, device=found.device)
        return found


class BrokenConstraint:
    """Allows every token at first. After `age` tokens, it raises or forbids tokens, depending on `stage`."""

    def __init__(self, stage, age):
        self.stage, self.num_left = stage, age

    def forbid(self, logits):
        if self.num_left <= 0 and self.stage == "forbid":
            raise Break(self.stage)
        if self.num_left <= 0 and self.stage == "forbid everything":
            logits.fill_(-torch.inf)
        if self.num_left <= 0 and self.stage == "detokenize":
            logits[:POISON] = logits[POISON + 1 :] = -torch.inf

    def accept(self, _):
        if self.num_left <= 0 and self.stage == "accept":
            raise Break(self.stage)
        self.num_left -= 1


class BrokenPenalties:
    """Raises when the sampler reads `presence` for the (`num_reads` + 1)-th time."""

    repetition, frequency = 1.0, 0.0

    def __init__(self, num_reads):
        self.num_left = num_reads

    @property
    def presence(self):
        self.num_left -= 1
        if self.num_left < 0:
            raise Break("penalties")
        return 0.0


class BrokenStop(str):
    """A stop text whose `startswith` raises."""

    __slots__ = ()

    def startswith(self, *_):
        raise Break("stop")


class BrokenBackend:
    """A tokenizer that cannot decode the token POISON."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def decode(self, ids, **options):
        if POISON in ids:
            raise Break("detokenize")
        return self._backend.decode(ids, **options)


class BrokenProposer(NgramProposer):
    """Raises or returns invalid drafts in some calls."""

    def __init__(self):
        super().__init__(2, shortest=1)
        self._calls = itertools.count()

    def propose(self, requests, groups):
        call = next(self._calls)
        drafts = super().propose(requests, groups)
        bad = [(VOCAB,), (-1,), ("a",), None, (1 << 70,)][call % 5]
        match call % 3:
            case 0:
                raise Break("proposer")
            case 1:
                drafts[call % len(drafts)] = bad
            case 2 if call % 2:
                drafts.append(())
        return drafts


STAGES = {
    "explain": "Break: explain",
    "inputs": "Break: inputs",
    "penalties": "Break: penalties",
    "forbid": "Break: forbid",
    "forbid everything": "no token can be sampled",
    "nan": "no token can be sampled",
    "one nan": "no token can be sampled",
    "+inf": "no token can be sampled",
    "-inf": "no token can be sampled",
    "nan with logprobs": "no token can be sampled",
    "accept": "Break: accept",
    "stop": "Break: stop",
    "detokenize": "Break: detokenize",
    "proposer": "",
}
"""Stage at which the victims fail -> start of their error message. The stage "proposer" fails no request."""
VALUES = {
    "nan": torch.nan,
    "one nan": [torch.nan] + [1.0] * (VOCAB - 1),
    "+inf": torch.inf,
    "-inf": -torch.inf,
    "nan with logprobs": torch.nan,
}
"""Stage -> logits of the victims."""


def other(number):
    """Return the prompt and random parameters of the unaffected request `number`."""
    random = np.random.default_rng([1, number])
    (prompt,) = prompts(number % 7, int(random.integers(1, 25)), shared=[int(random.integers(0, 9))])
    options = {"max_tokens": int(random.integers(1, 12)), "seed": number, "ignore_eos": bool(random.integers(2))}
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "penalties": Penalties(1.3, 0.5, 0.5)},
        {"top_p": 0.8},
        {"top_k": 9, "top_p": 0.9, "n": 2},
        {"min_p": 0.1, "logprobs": 3},
        {"logprobs": 0, "stop": ("a", "e!")},
    ]
    return prompt, SamplingParams(**options, **kinds[int(random.integers(len(kinds)))])


def victim(stage, number):
    """Return the prompt and the parameters of a victim, and its age.

    The age is the number of tokens after which the victim fails. Some stages ignore it.
    """
    random = np.random.default_rng([2, number])
    age = int(random.integers(0, 4))
    (prompt,) = prompts(number % 5, int(random.integers(1, 25)), shared=[int(random.integers(0, 9))])
    options = {"max_tokens": 12, "seed": number, "temperature": 1.5, "top_p": float(random.choice([0.7, 1.0]))}
    options |= {"n": int(random.integers(1, 3))}
    if stage in ("forbid", "forbid everything", "accept", "detokenize"):
        options["constraint"] = lambda: BrokenConstraint(stage, age)
    if stage == "penalties":
        options["penalties"] = BrokenPenalties(options["n"] + age)  # the start of each sequence reads `presence` once
    if stage == "stop":
        options["stop"] = (BrokenStop("never found"),)
    if stage == "nan with logprobs":
        options["logprobs"] = 5
    return prompt, SamplingParams(**options), age


def make_tokenizer():
    """Return a byte tokenizer that cannot decode the token POISON."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    kept = letters[:128] + letters[160:230]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(kept)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(BrokenBackend(backend))


class Run:
    """An engine under random load, with unaffected requests and with victims that fail at one stage."""

    def __init__(self, model, tokenizer, stage=None):
        self.stage = stage
        self.model = FaultyModel(model, VALUES.get(stage))
        proposer = BrokenProposer() if stage == "proposer" else NgramProposer(2, shortest=1)
        # no CUDA graphs, because they would replay the computation of the logits without the faults
        config = EngineConfig(4, CacheConfig(48), SchedulerConfig(8, 24), graph_sizes=())
        ticks = itertools.count()
        self.engine = Engine(self.model, tokenizer, config, proposer=proposer, clock=lambda: float(next(ticks)))
        self.model.engine = self.engine
        self.answers = Answers()
        self.num_others = self.num_victims = self.num_failed_steps = self.num_steps = 0

    def add_other(self):
        prompt, params = other(self.num_others)
        self.engine.add(prompt, params, request_id=f"other-{self.num_others}")
        self.num_others += 1

    def add_victim(self):
        prompt, params, age = victim(self.stage, self.num_victims)
        name = f"victim-{self.num_victims}"
        self.model.ages[name] = age
        self.engine.add(prompt, params, request_id=name)
        self.num_victims += 1

    def step(self):
        outputs = self.engine.step()
        self.answers.take(outputs)
        check_scheduler(self.engine.scheduler)
        self.num_steps += 1
        self.num_failed_steps += any(output.finish_reason is FinishReason.ERROR for output in outputs)

    def top_up(self):
        names = [request.id for request in (*self.engine.scheduler.running, *self.engine.scheduler.waiting)]
        for _ in range(LIVE_OTHERS - sum(name.startswith("other") for name in names)):
            self.add_other()
        for _ in range(LIVE_VICTIMS - sum(name.startswith("victim") for name in names)):
            self.add_victim()

    def check_end(self):
        finish(self.engine, self.answers)
        check_pipeline(self.engine._pipeline)
        assert not self.engine._live
        assert not self.engine.manager.leases
        assert self.engine.manager.stats.num_allocations == 0
        assert self.engine.manager.num_available == 48

    def unaffected_answers(self, exact):
        """Return the answers of unaffected requests, without the fields that depend on the load.

        If `exact` is False, each answer contains the number of log-probabilities instead of the log-probabilities.
        """
        return {
            key: (each.tokens, each.text, each.logprobs if exact else len(each.logprobs), each.reason, each.error)
            for key, each in self.answers.items()
            if key[0].startswith("other")
        }


def inject(run, monkeypatch):
    """Make engine code raise for victims at the stages `explain` and `inputs`. Change nothing for other stages."""
    if run.stage == "explain":
        explain = run.engine.manager.explain

        def broken_explain(allocation):
            if any(r.allocation is allocation and r.id.startswith("victim") for r in run.engine.scheduler.running):
                raise Break("explain")
            return explain(allocation)

        monkeypatch.setattr(run.engine.manager, "explain", broken_explain)
    if run.stage == "inputs":
        build = engine_module.plan_row

        def broken_input(row, sequence):
            if row.request.num_new_tokens >= run.model.ages.get(row.request.id.split("#")[0], 1 << 30):
                raise Break("inputs")
            return build(row, sequence)

        monkeypatch.setattr(engine_module, "plan_row", broken_input)


def check_row_faults(model, stage, monkeypatch, *, exact=True):
    """Run requests together with victims that fail at `stage`, and again without victims. Compare the answers.

    If `exact`, compare log-probabilities bit by bit, which needs a batch-invariant model. Otherwise, compare only the
    number of log-probabilities. Tokens and texts are always compared.
    """
    tokenizer = make_tokenizer()
    run = Run(model, tokenizer, stage)
    inject(run, monkeypatch)
    while (run.num_steps if stage == "proposer" else run.num_failed_steps) < NUM_FAULTS:
        run.top_up()
        run.step()
    run.check_end()
    for (name, _), answer in run.answers.items():
        if name.startswith("other") or stage == "proposer":
            assert answer.reason in (FinishReason.STOP, FinishReason.LENGTH), answer
        elif answer.reason is not FinishReason.STOP:  # the model can end an answer before the failure
            assert answer.reason is FinishReason.ERROR
            assert answer.error.startswith(STAGES[stage])
    monkeypatch.undo()
    calm = Run(model, tokenizer)
    for _ in range(run.num_others):
        calm.add_other()
        calm.step()
    calm.check_end()
    assert run.unaffected_answers(exact) == calm.unaffected_answers(exact)
