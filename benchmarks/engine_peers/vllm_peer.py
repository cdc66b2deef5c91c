"""The cases of benchmarks.engine in vLLM on the CPU; run by the Python of vLLM's environment, prints one JSON line.

python vllm_peer.py FOLDER < cases.json      cases: name -> prompts (token ids), decode (True or False), rounds
"""

from __future__ import annotations

import json
import sys
import time

from vllm import EngineArgs, LLMEngine, SamplingParams


def main() -> None:
    folder, cases = sys.argv[1], json.load(sys.stdin)
    longest = max(len(prompt) for case in cases.values() for prompt in case["prompts"])
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=longest + 128,
            max_num_batched_tokens=longest + 128,
        )
    )
    found = {name: min(run(engine, name, case)) for name, case in cases.items()}
    print(json.dumps({"seconds": found}))


def run(engine: LLMEngine, name: str, case: dict) -> list[float]:
    """Measure a prefill (from add to its token) or a decode step of all sequences, after one warm-up."""
    rounds = case["rounds"]
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=rounds + 2 if case["decodes"] else 1, detokenize=False
    )
    if case["decodes"]:
        for number, prompt in enumerate(case["prompts"]):
            engine.add_request(f"{name} {number}", {"prompt_token_ids": prompt}, params)
        engine.step()
        seconds = [timed(engine) for _ in range(rounds + 1)]
        while engine.has_unfinished_requests():
            engine.step()
        return seconds[1:]
    seconds = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        engine.add_request(f"{name} {number}", {"prompt_token_ids": case["prompts"][0]}, params)
        while engine.has_unfinished_requests():
            engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def timed(engine: LLMEngine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
