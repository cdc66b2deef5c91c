"""LLM: prompts in, texts out."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import torch

from kvtier.engine.caches import StoreOrUrls
from kvtier.engine.checkpoint import load_model
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.engine.packaged import DEFAULT_MODEL
from kvtier.engine.params import FinishReason, Logprobs, Output, SamplingParams
from kvtier.engine.speculate import Proposer
from kvtier.engine.tokenizer import load_tokenizer
from kvtier.errors import ArgumentError, ClosedError, StateError
from kvtier.memory.torch_types import AnyDType

Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str = ""


class LLM:
    """A model with its tokenizer and an engine.

        LLM().generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))

    `model` is a Hugging Face folder, a .gguf file, or the name of a packaged model. `invariant` computes every token
    the same way whatever shares its batch: for proofs, and slower.

    `generate` and `chat` may be called from several threads: the engine runs on one thread of its own and serves the
    calls one after the other. An interrupt (KeyboardInterrupt) ends the call after the current step and cancels its
    requests. `engine` itself is for one thread: do not use it during a call. A forked child cannot use the LLM.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        *,
        dtype: AnyDType = "f32",
        device: str | torch.device = "cpu",
        invariant: bool = False,
        proposer: Proposer | None = None,
        stores: Mapping[str, StoreOrUrls] | None = None,
        tensor_parallel: int | None = None,
    ) -> None:
        """`tensor_parallel` ranks share the model, if it is given: what the configuration says otherwise."""
        config = config or EngineConfig()
        if tensor_parallel is not None:
            config = replace(config, tensor_parallel=tensor_parallel)
        self.tokenizer = load_tokenizer(model)
        loaded = load_model(model, dtype, device, InvariantOps() if invariant else None)
        self.engine = Engine(loaded, self.tokenizer, config, proposer=proposer, stores=stores)
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, "kvtier-llm", _use_device, (loaded.weights.device,))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[list[Completion]]:
        """All answers to all prompts: a list for each prompt, of its n answers. Shows progress on a terminal."""
        asked = _prompts(prompts)
        wanted = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(asked)
        if len(wanted) != len(asked):
            raise ArgumentError(
                f"{len(asked)} prompts and {len(wanted)} sampling parameters: give one, or one for each"
            )
        interrupted = threading.Event()
        work: Future[list[list[Completion]]] | None = None
        try:
            work = self._submit(self._generate, asked, wanted, progress, interrupted)
            return work.result()
        except BaseException:  # its own error, or an interrupt of this thread: then the engine finishes its step
            interrupted.set()
            if work is not None and not work.cancel():
                wait([work])
            raise

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The answer to a conversation; options go to the chat template."""
        return self.generate([self.tokenizer.encode_chat(messages, **options)], params, progress=False)[0][0]

    def close(self) -> None:
        """Wait for calls in progress and close the engine."""
        self._check_process()
        self._thread.shutdown()
        self.engine.close()

    def _submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        self._check_process()
        try:
            return self._thread.submit(function, *arguments)
        except RuntimeError as error:  # after shutdown, here or at the interpreter's exit
            raise ClosedError("this LLM was closed") from error

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"this LLM belongs to process {self._process}; a forked child ({os.getpid()}) has none of its threads. "
                f"Make an LLM in the child, or start it with the spawn method"
            )

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        progress: bool | None,
        interrupted: threading.Event,
    ) -> list[list[Completion]]:
        """Run the engine until it has no more work, on its own thread."""
        collected: dict[tuple[str, int], list[Output]] = {}
        names: list[str] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                names.append(self.engine.add(prompt, each))
            with _ProgressBar(sum(each.n for each in params), sys.stderr, progress) as bar:
                self._run(collected, bar.update, interrupted)
        finally:
            for name in names:
                self.engine.abort(name)
        if interrupted.is_set():
            return []
        return [
            [_joined(collected[name, index]) for index in range(each.n)]
            for name, each in zip(names, params, strict=True)
        ]

    def _run(
        self,
        collected: dict[tuple[str, int], list[Output]],
        update: Callable[[int, int], None],
        interrupted: threading.Event,
    ) -> None:
        num_done = num_tokens = 0
        while self.engine.has_work() and not interrupted.is_set():
            for output in self.engine.step():
                collected.setdefault((output.request_id, output.index), []).append(output)
                num_tokens += len(output.token_ids)
                num_done += output.finish_reason is not None
            update(num_done, num_tokens)


def _use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread: kernels of Triton start on it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _joined(outputs: Sequence[Output]) -> Completion:
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
    )


class _ProgressBar:
    """One line on a terminal that says how far it is."""

    def __init__(self, total: int, file: TextIO, show: bool | None) -> None:
        self._total, self._file = total, file
        self._show = file.isatty() if show is None else show

    def update(self, num_done: int, num_tokens: int) -> None:
        """Rewrite the line."""
        if self._show:
            filled = 30 * num_done // max(1, self._total)
            bar = "#" * filled + "." * (30 - filled)
            self._file.write(f"\r[{bar}] {num_done}/{self._total} answers, {num_tokens} tokens")
            self._file.flush()

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._show:
            self._file.write("\n")
