"""Run vLLM for a long time with random requests, aborts, preemptions, faults and resets (`make soak-vllm`).

    python -m vllm_soak --seconds 600

Every round must end without requests, references to device blocks, loads or saves. Each round compares the bytes of all
loaded blocks with the computed bytes, and the tokens of six prompts with the tokens of vLLM alone. After the first
third of the rounds, the memory of the process must not grow by more than 10 percent.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import vllm_models
import vllm_scenarios as scenarios
from vllm_support import Oracle, Template, connector, prompt_of

ROUND_SECONDS = 20.0
MAX_GROWTH = 1.1
"""Maximum ratio of the memory after the last round to the memory after a third of the rounds."""


def soak(template: Template, folder: Path, seconds: float) -> None:
    prompts = [prompt_of(number % 8, 30 + 97 * number % 500) for number in range(60)]
    store = {"url": f"disk:{folder}/kv?bytes=64MiB"}
    settings = connector("vllm_connectors", "FaultyConnector", host_bytes=60 << 16, max_saving_blocks=0, stores=[store])
    alone = template.start(None, enable_prefix_caching=False, num_gpu_blocks_override=64)
    with alone as engine, template.start(settings, num_gpu_blocks_override=40) as tested:
        oracle = Oracle(engine)
        tested.run(scenarios.start_comparing_loads)
        tested.run(scenarios.poison_free_blocks)
        memory: list[int] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            number = len(memory)
            result = tested.run(scenarios.soak_round, prompts, number, min(ROUND_SECONDS, end - time.monotonic()))
            memory.append(result["KiB"])
            sample = prompts[number % 50 : number % 50 + 6]
            assert tested.tokens(sample) == oracle.tokens(sample), f"round {number} changed tokens"
            tested.run(scenarios.check_idle)
            sys.stdout.write(f"round {number}: {result}, {tested.metrics()['vllm:num_preemptions']:.0f} preemptions\n")
            sys.stdout.flush()
    first, last = memory[len(memory) // 3], memory[-1]
    assert last <= first * MAX_GROWTH, f"the process grew from {first} to {last} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        template = Template(folder, vllm_models.make_llama(folder / "model"))
        try:
            soak(template, folder, options.seconds)
        finally:
            template.close()


if __name__ == "__main__":
    main()
