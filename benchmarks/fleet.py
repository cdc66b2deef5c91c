"""A fleet on Ray Serve: routing by cost and tier against Serve's own routers, with real engines on this machine.

    make ray
    PYTHONPATH=src:. .venv-ray/bin/python -m benchmarks.fleet           SmolLM2-135M, about 5 minutes on 2 cores
    PYTHONPATH=src:. .venv-ray/bin/python -m benchmarks.fleet --quick   fewer users and turns

There are three replicas with one thread each, and 24 users with four turns each. Each group of four users shares a
system prompt. All users start together, and send the next turn as soon as the answer to the last turn is complete. The
device cache of a replica holds the conversations of a third of the users. Each router starts with new replicas:

    serve       power of two choices, Serve's default
    affinity    PrefixCacheAffinityRouter of Ray, on block hashes in place of text
    kvtier      KvtierRouter
    kvtier, 3   the same with three times the charge for a second copy of a block (RouterConfig.duplicate_cost)

TTFT is the time from sending a request to its first token, including the time in the queue. The next columns are its
mean parts: from the client to the engine's scheduler, which includes the rest of the step that the engine runs; from
there to the first step with the prompt; from there to the first token. "computed" is the number of prompt tokens that
were not cached. The last columns are the highest number of computed tokens of a replica divided by the mean of all
replicas, and the number of failed requests.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import openai
import ray
from ray import serve

from benchmarks.report import Bar, arguments, at_least, at_most, print_table, report
from kvtier.engine.tokenizer import load_tokenizer
from kvtier.integrations.ray import RayConfig, fleet_app
from kvtier.integrations.ray.config import OWN_ROUTER
from kvtier.server.config import EngineOptions, Limits, ServerConfig, TierOptions
from kvtier.server.messages import decode_message

NUM_REPLICAS = 3
BLOCK_TOKENS = 16
PORT = 8765
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
ROUTERS = {
    "serve": "ray.serve._private.request_router.pow_2_router:PowerOfTwoChoicesRequestRouter",
    "affinity": "benchmarks.fleet_affinity:BlockAffinityRouter",
    "kvtier": OWN_ROUTER,
    "kvtier, 3": OWN_ROUTER,
}
DUPLICATE_COSTS = {"kvtier, 3": 3.0}


@dataclass(frozen=True)
class Load:
    """The conversations: users, turns, and lengths in words, which are 1.0 tokens each."""

    users: int = 24
    per_prompt: int = 4
    turns: int = 4
    system_words: int = 256
    turn_words: int = 128
    answer_tokens: int = 16

    def texts(self) -> list[list[str]]:
        """Return for each user the system prompt and the texts of the turns."""
        draw, words = random.Random(3), WORDS.split()

        def text(num_words: int) -> str:
            return " ".join(draw.choices(words, k=num_words))

        prompts = [text(self.system_words) for _ in range(-(-self.users // self.per_prompt))]
        return [
            [prompts[user // self.per_prompt], *(text(self.turn_words) for _ in range(self.turns))]
            for user in range(self.users)
        ]


@dataclass
class Answer:
    id: str
    ttft: float
    tokens: int
    text: str


async def turn(client: openai.AsyncOpenAI, messages: list[dict[str, str]], load: Load) -> Answer:
    started, first, name, text, tokens = time.perf_counter(), 0.0, "", "", 0
    stream = await client.chat.completions.create(
        model="smollm2",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=load.answer_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for event in stream:
        name = event.id
        if event.choices and event.choices[0].delta.content:
            first = first or time.perf_counter() - started
            text += event.choices[0].delta.content
        if event.usage is not None:
            tokens = event.usage.completion_tokens
    return Answer(name, first or time.perf_counter() - started, tokens, text)


async def converse(client: openai.AsyncOpenAI, texts: list[str], load: Load) -> list[Answer | None]:
    """Run the turns of one user. A turn that fails is None, and ends the conversation."""
    messages = [{"role": "system", "content": texts[0]}]
    answers: list[Answer | None] = []
    for text in texts[1:]:
        messages.append({"role": "user", "content": text})
        try:
            answer = await turn(client, messages, load)
        except openai.OpenAIError:
            answers.append(None)
            break
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
    return answers


async def run_load(load: Load) -> tuple[list[Answer], int, float]:
    """Return the answers, the number of failed requests, and the seconds of the whole load."""
    url = f"http://127.0.0.1:{PORT}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="no key", max_retries=0, timeout=600) as client:
        hello = [{"role": "user", "content": "hello"}]
        await asyncio.gather(*(turn(client, hello, load) for _ in range(2 * NUM_REPLICAS)))  # opens connections
        began = time.perf_counter()
        groups = await asyncio.gather(*(converse(client, texts, load) for texts in load.texts()))
        seconds = time.perf_counter() - began
    answers = [answer for group in groups for answer in group if answer is not None]
    return answers, sum(answer is None for group in groups for answer in group), seconds


def blocks_per_user(load: Load) -> int:
    tokenizer = load_tokenizer("smollm2")
    texts = load.texts()[0]
    messages = [{"role": "system", "content": texts[0]}]
    for text in texts[1:]:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
    return -(-(len(tokenizer.encode_chat(messages)) + load.turns * load.answer_tokens) // BLOCK_TOKENS)


def measure(name: str, load: Load) -> dict[str, object]:
    """Deploy the fleet with one router, run the load, and return the row."""
    blocks = blocks_per_user(load) * load.users // NUM_REPLICAS
    tiers = TierOptions(BLOCK_TOKENS, blocks)
    engine = EngineOptions("smollm2", tiers=tiers, threads=1, max_rows=8)
    server = ServerConfig(engine, Limits(prepare_processes=1), names=("smollm2",))
    config = RayConfig(
        server,
        "ray",
        NUM_REPLICAS,
        replica_cpus=0.5,
        request_router=ROUTERS[name],
        duplicate_cost=DUPLICATE_COSTS.get(name, 1.0),
    )
    serve.run(fleet_app(config), name="kvtier")
    engines = serve.get_deployment_handle("engine", "kvtier")
    while len(engines.broadcast("info").results()) < NUM_REPLICAS:
        time.sleep(0.5)
    before = computed(engines)
    answers, num_failed, seconds = asyncio.run(run_load(load))
    each = [after - earlier for after, earlier in zip(computed(engines), before, strict=True)]
    parts = ttft_parts(engines, answers)
    serve.delete("kvtier")
    ttfts = sorted(answer.ttft for answer in answers)
    return {
        "router": name,
        "users": load.users,
        "output tokens/s": round(sum(answer.tokens for answer in answers) / seconds, 2),
        "TTFT p50, s": round(statistics.median(ttfts), 3),
        "TTFT p95, s": round(ttfts[int(0.95 * (len(ttfts) - 1))], 3),
        **parts,
        "seconds": round(seconds, 1),
        "computed": sum(each),
        "max/mean": round(max(each) / (sum(each) / len(each)), 3),
        "failed": num_failed,
    }


def computed(engines: Any) -> list[int]:
    """Return the prompt tokens that each replica had to compute, in a fixed order."""
    replies = engines.broadcast("call", "snapshot", {}).results()
    names = engines.broadcast("info").results()  # in the same order, that of the replicas in the router
    missed = [decode_message(reply).value["hits"]["missed_tokens"] for reply in replies]
    return [count for _, count in sorted(zip((info["replica"] for info in names), missed, strict=True))]


def ttft_parts(engines: Any, answers: list[Answer]) -> dict[str, float]:
    """Return the mean parts of the TTFT, from the explanations of the engines."""
    before, queued, computing = [], [], []
    for answer in answers:
        replies = engines.broadcast("call", "explain", {"request_id": answer.id}).results()
        # All replicas but one answer with an error, because they do not know the request.
        (known,) = (reply for reply in map(decode_message, replies) if reply.error is None)
        waited, ttft = known.value["waited_seconds"], known.value["ttft_seconds"]
        before.append(answer.ttft - ttft)
        queued.append(waited)
        computing.append(ttft - waited)
    parts = {"to the engine, s": before, "queue, s": queued, "prompt, s": computing}
    return {name: round(statistics.mean(seconds), 3) for name, seconds in parts.items()}


def bars_of(rows: dict[str, dict[str, Any]]) -> list[Bar]:
    own, default, affinity = rows["kvtier"], rows["serve"], rows.get("affinity")
    rate, ttft = "output tokens/s", "TTFT p50, s"
    bars = [
        at_least("throughput over Serve's default router", own[rate] / default[rate], 1.4),
        at_most("TTFT p50 over Serve's default router", own[ttft] / default[ttft], 0.6),
        at_most("computed tokens per replica, max over mean", own["max/mean"], 1.3),
        at_most("failed requests", own["failed"], 0),
    ]
    if affinity is not None:
        bars.append(at_least("throughput over Ray's prefix-affinity router", own[rate] / affinity[rate], 1.0))
    return bars


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="12 users with three turns")
    parser.add_argument("--routers", nargs="+", default=list(ROUTERS), choices=ROUTERS, help="routers in this order")
    options = parser.parse_args()
    load = Load(users=12, turns=3) if options.quick else Load()
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        _node_ip_address="127.0.0.2",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    try:
        rows = {name: measure(name, load) for name in options.routers}
    finally:
        serve.shutdown()
        ray.shutdown()
    print_table([*rows.values()])
    bars = bars_of(rows) if {"serve", "kvtier"} <= rows.keys() else []
    report("fleet", [*rows.values()], bars, options.results)


if __name__ == "__main__":
    main()
