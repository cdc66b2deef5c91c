"""The engine on the CPU compared with transformers on the same weights: SmolLM2-135M in float32, whole steps.

python -m benchmarks.engine                      one thread per core; --threads to choose
KVTIER_CPU_ISA=avx2 python -m benchmarks.engine  our kernels for one instruction set; torch keeps its own choice
python -m benchmarks.engine --check              also compare the greedy tokens of 32 prompts of mixed lengths
python -m benchmarks.engine --vllm-python V/bin/python --node-llama L     also vLLM and llama.cpp: see engine_peers

A step includes scheduling, cache bookkeeping, batch layout, model, sampling and text; benchmarks.engine_model measures
the model alone. "integer" is kvtier with products="integer". transformers runs its forward pass with its own cache,
without generate(). The engines alternate, so that noise affects all of them. The time of a case is the best of several
rounds. Decode starts at a context of 128 tokens.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import engine_peers
from benchmarks.engine_model import BATCH, CASES, CONTEXT, PREFILLS, their_tasks, transformers_model
from benchmarks.report import Bar, arguments, at_least, at_most, best, print_table, report
from kvtier.cache.config import CacheConfig
from kvtier.engine import (
    Engine,
    EngineConfig,
    Model,
    SamplingParams,
    Tokenizer,
    load_model,
    load_tokenizer,
)
from kvtier.engine.forward import ForwardBatch
from kvtier.scheduler import SchedulerConfig

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4000)
KINDS = {
    "greedy": GREEDY,
    "temperature 0.8": replace(GREEDY, temperature=0.8),
    "temperature 0.8, top-p 0.95": replace(GREEDY, temperature=0.8, top_p=0.95),
}
NUM_CHECKED, STEPS, BUSY_STEPS = 32, 60, 100
TEXT = (
    "The old harbour had been quiet for years. Ships that once came from every sea now lay still behind the long wall, "
    "and the few people who had stayed knew each of them by name. "
)


def main() -> None:
    parser = arguments("The engine on the CPU, compared with transformers.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--check", action="store_true", help=f"compare the tokens of {NUM_CHECKED} prompts first")
    for name, what in (("vllm-python", "the Python of vLLM's environment"), ("node-llama", "node-llama-cpp's folder")):
        variable = f"KVTIER_{name.replace('-', '_').upper()}"
        value = os.environ.get(variable)
        parser.add_argument(
            f"--{name}", type=Path, default=Path(value) if value else None, help=f"{what}, or ${variable}"
        )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(), load_tokenizer()
    peer = transformers_model(model)
    peers = engine_peers.Peers(options.vllm_python, options.node_llama)
    others = peers.seconds(peer, peer_cases(tokenizer, options.rounds), options.threads)
    bars = [check(model, tokenizer, peer)] if options.check else []
    rows, more_bars = compare_with_transformers(model, tokenizer, peer, options.rounds)
    for name, seconds in others.items():
        for row in rows:
            case = str(row["case"])
            row[f"{name} tok/s"] = CASES[case] / seconds[case] if seconds else engine_peers.NOT_INSTALLED
    print_table(rows)
    if not all(others.values()):
        print(f"how to install what is not:\n{engine_peers.__doc__}")
    if llama := others[engine_peers.LLAMA]:
        [one] = (row for row in rows if row["case"] == "decode 1")
        share = float(str(one["integer tok/s"])) * llama["decode 1"]
        more_bars.append(at_least("decode of one with integer products, times llama.cpp", share, 0.9))
    more_rows, outside_bars = outside(model, tokenizer)
    busy_rows, busy_bars = busy_core(model, tokenizer) if options.threads > 1 else ([], [])
    rows += more_rows + busy_rows
    for row in rows:
        row |= {"threads": options.threads, "isa": os.environ.get("KVTIER_CPU_ISA", "best")}
    report("engine", rows, bars + more_bars + outside_bars + busy_bars, options.results)


def make_engine(model: Model, tokenizer: Tokenizer, *, prefix_caching: bool = True) -> Engine:
    """Return an engine with memory for every case, without prefix caching, so that every prefill is computed."""
    cache = CacheConfig(768, prefix_caching=prefix_caching)
    return Engine(model, tokenizer, EngineConfig(cache=cache, scheduler=SchedulerConfig(64, max(PREFILLS))))


def compare_with_transformers(
    model: Model, tokenizer: Tokenizer, peer: Any, rounds: int
) -> tuple[list[dict[str, object]], list[Bar]]:
    """Measure prefill, decode of one sequence, and decode of sixteen."""
    theirs, tasks, rounding = their_tasks(peer), {}, load_model(products="integer")
    for case, num_tokens in CASES.items():
        is_prefill = case.startswith("prefill")
        engine = make_engine(model, tokenizer, prefix_caching=not is_prefill)
        tasks[case, "kvtier"] = prefill(engine, num_tokens) if is_prefill else decode(engine, num_tokens, GREEDY)
        tasks[case, "transformers"] = theirs[case]
        if not is_prefill:  # prefill is the same
            tasks[case, "integer"] = decode(make_engine(rounding, tokenizer), num_tokens, GREEDY)
    # alternate all cases, because bars compare them with each other
    rates = {(case, name): CASES[case] / seconds for (case, name), seconds in best(tasks, rounds).items()}
    rows: list[dict[str, object]] = [
        {
            "case": case,
            "kvtier tok/s": rates[case, "kvtier"],
            "integer tok/s": rates.get((case, "integer"), "as exact"),
            "transformers tok/s": rates[case, "transformers"],
            "times": rates[case, "kvtier"] / rates[case, "transformers"],
        }
        for case in CASES
    ]
    times = {row["case"]: float(str(row["times"])) for row in rows}
    bars = [at_least(f"prefill {length}, times transformers", times[f"prefill {length}"], 1.0) for length in PREFILLS]
    bars.append(at_least("decode of one, times transformers", times["decode 1"], 2.0))
    bars.append(at_least(f"decode of {BATCH}, times transformers", times[f"decode {BATCH}"], 1.3))
    share = rates[f"decode {BATCH}", "kvtier"] / rates["prefill 512", "kvtier"]
    bars.append(at_least(f"decode of {BATCH}, share of the prefill rate", share, 0.5))
    return rows, bars


def peer_cases(tokenizer: Tokenizer, rounds: int) -> dict[str, engine_peers.PeerCase]:
    """Return the same cases, with the same token ids, for the other engines."""
    few = max(2, rounds // 4)
    cases = {f"prefill {length}": engine_peers.PeerCase([prefill_ids(length)], False, few) for length in PREFILLS}
    for count in (1, BATCH):
        cases[f"decode {count}"] = engine_peers.PeerCase(decode_ids(tokenizer, count), True, rounds)
    return cases


def prefill_ids(length: int) -> list[int]:
    return [100 + i % 40000 for i in range(length)]


def decode_ids(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return prompts without a shared prefix."""
    return [tokenizer.encode(f"{index}. {TEXT * 4}")[:CONTEXT] for index in range(count)]


def prefill(engine: Engine, length: int) -> Callable[[], object]:
    """Run a prompt of token ids until its first token."""
    prompt = prefill_ids(length)

    def run() -> None:
        engine.add(prompt, replace(GREEDY, max_tokens=1))
        while engine.has_work():
            engine.step()

    return run


def decode(engine: Engine, count: int, params: SamplingParams) -> Callable[[], object]:
    """Return a decode step of `count` sequences without a shared prefix."""
    assert engine.tokenizer is not None
    for prompt in decode_ids(engine.tokenizer, count):
        engine.add(prompt, params)
    while any(not request.num_new_tokens for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine.step


class Timed(Model):
    """A model that counts the seconds of its calls."""

    seconds = 0.0

    def __init__(self, model: Model) -> None:
        super().__init__(model.config, model.weights, model.ops)

    def forward(
        self, batch: ForwardBatch, cache: torch.Tensor, before_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        start = time.perf_counter()
        hidden = super().forward(batch, cache, before_layer)
        self.seconds += time.perf_counter() - start
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        found = super().logits(hidden)
        self.seconds += time.perf_counter() - start
        return found


def outside(model: Model, tokenizer: Tokenizer) -> tuple[list[dict[str, object]], list[Bar]]:
    """Measure the time outside of the model in a step of 16 rows, as the median of many steps."""
    rows: list[dict[str, object]] = []
    for name, params in KINDS.items():
        timed = Timed(model)
        step = decode(make_engine(timed, tokenizer), BATCH, params)
        whole, rest = [], []
        for _ in range(STEPS):
            timed.seconds, start = 0.0, time.perf_counter()
            step()
            whole.append(time.perf_counter() - start)
            rest.append(whole[-1] - timed.seconds)
        share = statistics.median(a / b for a, b in zip(rest, whole, strict=True))
        rows.append(
            {
                "case": f"decode {BATCH}, {name}",
                "step ms": statistics.median(whole) * 1e3,
                "outside ms": statistics.median(rest) * 1e3,
                "share": share,
            }
        )
    print_table(rows)
    return rows, [at_most(f"outside the model, {row['case']}", float(str(row["share"])), 0.1) for row in rows]


def busy_core(model: Model, tokenizer: Tokenizer) -> tuple[list[dict[str, object]], list[Bar]]:
    """Measure the median time of decoding one sequence, alone and while another process occupies one of the cores."""
    step = decode(make_engine(model, tokenizer), 1, GREEDY)

    def milliseconds() -> list[float]:
        taken = []
        for _ in range(BUSY_STEPS):
            start = time.perf_counter()
            step()
            taken.append((time.perf_counter() - start) * 1e3)
        return taken

    milliseconds()
    alone = milliseconds()
    core = max(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as spinner:
        assert spinner.stdout is not None
        spinner.stdout.readline()
        try:
            beside = milliseconds()
        finally:
            spinner.kill()
    times = statistics.median(beside) / statistics.median(alone)
    rows: list[dict[str, object]] = [
        {"case": f"decode 1, {name}", "median ms": statistics.median(taken), "worst ms": max(taken)}
        for name, taken in (("alone", alone), ("one core busy", beside))
    ]
    print_table(rows)
    return rows, [at_most("decode of one with one busy core, times alone", times, 2.2)]


def check(model: Model, tokenizer: Tokenizer, peer: Any) -> Bar:
    """Compare greedy answers with transformers. The prompts have 1 to 700 tokens, and do not all fit into the cache."""
    text = tokenizer.encode(
        " ".join(f"Chapter {i}: the sea was calm and the {i * i} ships lay still." for i in range(90))
    )
    random = np.random.default_rng(0)
    lengths, starts = np.geomspace(1, 700, NUM_CHECKED).astype(int), random.integers(0, 300, NUM_CHECKED)
    prompts = [text[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    random.shuffle(prompts)
    engine = Engine(model, tokenizer, EngineConfig(cache=CacheConfig(200), scheduler=SchedulerConfig(16, 256)))
    found: dict[str, list[int]] = {engine.add(prompt, replace(GREEDY, max_tokens=24)): [] for prompt in prompts}
    while engine.has_work():
        for output in engine.step():
            found[output.request_id] += output.token_ids
    same = 0
    for prompt, answer in zip(prompts, found.values(), strict=True):
        with torch.inference_mode():
            logits = peer(torch.tensor([prompt + answer])).logits[0]
        same += logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    return at_least(f"of {NUM_CHECKED} prompts, answered as transformers does", same, NUM_CHECKED)


if __name__ == "__main__":
    main()
