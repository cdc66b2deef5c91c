"""The engine of a real server calls State.warp, State.append and BatchCopy.run in its steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

COUNT = """
import sys

if "--multiprocessing-fork" in sys.orig_argv:  # the engine process
    import json, multiprocessing.util
    from collections import Counter
    from kvtier.memory import BatchCopy
    from kvtier.state import State

    calls = Counter()

    def count(owner, name):
        method = getattr(owner, name)

        def call(self, *args, **kwargs):
            calls[f"{owner.__name__}.{name}"] += 1
            return method(self, *args, **kwargs)

        setattr(owner, name, call)

    count(State, "warp")
    count(State, "append")
    count(BatchCopy, "run")

    def write():
        with open(%r, "w") as file:
            json.dump(calls, file)

    multiprocessing.util.Finalize(None, write, exitpriority=1)
"""


def test_engine_of_server_calls_state_and_batch_copy(start, tmp_path: Path):
    """Count the calls in the engine process. `sitecustomize` is imported when a Python process starts."""
    counts, site = tmp_path / "counts.json", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(COUNT % str(counts))
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    num_requests, num_tokens, block_tokens = 3, 40, 8
    server = start("--block-tokens", str(block_tokens), env={"PYTHONPATH": path})
    for number in range(num_requests):
        body = {"model": server.model, "prompt": [number + 3] * 5, "max_tokens": num_tokens, "ignore_eos": True}
        answer = server.post("/v1/completions", body)
        assert answer.json()["usage"]["completion_tokens"] == num_tokens, answer.text
    assert server.stop() == 0
    calls = json.loads(counts.read_text())
    assert calls["State.warp"] >= num_requests * num_tokens  # one call per step, even if no row changes its place
    assert calls["State.append"] >= num_requests * (num_tokens // block_tokens)  # one call per new block
    assert calls["BatchCopy.run"] >= num_requests * num_tokens  # per step, at least the sampled tokens are copied
