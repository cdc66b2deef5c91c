from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.engine.caches import StoreOrUrls
from kvtier.engine.checkpoint import load_model
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.engine.packaged import DEFAULT_MODEL
from kvtier.engine.params import FinishReason, Logprobs, Output, PromptLogprobs, SamplingParams
from kvtier.engine.speculate import Proposer
from kvtier.engine.tokenizer import load_tokenizer
from kvtier.engine.weights import Products
from kvtier.errors import ArgumentError, ClosedError, StateError
from kvtier.index import Listener
from kvtier.memory.torch_types import AnyDType

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated text, with its tokens and its finish reason."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str = ""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """One element per prompt token, beginning at prompt_logprobs_start. Equal for all n completions of a prompt."""


class LLM:
    """A model with its tokenizer and an engine.

        LLM().generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))

    `model` is a Hugging Face folder, a .gguf file, or the name of a packaged model. With `invariant`, the result of a
    request is bit-identical in every batch, but the engine is slower. With `products="integer"`, multiplication with
    quantised matrices on the CPU is faster, but rounds its input (see weights.Products).

    `generate` and `chat` may be called from several threads. The engine runs on a thread of its own and serves one call
    at a time. KeyboardInterrupt ends a call after the current step and cancels the requests of the call. Do not
    use `engine` during a call. A forked child cannot use the LLM.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        *,
        dtype: AnyDType = "f32",
        device: str | torch.device = "cpu",
        invariant: bool = False,
        products: Products | str = Products.EXACT,
        proposer: Proposer | None = None,
        stores: Mapping[str, StoreOrUrls] | None = None,
        listener: Listener | None = None,
        tensor_parallel: int | None = None,
    ) -> None:
        """`tensor_parallel` overrides the number of ranks in `config`. `listener` gets the events of the index."""
        config = config or EngineConfig()
        if tensor_parallel is not None:
            config = replace(config, tensor_parallel=tensor_parallel)
        if products == Products.INTEGER and (invariant or config.tensor_parallel > 1):
            raise ArgumentError("integer products do not support invariant mode or tensor_parallel; use exact products")
        self.tokenizer = load_tokenizer(model)
        loaded = load_model(model, dtype, device, InvariantOps() if invariant else None, products)
        self.engine = Engine(loaded, self.tokenizer, config, proposer=proposer, stores=stores, listener=listener)
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, "kvtier-llm", _use_device, (loaded.weights.device,))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[list[Completion]]:
        """Generate `params.n` completions for each prompt. By default, show progress if stderr is a terminal."""
        prompts = _prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ArgumentError(
                f"got {len(prompts)} prompts and {len(each)} SamplingParams; pass one for all prompts, or one for each"
            )
        interrupted = threading.Event()
        work: Future[list[list[Completion]]] | None = None
        self._check_process()
        try:
            try:
                work = self._thread.submit(self._generate, prompts, each, progress, interrupted)
            except RuntimeError as error:  # after `close`, or at the exit of the interpreter
                raise ClosedError("this LLM was closed; create another one") from error
            return work.result()
        except BaseException:  # the call failed or this thread was interrupted; let the engine finish its step
            interrupted.set()
            if work is not None and not work.cancel():
                wait([work])
            raise

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Generate the next message of a conversation. `options` are passed to Tokenizer.encode_chat."""
        return self.generate([self.tokenizer.encode_chat(messages, **options)], params, progress=False)[0][0]

    def close(self) -> None:
        """Wait for calls in progress and close the engine."""
        self._check_process()
        self._thread.shutdown()
        self.engine.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"this LLM belongs to process {self._process}; its threads do not exist in a forked child "
                f"({os.getpid()}). Create an LLM in the child, or start the child with the spawn method"
            )

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        progress: bool | None,
        interrupted: threading.Event,
    ) -> list[list[Completion]]:
        """Add the requests and run the engine until it has no work or the call is interrupted. Runs on `_thread`."""
        names: list[str] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                names.append(self.engine.add(prompt, each))
            show = sys.stderr.isatty() if progress is None else progress
            outputs = self._run(sum(each.n for each in params) if show else 0, interrupted)
        finally:
            for name in names:
                self.engine.abort(name)
        if interrupted.is_set():
            return []
        return [
            [_joined(outputs[name, index], outputs[name, 0]) for index in range(each.n)]
            for name, each in zip(names, params, strict=True)
        ]

    def _run(self, total: int, interrupted: threading.Event) -> dict[tuple[str, int], list[Output]]:
        """Run the engine. Return the outputs by request id and sequence index. Print progress if `total` is not 0."""
        outputs: dict[tuple[str, int], list[Output]] = {}
        num_done = num_tokens = 0
        while self.engine.has_work() and not interrupted.is_set():
            for output in self.engine.step():
                outputs.setdefault((output.request_id, output.index), []).append(output)
                num_tokens += len(output.token_ids)
                num_done += output.finish_reason is not None
            if total:
                filled = 30 * num_done // total
                bar = "#" * filled + "." * (30 - filled)
                sys.stderr.write(f"\r[{bar}] {num_done}/{total} answers, {num_tokens} tokens")
                sys.stderr.flush()
        if total:
            sys.stderr.write("\n")
        return outputs


def _use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread, because Triton launches kernels on the current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _joined(outputs: Sequence[Output], first: Sequence[Output]) -> Completion:
    """Return the completion of a sequence. `first` has the outputs of sequence 0, which include the prompt_logprobs."""
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        "".join(output.text for output in outputs),
        tuple(token for output in outputs for token in output.token_ids),
        tuple(logprobs for output in outputs for logprobs in output.logprobs),
        last.finish_reason,
        last.num_prompt_tokens,
        last.num_cached_tokens,
        last.error,
        tuple(score for output in first for score in output.prompt_logprobs),
    )
