"""Failed copies, damaged memory and faulty stores. vLLM recomputes the blocks that cannot be loaded, and continues."""

from __future__ import annotations

import contextlib
import json

import pytest

import vllm_scenarios as scenarios
from store_proxy import Faults, Proxy
from vllm_support import VllmError, connector, prompt_of, reusable_tokens

FAULTY = {"module": "vllm_connectors", "name": "FaultyConnector"}
LOST = "vllm:kvtier_failed_blocks purpose=load"


@pytest.mark.vllm_ci
@pytest.mark.parametrize("every", [1, 3])
def test_failed_loads_are_recomputed(vllm, oracle, every):
    prompts = [prompt_of(number) for number in range(400, 406)]
    with vllm.start(connector(**FAULTY)) as engine:
        engine.ask(prompts)
        assert engine.reset()
        engine.run(scenarios.set_faults, fail_loads=every)
        assert engine.tokens(prompts) == oracle.tokens(prompts)
        engine.run(scenarios.check_idle)
        assert engine.run(scenarios.metric_after, LOST) > 0


def test_failed_saves_lead_to_misses(vllm, oracle):
    prompts = [prompt_of(number) for number in range(410, 414)]
    with vllm.start(connector(**FAULTY)) as engine:
        engine.run(scenarios.set_faults, fail_saves=1)
        engine.ask(prompts)
        assert engine.reset()
        engine.run(scenarios.set_faults, fail_saves=0)
        answers = engine.ask(prompts)
        engine.run(scenarios.check_idle)
        assert engine.reset()
        again = engine.ask(prompts)
    assert [answer.num_cached for answer in answers] == [0] * 4
    assert [answer.num_cached for answer in again] == [reusable_tokens(300)] * 4
    assert [answer.tokens for answer in answers + again] == oracle.tokens(prompts + prompts)


def test_failed_load_of_only_request_is_recomputed(vllm, oracle):
    """vLLM must resume the request by itself, because no other request arrives that would start a step."""
    prompt = prompt_of(420)
    faults = json.dumps({"fail_loads": 1})
    with vllm.start(connector(**FAULTY), executor="mp", KVTIER_FAULTS=faults) as engine:
        engine.ask([prompt])
        assert engine.reset()
        assert engine.tokens([prompt]) == oracle.tokens([prompt])
        engine.ask([[3]])  # another step: vLLM sends statistics only in a step, at most once per second
        assert engine.run(scenarios.metric_after, LOST) > 0


def test_fail_policy_ends_only_requests_with_lost_blocks(vllm, oracle):
    prompts = [prompt_of(number) for number in range(430, 434)]
    settings = connector(**FAULTY, load_failure_policy="fail", allow_fail_policy=True)
    with vllm.start(settings, num_gpu_blocks_override=64) as engine:
        engine.ask(prompts)
        assert engine.reset()
        engine.run(scenarios.set_faults, fail_loads=2)
        answers = engine.ask(prompts)
        engine.run(scenarios.check_idle)
    assert [answer.finish for answer in answers] == ["length", "error", "length", "error"]
    expected = oracle.tokens(prompts)
    assert [answer.tokens for answer in answers[::2]] == expected[::2]


def test_fail_policy_is_refused_at_start(vllm):
    settings = connector(load_failure_policy="fail")
    with pytest.raises(VllmError, match='"kv_load_failure_policy": "recompute"'), vllm.start(settings):
        pass


@pytest.mark.parametrize("found_by", ["scrubber", "verify_loads"])
def test_changed_host_memory_is_never_used(vllm, oracle, found_by):
    prompts = [prompt_of(number) for number in range(440, 443)]
    with vllm.start(connector(verify_loads=found_by == "verify_loads")) as engine:
        engine.ask(prompts)
        assert engine.reset()
        assert engine.run(scenarios.damage_host_memory, waits_for_scrubber=found_by == "scrubber") >= 3 * 9
        assert engine.tokens(prompts) == oracle.tokens(prompts)
        engine.run(scenarios.check_idle)


class RedisEngine:
    """An engine whose Redis store is behind a proxy. Redis contains the blocks of the prompts.

    After `forget`, host memory is empty, so the engine must read from Redis.
    """

    def __init__(self, engine, proxy, client, prompts):
        self.engine, self.proxy, self.client, self.prompts = engine, proxy, client, prompts

    def forget(self):
        self.engine.run(scenarios.settle_stores)
        assert self.engine.reset(connector=True)


@contextlib.contextmanager
def redis_engine(vllm, redis_port, prefix, timeout, **store):
    redis = pytest.importorskip("redis")
    prompts = [prompt_of(number) for number in range(450, 454)]
    with contextlib.closing(Proxy(redis_port)) as proxy, contextlib.closing(redis.Redis(port=redis_port)) as client:
        url = f"redis://127.0.0.1:{proxy.port}/0?prefix={prefix}:&timeout={timeout}&retries=0"
        with vllm.start(connector(stores=[{"url": url, **store}])) as engine:
            engine.ask(prompts)
            yield RedisEngine(engine, proxy, client, prompts)


@pytest.fixture(scope="module")
def stored(vllm, redis_port):
    """Yield an engine whose store calls time out after 1 s, so that tests with a hanging server are short."""
    with redis_engine(vllm, redis_port, "faults", "1s", wait="deadline", wait_seconds=2.0) as engine:
        yield engine


@pytest.fixture(scope="module")
def intact(vllm, redis_port):
    """Yield an engine whose store calls time out after 300 s, so that none times out if the CPU is busy."""
    with redis_engine(vllm, redis_port, "intact", "300s", wait="wait") as engine:
        yield engine


@pytest.mark.parametrize(
    "faults",
    [
        Faults(hangs=True),
        Faults(refuses=1000),
        Faults(cut_at=70_000),
        Faults(hangs_at=70_000),
        Faults(flips=tuple(range(80_000, 4_000_000, 100_003))),
        Faults(delay_s=0.05),
    ],
    ids=lambda faults: ",".join(f"{name}" for name, value in vars(faults).items() if value),
)
def test_faulty_server_changes_no_token(stored, oracle, faults):
    stored.forget()
    stored.proxy.set(faults)
    if faults.refuses:
        stored.proxy.drop()
    try:
        assert stored.engine.tokens(stored.prompts) == oracle.tokens(stored.prompts)
    finally:
        stored.proxy.set(Faults())


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_stored_object_is_a_miss(intact, oracle, damage):
    intact.engine.ask(intact.prompts)
    intact.forget()
    keys = sorted(intact.client.scan_iter("intact:*"))
    assert len(keys) >= 4 * 9
    for key in keys[::3]:
        value = bytearray(intact.client.get(key))
        value[len(value) // 2] ^= 4
        if damage == "remove":
            intact.client.delete(key)
        else:
            intact.client.set(key, bytes(value) if damage == "flip" else bytes(value[:-1000]))
    answers = intact.engine.ask(intact.prompts)
    assert [answer.tokens for answer in answers] == oracle.tokens(intact.prompts)
    assert sum(answer.num_cached for answer in answers) < 4 * reusable_tokens(300)
    intact.forget()
    intact.engine.ask(intact.prompts)
    intact.forget()
    assert [answer.num_cached for answer in intact.engine.ask(intact.prompts)] == [reusable_tokens(300)] * 4


def test_unreachable_store_fails_no_request(stored, oracle):
    stored.forget()
    stored.proxy.drop()
    stored.proxy.set(Faults(refuses=1 << 30))
    fresh = [prompt_of(number) for number in range(460, 463)]
    try:
        assert stored.engine.tokens(fresh + stored.prompts) == oracle.tokens(fresh + stored.prompts)
    finally:
        stored.proxy.set(Faults())
