"""Time to first token of a long prompt in transformers: computed, and with the prefix read from disk in a new process.

PYTHONPATH=.:tests python -m benchmarks.prefix_cache        SmolLM2-135M in float32; a prefix of 1,500 tokens

Every measurement is a separate process, which loads the model first. "prefix on disk" opens a PrefixCache on the folder
of an earlier process. "computed" is plain `generate`. "torch.load" loads a DynamicCache that was saved with torch.save,
which needs no kvtier but has no checksums and cannot search for a prefix. The three kinds alternate. Processes have one
thread each, because the threads of torch wait for each other when other processes use the cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Row, arguments, at_most, print_table, report

KINDS = ("computed", "prefix on disk", "torch.load")
NEW_TOKENS = 20


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1500, help="length of the prefix")
    parser.add_argument("--child", default="")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_child(options.child, options.folder, options.tokens)))
        return
    import vllm_models

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vllm_models.make_smollm2(folder / "model")
        _run("store", folder, options.tokens)
        rows: list[Row] = []
        for number in range(options.rounds):
            rows += [{"round": number, "case": kind, **_run(kind, folder, options.tokens)} for kind in KINDS]
    print_table(rows)
    ttft = {kind: statistics.median(_figures(rows, kind, "ttft ms")) for kind in KINDS}
    opened = statistics.median(_figures(rows, "prefix on disk", "open ms"))
    computed = ttft["computed"]
    assert len({row["token"] for row in rows}) == 1, "the answers differ"
    bars = [
        at_most("TTFT with the prefix on disk over computing it", ttft["prefix on disk"] / computed, 0.2),
        at_most("the same, with opening the PrefixCache", (ttft["prefix on disk"] + opened) / computed, 0.2),
    ]
    report("prefix_cache", rows, bars, options.results)


def _figures(rows: list[Row], kind: str, name: str) -> list[float]:
    return [float(str(row[name])) for row in rows if row["case"] == kind]


def _run(kind: str, folder: Path, tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.prefix_cache", "--child", kind]
    done = subprocess.run(
        [*command, "--folder", str(folder), "--tokens", str(tokens)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _child(kind: str, folder: Path, num_tokens: int) -> dict[str, object]:
    """Load the model, then measure one request."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvtier.integrations.transformers import PrefixCache

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(10, 40_000, (1, num_tokens + NEW_TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    model(input_ids=ids[:, :8])  # the first forward pass initialises torch
    if kind == "store":
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :num_tokens], past_key_values=cache)
        torch.save([(layer.keys, layer.values) for layer in cache.layers], folder / "cache.pt")
    began = time.perf_counter()
    prefix = PrefixCache(model, f"disk:{folder / 'kv'}?bytes=4GiB") if kind in ("store", "prefix on disk") else None
    opened = time.perf_counter()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    hits = 0
    if prefix is not None:
        cache = prefix.begin(ids, mask)
        hits = cache.hit_tokens[0]
        options["past_key_values"] = cache
    elif kind == "torch.load":
        options["past_key_values"] = filled = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(torch.load(folder / "cache.pt")):
            filled.update(keys, values, layer)
    output = model.generate(ids, **options)
    done = time.perf_counter()
    if prefix is not None:
        prefix.close()
    milliseconds = {"open ms": round(1e3 * (opened - began), 1), "ttft ms": round(1e3 * (done - opened), 1)}
    return {**milliseconds, "hit tokens": hits, "token": int(output[0, -1]), "load": round(os.getloadavg()[0], 1)}


if __name__ == "__main__":
    main()
