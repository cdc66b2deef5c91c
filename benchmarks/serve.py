"""Conversations on the CPU: what each tier does to the time to the first token, and to throughput.

python -m benchmarks.serve                       SmolLM2-135M in float32; 30 minutes on 2 cores
python -m benchmarks.serve --quick               a trial: fewer, shorter conversations

16 users talk at once over a shared system prompt of 1,000 tokens: 8 turns of 150 tokens in and 24 out. A user sends the
next turn when the answer to the last is there, so that the others' turns come in between; the device has room for a
quarter of all their blocks, so each conversation is evicted between its turns. The same requests, the same pool:

    cache off       every prompt is computed from its first token
    device          prefixes are found on the device
    + host          and in host memory, which has room for everything
    + disk          host memory has room for a quarter, too; the rest is in files (kvtier.storage.DiskStore)
    transformers    the same weights in float32, one request after the other as they come: a prompt is computed whole,
                    24 tokens are decoded with a DynamicCache of their own, which then is thrown away

TTFT is from sending to the first token, waiting for a place included; "in service" is the part of it after the wait.
Whoever recomputes has no memory, so cache off and transformers could answer every n-th request only (`--every n`): each
user every n-th of his turns, all lengths alike. That is faster, and kinder to them: with two turns a user, as in the
rows of 32 requests (n = 4), the queue is full for a moment only.
"""

from __future__ import annotations

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
from benchmarks.report import Bar, arguments, at_least, print_table, report
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams, load_model
from kvtier.scheduler import SchedulerConfig
from kvtier.storage import DiskStore

BLOCK_TOKENS = 16
STEP_TOKENS = 512  # what others who generate wait for at most while a prompt is computed: 0.7 s here


@dataclass(frozen=True)
class Load:
    """What the users do."""

    system_tokens: int = 1000
    users: int = 16
    turns: int = 8
    tokens_in: int = 150
    tokens_out: int = 24

    @property
    def num_blocks(self) -> int:
        """Blocks of everything that is ever said."""
        shared = self.system_tokens // BLOCK_TOKENS
        return shared + self.users * (self.num_user_blocks - shared)

    @property
    def num_user_blocks(self) -> int:
        """Blocks of one conversation at its end."""
        return -(-(self.system_tokens + self.turns * (self.tokens_in + self.tokens_out)) // BLOCK_TOKENS)


QUICK = Load(system_tokens=300, users=6, turns=3)


@dataclass(frozen=True)
class Turn:
    """One request, in seconds from the beginning; `cached` says how many tokens came from which tier."""

    number: int
    sent: float
    first_token: float
    done: float
    waited: float
    prompt_tokens: int
    cached: dict[str, int]

    @property
    def ttft(self) -> float:
        """What the user waits before something appears."""
        return self.first_token - self.sent


class Users:
    """Their side of the conversations: what they send, given what they were answered."""

    def __init__(self, load: Load, every: int = 1, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        system = random.integers(100, 40_000, load.system_tokens).tolist()
        self._said = [list(system) for _ in range(load.users)]
        self._messages = random.integers(100, 40_000, (load.users, load.turns, load.tokens_in))
        self._answers = random.integers(100, 40_000, (load.users, load.turns, load.tokens_out))
        self._turns = [iter(self._played(user, every, load.turns)) for user in range(load.users)]

    def _played(self, user: int, every: int, turns: int) -> Iterator[tuple[int, list[int]]]:
        """(number of the turn, its whole prompt); turns that are not played were answered with anything."""
        said = self._said[user]
        for turn in range(turns):
            said += self._messages[user, turn].tolist()
            if (turn + user) % every == 0:
                yield turn, list(said)
            else:
                said += self._answers[user, turn].tolist()

    def next(self, user: int, answer: list[int]) -> tuple[int, list[int]] | None:
        """What he sends after this answer; None when he has said everything."""
        self._said[user] += answer
        return next(self._turns[user], None)


def main() -> None:
    """Serve with each cache, print, keep."""
    parser = arguments("Conversations with each tier, beside transformers.")
    parser.add_argument("--quick", action="store_true", help="a trial")
    parser.add_argument("--every", type=int, default=1, help="recompute every n-th request only")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk of + disk")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load, every = (QUICK, 2) if options.quick else (Load(), options.every)
    model = load_model()
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


def caches(load: Load) -> dict[str, CacheConfig]:
    """The device has a quarter of all blocks, in every case."""
    quarter, everything = max(load.num_blocks // 4, load.num_user_blocks), load.num_blocks + 64
    return {
        "cache off": CacheConfig(quarter, prefix_caching=False),
        "device": CacheConfig(quarter),
        "+ host": CacheConfig(quarter, host=HostConfig(everything)),
        "+ disk": CacheConfig(quarter, host=HostConfig(quarter), stores=(StoreConfig("disk"),)),
    }


def ours(model: Model, load: Load, cache: CacheConfig, folder: Path, every: int) -> list[Turn]:
    """All turns, served by an engine of its own that has served one short prompt before."""
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
    """Everybody sends; each answer that is complete lets its user send again."""
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
                told = engine.explain(output.request_id)
                times = (at, first.pop(user), now, told.waited_seconds or 0.0)
                turns.append(Turn(number, *times, told.num_prompt_tokens, told.tokens_from))
                send(user)
    return turns


@torch.inference_mode()
def theirs(peer: Any, load: Load, every: int) -> list[Turn]:
    """One request after the other, in the order they come."""
    users, turns = Users(load, every), []
    generate(peer, list(range(100, 140)), 4)  # as ours: warm
    begin = time.perf_counter()
    waiting = deque((user, turn, 0.0) for user in range(load.users) if (turn := users.next(user, [])) is not None)
    while waiting:
        user, (number, prompt), at = waiting.popleft()
        start = time.perf_counter() - begin
        first: list[float] = []
        answer = generate(peer, prompt, load.tokens_out, lambda f=first: f.append(time.perf_counter() - begin))  # type: ignore[misc]
        done = time.perf_counter() - begin
        turns.append(Turn(number, at, first[0], done, start - at, len(prompt), {}))
        turn = users.next(user, answer)
        if turn is not None:
            waiting.append((user, turn, done))
    return turns


def generate(peer: Any, prompt: list[int], count: int, tell: Callable[[], object] = lambda: None) -> list[int]:
    """So many tokens, the best each time; `tell` is called after the first."""
    out = peer(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    answer = [int(out.logits[0, -1].argmax())]
    tell()
    while len(answer) < count:
        out = peer(torch.tensor([answer[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        answer.append(int(out.logits[0, -1].argmax()))
    return answer


def summary(name: str, turns: list[Turn], load: Load) -> dict[str, object]:
    """A column of the comparison, as a row."""
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
    """Host hits beside the same turns recomputed; throughput with the host tier beside the device alone."""
    rate = {str(row["cache"]): float(str(row["tok/s out"])) for row in rows}
    held = []
    for tier, name in (("host", "+ host"), ("disk", "+ disk")):
        hits = [turn.ttft for turn in played[name] if turn.cached.get(tier, 0)]
        again = [turn.ttft for turn in played["cache off"] if turn.number]  # nothing is in a lower tier at first
        times = float(np.median(again) / np.median(hits)) if hits else 0.0
        held.append(at_least(f"TTFT p50, recomputed over {tier} hits", times, 5 if tier == "host" else 1))
    held.append(at_least("throughput, + host over device only", rate["+ host"] / rate["device"], 1.5))
    return held


if __name__ == "__main__":
    main()
