"""Conversations on the CPU: the effect of each tier on time to first token and throughput.

python -m benchmarks.serve                       SmolLM2-135M in float32; 30 minutes on 2 cores
python -m benchmarks.serve --quick               fewer, shorter conversations
python -m benchmarks.serve --rules               LRU with an inclusive host tier against learned with an exclusive one

16 users share a system prompt of 1,000 tokens. Each has 8 turns of 150 prompt tokens and 24 answer tokens. A user sends
the next turn when the answer to the last turn is complete, so that turns of other users come in between. The device
holds a quarter of all blocks, so each conversation is evicted between its turns. The same requests run with:

    cache off       every prompt is computed from its first token
    device          prefixes are found on the device
    + host          and in host memory, which holds everything
    + disk          host memory holds a quarter as well; the rest is on disk (kvtier.storage.DiskStore)
    transformers    the same weights in float32, one request after the other: a prompt is computed whole, and 24 tokens
                    are decoded with a DynamicCache that is then discarded

TTFT is the time from sending to the first token, including the time in the queue. "in service" is the part after the
queue. "cache off" and "transformers" keep no KV, so they can run only every n-th turn of each user (`--every n`). This
is faster and favours them: with two turns per user (n = 4, 32 requests), the queue is short.

With `--rules`, device and host have half of the blocks of "+ host", so that some conversations leave both. The answers
of both rules must be identical.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_model import transformers_model
from benchmarks.report import Bar, arguments, at_least, at_most, print_table, report
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams, load_model
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore

BLOCK_TOKENS = 16
STEP_TOKENS = 512  # limits the delay of decoding requests during a prefill: 0.7 s here


@dataclass(frozen=True)
class Load:
    """The conversations: users, turns and lengths."""

    system_tokens: int = 1000
    users: int = 16
    turns: int = 8
    tokens_in: int = 150
    tokens_out: int = 24

    @property
    def num_blocks(self) -> int:
        """Blocks of all conversations."""
        shared = self.system_tokens // BLOCK_TOKENS
        return shared + self.users * (self.num_user_blocks - shared)

    @property
    def num_user_blocks(self) -> int:
        """Blocks of one complete conversation."""
        return -(-(self.system_tokens + self.turns * (self.tokens_in + self.tokens_out)) // BLOCK_TOKENS)


QUICK = Load(system_tokens=300, users=6, turns=3)


@dataclass(frozen=True)
class Turn:
    """One request: times in seconds from the start, cached tokens by tier, and the answer."""

    user: int

    number: int
    sent: float
    first_token: float
    done: float
    waited: float
    prompt_tokens: int
    cached: dict[str, int]
    answer: tuple[int, ...]

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.first_token - self.sent


class Users:
    """The users of the conversations: they send a turn after each answer."""

    def __init__(self, load: Load, every: int = 1, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        system = random.integers(100, 40_000, load.system_tokens).tolist()
        self._said = [list(system) for _ in range(load.users)]
        self._messages = random.integers(100, 40_000, (load.users, load.turns, load.tokens_in))
        self._answers = random.integers(100, 40_000, (load.users, load.turns, load.tokens_out))
        self._turns = [iter(self._played(user, every, load.turns)) for user in range(load.users)]

    def _played(self, user: int, every: int, turns: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of the turn, its whole prompt); turns that are skipped have arbitrary answers."""
        history = self._said[user]
        for turn in range(turns):
            history += self._messages[user, turn].tolist()
            if (turn + user) % every == 0:
                yield turn, list(history)
            else:
                history += self._answers[user, turn].tolist()

    def next(self, user: int, answer: list[int]) -> tuple[int, list[int]] | None:
        """Return the next prompt after this answer, or None at the end."""
        self._said[user] += answer
        return next(self._turns[user], None)


def main() -> None:
    parser = arguments("Conversations with each tier, compared with transformers.")
    parser.add_argument("--quick", action="store_true", help="a trial")
    parser.add_argument("--rules", action="store_true", help="compare the rules of eviction instead of the tiers")
    parser.add_argument("--turns", type=int, default=Load.turns, help="turns of each user")
    parser.add_argument("--every", type=int, default=1, help="recompute every n-th request only")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the disk tier")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load, every = (QUICK, 2) if options.quick else (Load(turns=options.turns), options.every)
    model = load_model()
    if options.rules:
        compare_rules(model, load, options)
        return
    folder = Path(tempfile.mkdtemp(prefix="kvtier-serve-", dir=options.folder))
    try:
        played = {name: ours(model, load, config, folder, every) for name, config in caches(load).items()}
    finally:
        shutil.rmtree(folder)
    played["transformers"] = theirs(transformers_model(model), load, every)
    rows = [summary(name, turns, load) for name, turns in played.items()]
    print_table(rows)
    for row in rows:
        row["threads"] = options.threads
    report("serve_quick" if options.quick else "serve", rows, bars(played, rows), options.results)


def compare_rules(model: Model, load: Load, options: argparse.Namespace) -> None:
    """Serve all turns with the old and with the new rules of eviction. Report throughput and answers."""
    played = {name: ours(model, load, config, options.folder, 1) for name, config in rules(load).items()}
    rows = [summary(name, turns, load) for name, turns in played.items()]
    print_table(rows)
    for row in rows:
        row |= {"threads": options.threads, "turns": load.turns}
    old, new = (float(str(row["tok/s out"])) for row in rows)
    answers = [{(turn.user, turn.number): turn.answer for turn in turns} for turns in played.values()]
    num_different = sum(answers[0][which] != answer for which, answer in answers[1].items())
    result = [
        at_least("throughput, learned + exclusive over lru + inclusive", new / old, 1.15),
        at_most("different answers", num_different, 0),
    ]
    report("serve_rules_quick" if options.quick else "serve_rules", rows, result, options.results)


def rules(load: Load) -> dict[str, CacheConfig]:
    """Return the cache of each rule, with half of the blocks that "+ host" has on the device and on the host."""
    default = caches(load)["+ host"]
    assert default.host is not None
    device, host = max(default.num_blocks // 2, load.num_user_blocks), default.host.num_blocks // 2
    return {
        "lru + inclusive": CacheConfig(device, host=HostConfig(host, "lru", exclusive=False)),
        "learned + exclusive": CacheConfig(device, policy="learned", host=HostConfig(host, "learned")),
    }


def caches(load: Load) -> dict[str, CacheConfig]:
    """Return the cache of each case. The device always holds a quarter of all blocks."""
    quarter, everything = max(load.num_blocks // 4, load.num_user_blocks), load.num_blocks + 64
    return {
        "cache off": CacheConfig(quarter, prefix_caching=False),
        "device": CacheConfig(quarter),
        "+ host": CacheConfig(quarter, host=HostConfig(everything)),
        "+ disk": CacheConfig(quarter, host=HostConfig(quarter), stores=(StoreConfig("disk"),)),
    }


def ours(model: Model, load: Load, cache: CacheConfig, folder: Path, every: int) -> list[Turn]:
    """Serve all turns with a new engine, after one short prompt to warm up."""
    config = EngineConfig(BLOCK_TOKENS, cache, SchedulerConfig(64, STEP_TOKENS))
    stores = {store.name: DiskStore(folder / store.name, 8 << 30) for store in cache.stores}
    engine = Engine(model, config=config, stores=stores)
    try:
        engine.add(list(range(100, 140)), SamplingParams(temperature=0.0, max_tokens=4))
        while engine.has_work():
            engine.step()
        return serve(engine, load, 1 if cache.prefix_caching else every)
    finally:
        engine.close()


def serve(engine: Engine, load: Load, every: int) -> list[Turn]:
    """Run all users; each sends the next turn after its answer."""
    users, params = Users(load, every), SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=load.tokens_out)
    begin, turns = time.perf_counter(), []
    sent: dict[int, tuple[int, float]] = {}
    first: dict[int, float] = {}
    answers: dict[int, list[int]] = {}

    def send(user: int) -> None:
        turn = users.next(user, answers.pop(user, []))
        if turn is not None:
            sent[user], answers[user] = (turn[0], time.perf_counter() - begin), []
            engine.add(turn[1], params, request_id=f"{user}/{turn[0]}")

    for user in range(load.users):
        send(user)
    while sent:
        outputs, now = engine.step(), time.perf_counter() - begin
        for output in outputs:
            assert not output.error, output
            user = int(output.request_id.split("/")[0])
            answers[user] += output.token_ids
            first.setdefault(user, now)
            if output.finish_reason is not None:
                number, at = sent.pop(user)
                explanation = engine.explain(output.request_id)
                times = (at, first.pop(user), now, explanation.waited_seconds or 0.0)
                answer = tuple(answers[user])
                turns.append(Turn(user, number, *times, explanation.num_prompt_tokens, explanation.tokens_from, answer))
                send(user)
    return turns


@torch.inference_mode()
def theirs(peer: Any, load: Load, every: int) -> list[Turn]:
    """Serve with transformers, one request after the other."""
    users, turns = Users(load, every), []
    generate(peer, list(range(100, 140)), 4)  # warm up, as ours
    begin = time.perf_counter()
    waiting = deque((user, turn, 0.0) for user in range(load.users) if (turn := users.next(user, [])) is not None)
    while waiting:
        user, (number, prompt), at = waiting.popleft()
        start = time.perf_counter() - begin
        first: list[float] = []
        answer = generate(peer, prompt, load.tokens_out, lambda f=first: f.append(time.perf_counter() - begin))  # type: ignore[misc]
        done = time.perf_counter() - begin
        turns.append(Turn(user, number, at, first[0], done, start - at, len(prompt), {}, tuple(answer)))
        turn = users.next(user, answer)
        if turn is not None:
            waiting.append((user, turn, done))
    return turns


def generate(peer: Any, prompt: list[int], count: int, on_first: Callable[[], object] = lambda: None) -> list[int]:
    """Generate `count` greedy tokens; call `on_first` after the first."""
    out = peer(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    answer = [int(out.logits[0, -1].argmax())]
    on_first()
    while len(answer) < count:
        out = peer(torch.tensor([answer[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        answer.append(int(out.logits[0, -1].argmax()))
    return answer


def summary(name: str, turns: list[Turn], load: Load) -> dict[str, object]:
    """Return the row of one case."""
    seconds = max(turn.done for turn in turns)
    ttfts = [turn.ttft for turn in turns]
    prompts = sum(turn.prompt_tokens for turn in turns)
    tiers = ("device", "host", "disk")
    found = {tier: sum(turn.cached.get(tier, 0) for turn in turns) / prompts for tier in tiers}
    row: dict[str, object] = {"cache": name, "requests": len(turns), "seconds": seconds}
    row |= {"TTFT p50 s": float(np.median(ttfts)), "p99 s": float(np.quantile(ttfts, 0.99))}
    row |= {"in service p50 s": float(np.median([turn.ttft - turn.waited for turn in turns]))}
    row |= {"tok/s out": len(turns) * load.tokens_out / seconds, "requests/s": len(turns) / seconds}
    return row | {f"% from {tier}": round(100 * share, 1) for tier, share in found.items()}


def bars(played: dict[str, list[Turn]], rows: list[dict[str, object]]) -> list[Bar]:
    """Compare host hits with the same turns recomputed, and the throughput with and without the host tier."""
    rate = {str(row["cache"]): float(str(row["tok/s out"])) for row in rows}
    result = []
    for tier, name in (("host", "+ host"), ("disk", "+ disk")):
        hits = [turn.ttft for turn in played[name] if turn.cached.get(tier, 0)]
        again = [turn.ttft for turn in played["cache off"] if turn.number]  # lower tiers are empty at first
        times = float(np.median(again) / np.median(hits)) if hits else 0.0
        result.append(at_least(f"TTFT p50, recomputed over {tier} hits", times, 5 if tier == "host" else 1))
    result.append(at_least("throughput, + host over device only", rate["+ host"] / rate["device"], 1.5))
    return result


if __name__ == "__main__":
    main()
