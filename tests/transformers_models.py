"""Tiny random models of Transformers, and random cases that compare a PrefixCache with plain `generate`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as hf

VOCABULARY = 61
PAD = 0
TIE = 1e-4
"""In a tie, the logits of two tokens differ by less than this."""
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "eos_token_id": None,
    "bos_token_id": None,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS = ("llama", "qwen2", "qwen2-sliding", "qwen3", "mistral", "mistral-sliding", "gemma2", "gemma3")


def make_model(kind: str = "llama", *, seed: int = 0, **settings: Any) -> Any:
    """Return a model with 3 layers. Attention windows, if any, are shorter than most prompts of the tests."""
    given = {**_SMALL, **settings}
    makers = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**given)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**given)),
        "qwen2-sliding": lambda: hf.Qwen2ForCausalLM(
            hf.Qwen2Config(**given, use_sliding_window=True, sliding_window=11, max_window_layers=1)
        ),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**given)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**given, sliding_window=None)),
        "mistral-sliding": lambda: hf.MistralForCausalLM(hf.MistralConfig(**given, sliding_window=13)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**given, sliding_window=9, layer_types=_MIXED)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**given, sliding_window=9, layer_types=_MIXED)),
    }
    torch.manual_seed(seed)
    model = makers[kind]().eval()
    with torch.no_grad():  # default weights give all tokens nearly the same logits
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return model


@cache
def shared_model(kind: str) -> Any:
    return make_model(kind)


def prompt(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """Return random ids [rows, length] without padding tokens."""
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return a batch with left padding."""
    length = max(map(len, prompts))
    ids = [[PAD] * (length - len(each)) + each for each in prompts]
    mask = [[0] * (length - len(each)) + [1] * len(each) for each in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def greedy(model: Any, inputs: dict[str, torch.Tensor], count: int = 8, **options: Any) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=count, do_sample=False, **options)


@dataclass
class Counts:
    """Results of random cases."""

    num_cases: int = 0
    num_ties: int = 0
    num_hits: int = 0
    num_all_but_one: int = 0
    """Cases in which all but one token of the longest prompt were cached."""


class RandomCases:
    """Draws batches of prompts with common prefixes, and compares `generate` with and without a PrefixCache."""

    def __init__(self, model: Any, prefix: Any, block_tokens: int, seed: int) -> None:
        self._model, self._prefix, self._block_tokens = model, prefix, block_tokens
        self._random = random.Random(seed)
        self._history: list[list[int]] = []
        self.counts = Counts()

    def _prompt(self) -> list[int]:
        """Return a prompt. In 80 % of the cases, it begins with the first tokens of an earlier prompt or output.

        The number of these tokens is random. In half of these cases, the number is rounded down to whole blocks.
        """
        rng = self._random
        tokens: list[int] = []
        if self._history and rng.random() < 0.8:
            earlier = rng.choice(self._history)
            cut = rng.randint(0, len(earlier))
            if rng.random() < 0.5:
                cut = cut // self._block_tokens * self._block_tokens
            tokens = earlier[:cut]
        return tokens + [
            rng.randrange(1, VOCABULARY)
            for _ in range(rng.choice((1, 1, 2, 5, rng.randint(1, 20 + 4 * self._block_tokens))))
        ]

    def run(self) -> None:
        """Run a random batch with and without the PrefixCache and compare the results. Sometimes call `_continue`."""
        rng = self._random
        prompts = [self._prompt() for _ in range(rng.choice((1, 1, 2, 3)))]
        inputs = padded(prompts)
        options: dict[str, Any] = {"do_sample": False}
        if rng.random() < 0.4:
            options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": rng.choice((1, 2))}
        options |= {"max_new_tokens": rng.randint(1, 12), "return_dict_in_generate": True, "output_logits": True}
        seed, rows = rng.randrange(1 << 30), options.get("num_return_sequences", 1)
        static = inputs["input_ids"].shape[1] + 12 if rng.random() < 0.25 else None  # at most 12 tokens are generated
        cache = self._prefix.begin(**inputs, num_return_sequences=rows, max_length=static)
        self._count(cache, prompts)
        torch.manual_seed(seed)
        output = self._model.generate(**inputs, past_key_values=cache, **options)
        torch.manual_seed(seed)
        self._compare(self._model.generate(**inputs, **options), output)
        self._history += [*prompts, *(_without_padding(row) for row in output.sequences.tolist())]
        self._history = self._history[-40:]
        if static is None and rows == 1 and rng.random() < 0.4:
            self._continue(cache, inputs, output.sequences)

    def _continue(self, cache: Any, inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> None:
        """Append random tokens to the cached tokens. Generate with and without the cache, and compare the results.

        If the cache has no sliding windows and every prompt has two tokens or more, first remove tokens from the end of
        the cache.
        """
        rng, past = self._random, int(cache.get_seq_length())
        shortest = int(inputs["attention_mask"].sum(1).min())
        if not any(cache.is_sliding) and shortest > 1:
            removed = rng.randint(1, past - (inputs["input_ids"].shape[1] - shortest) - 1)
            cache.crop(-removed)
            past -= removed
        pads = inputs["attention_mask"].shape[1] - inputs["attention_mask"].sum(1)
        ids = torch.cat((sequences[:, :past], prompt(rng.randint(1, 9), rng.randrange(1 << 30), len(sequences))), dim=1)
        mask = (torch.arange(ids.shape[1]) >= pads[:, None]).long()
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        output = self._model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)
        self._compare(self._model.generate(input_ids=ids, attention_mask=mask, **options), output)
        self._history += [_without_padding(row) for row in output.sequences.tolist()]

    def _count(self, cache: Any, prompts: list[list[int]]) -> None:
        self.counts.num_cases += 1
        self.counts.num_hits += max(cache.hit_tokens) > 0
        self.counts.num_all_but_one += max(cache.hit_tokens) == max(map(len, prompts)) - 1 > 0
        assert max(cache.hit_tokens) < max(map(len, prompts))

    def _compare(self, plain: Any, cached: Any) -> None:
        """Require equal tokens in each row, except after a tie, where two tokens have nearly equal logits."""
        if torch.equal(plain.sequences, cached.sequences):
            return
        first = plain.sequences.shape[1] - len(plain.logits)
        for row in (plain.sequences != cached.sequences).any(1).nonzero().flatten().tolist():
            step = int((plain.sequences[row, first:] != cached.sequences[row, first:]).nonzero()[0])
            chosen = [int(each.sequences[row, first + step]) for each in (plain, cached)]
            logits = plain.logits[step][row][chosen]
            gap = float((logits[0] - logits[1]).abs())
            assert gap < TIE, f"row {row} differs at generated token {step}, with a logit gap of {gap:.2e}"
            self.counts.num_ties += 1


def _without_padding(row: list[int]) -> list[int]:
    return row[next(at for at, token in enumerate(row) if token != PAD) :]
