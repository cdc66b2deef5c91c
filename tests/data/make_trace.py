"""Write the committed trace trace.jsonl, and hits.json with the number of hits of simple caches on this trace.

PYTHONPATH=tests python tests/data/make_trace.py

The trace is generated from SPEC. Its hit-rate curve is similar to the curve of the Mooncake conversation trace
(https://github.com/kvcache-ai/Mooncake, FAST25-release/traces). Both traces have long prompts and few turns. On both
traces, a small LRU cache has far fewer hits than an optimal cache. A test checks that SPEC still generates the trace.

The simple caches in this file share no code with kvtier. If KVTIER_TRACE is the path of the conversation trace, the
tests use that trace too.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path

from kvtier.replay import SyntheticTrace, TraceRequest, generate
from trace_support import write_trace

FOLDER = Path(__file__).parent
SPEC = SyntheticTrace(
    sessions=400,
    turns=2,
    think_seconds=120,
    system_prompts=4,
    system_blocks=1,
    agent_share=0.1,
    document_share=0.1,
    message_blocks=10,
    seed=20,
)
CAPACITIES = (100, 300, 1000, 2000, 4000, 8000)
Block = tuple[int, ...]


def full_blocks(request: TraceRequest) -> list[Block]:
    """Return the full blocks of a prompt. Each block is named by its hash id and all hash ids before it."""
    count = request.input_tokens // 512  # a hash id stands for 512 tokens
    return [request.hash_ids[: i + 1] for i in range(count)]


def num_found(blocks: list[Block], held: Container[Block]) -> int:
    """Return the number of leading blocks that a cache holds."""
    return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))


def queue_hits(prompts: list[list[Block]], capacity: int, *, refresh: bool) -> int:
    """Return the number of hits of an LRU cache. If `refresh` is False, simulate a FIFO cache instead.

    Blocks are evicted from the start of a queue. A request appends its last block first, so that a block is never
    evicted before its successors in a prompt. FIFO leaves the blocks of a request in place if all of them are in the
    cache. A request with more blocks than the capacity changes nothing.
    """
    held: dict[Block, None] = {}
    hits = 0
    for blocks in prompts:
        found = num_found(blocks, held)
        hits += found
        if len(blocks) > capacity or (found == len(blocks) and not refresh):
            continue
        for block in reversed(blocks):
            held.pop(block, None)
            held[block] = None
        for block in list(held)[: max(0, len(held) - capacity)]:
            del held[block]
    return hits


def optimum_hits(prompts: list[list[Block]], capacity: int) -> int:
    """Return the number of hits of an optimal cache (Belady with bypass).

    The cache keeps only blocks that are used again. To make room for the blocks of a request, it evicts the other
    blocks whose next uses are furthest in the future. It stores no new block of a request with more blocks than the
    capacity.
    """
    uses: dict[Block, list[int]] = {}
    time = 0
    for blocks in prompts:
        for block in blocks:
            uses.setdefault(block, []).append(time)
            time += 1
    held: set[Block] = set()
    hits = 0
    for blocks in prompts:
        hits += num_found(blocks, held)
        for block in blocks:
            uses[block].pop(0)
        own = set(blocks)
        fits = len(blocks) <= capacity
        others = sorted(held - own, key=lambda block: uses[block][0])
        room = capacity - len(own if fits else held & own)
        kept = {block for block in (own if fits else held & own) if uses[block]}
        held = kept | set(others[:room])
    return hits


def main() -> None:
    requests = list(generate(SPEC))
    write_trace(requests, FOLDER / "trace.jsonl")
    prompts = [full_blocks(request) for request in requests]
    hits = {
        "lru": [queue_hits(prompts, capacity, refresh=True) for capacity in CAPACITIES],
        "fifo": [queue_hits(prompts, capacity, refresh=False) for capacity in CAPACITIES],
        "optimum": [optimum_hits(prompts, capacity) for capacity in CAPACITIES],
    }
    lines = {"num_blocks": sum(map(len, prompts)), "capacities": CAPACITIES, "hits": hits}
    (FOLDER / "hits.json").write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
