"""A WorkerPool with real processes: deadlines, killed processes, cancellation, fairness and closing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import replace

import psutil
import pytest

from kvtier.engine.schemas import Grammar
from kvtier.engine.tokenizer import load_tokenizer
from kvtier.server import schema_cache
from kvtier.server.errors import ApiError
from kvtier.server.messages import Call
from kvtier.server.prepare import Preparation, PrepareConfig
from kvtier.server.protocol import CompletionRequest
from kvtier.server.schema_cache import SchemaChecks
from kvtier.server.worker_pool import WorkerPool, _Process

pytest.importorskip("llguidance")
PATTERNS = [{"type": "string", "pattern": f"^(.*a.{{{i}}}b.*)$"} for i in range(1, 31)]
ENDLESS = {"schema": Grammar("json", json.dumps({"allOf": PATTERNS}))}
VALID = {"schema": Grammar("json", '{"type": "object"}')}
WAIT = 120.0  # seconds; an idle machine needs far less


def body(prompt="hello", max_tokens=2048):
    data = json.dumps({"model": "tiny", "prompt": prompt}).encode()
    return {"model": CompletionRequest, "data": data, "max_tokens": max_tokens}


@pytest.fixture(scope="module")
def model(tiny_model):
    return config_of(tiny_model)


def config_of(folder):
    return PrepareConfig(str(folder), ("tiny",), vocab_size=259, eos_token_ids=(257,), max_answers=16, seconds=WAIT)


@asynccontextmanager
async def pool_of(model, size=1, seconds=WAIT, *, has_tenants=True):
    pool = WorkerPool(replace(model, seconds=seconds), size, has_tenants=has_tenants)
    try:
        yield pool
    finally:
        await pool.close()


async def wait_until(condition):
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def api_error(awaitable):
    with pytest.raises(ApiError) as caught:
        await awaitable
    return caught.value


def test_job_in_worker_returns_same_result_as_inline_job(model):
    inline = Preparation(model, load_tokenizer(model.source))

    async def main():
        async with pool_of(model) as pool:
            for job in (body(), body("<|im_end|> é" * 50), body([1, 2, 3]), body(["a", "b"])):
                assert await pool.run("prepare", "a", **job) == inline.prepare(**job)
            for job in (body(""), body("x" * 30_000), body([300]), body(["x"] * 17), body("x" * 2048)):
                error = await api_error(pool.run("prepare", "a", **job))
                with pytest.raises(ApiError) as caught:
                    inline.prepare(**job)
                assert error == caught.value

    asyncio.run(main())


def test_job_past_deadline_is_400_and_its_process_is_replaced(model):
    async def main():
        async with pool_of(model, seconds=2.0) as pool:
            pool.start()
            await wait_until(lambda: pool.pids)
            before = pool.pids
            error = await api_error(pool.run("check_schema", "a", **ENDLESS))
            assert (error.status, error.code) == (400, "too_complex")
            prepared = await pool.run("prepare", "a", **body())
            assert len(prepared.prompts[0]) == 5
            assert pool.pids != before
            await wait_until(lambda: not any(map(is_alive, before)))

    asyncio.run(main())


def test_timeout_of_compiler_load_is_503_and_not_cached(model, monkeypatch):
    call = _Process.call

    async def call_with_slow_load(process, message):
        if isinstance(message, Call) and message.name == "load_compiler":
            raise TimeoutError
        return await call(process, message)

    async def main():
        async with pool_of(model) as pool:
            checks = SchemaChecks(pool)
            with monkeypatch.context() as patch:
                patch.setattr(_Process, "call", call_with_slow_load)
                error = await api_error(checks.check(VALID["schema"], "a"))
            assert (error.status, error.code) == (503, "worker")
            assert "longer than 60 s" in error.message
            await checks.check(VALID["schema"], "a")

    asyncio.run(main())


def test_job_of_killed_process_is_retried_once(model):
    async def main():
        async with pool_of(model) as pool:
            job = asyncio.create_task(pool.run("check_schema", "a", **ENDLESS))
            killed = []
            for _ in range(2):
                await wait_until(lambda before=killed: pool.num_running and pool.pids != before)
                killed = pool.pids
                os.kill(killed[0], signal.SIGKILL)
            error = await api_error(job)
            assert (error.status, error.code) == (503, "worker")
            assert len((await pool.run("prepare", "a", **body())).prompts[0]) == 5

    asyncio.run(main())


def test_job_survives_the_death_of_all_idle_processes(model):
    async def main():
        async with pool_of(model, 2) as pool:
            for _ in range(2):
                pool.start()
            await asyncio.gather(*(pool.run("prepare", tenant, **body()) for tenant in "ab"))
            await wait_until(lambda: len(pool.pids) == 2)
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
            assert len((await pool.run("prepare", "a", **body())).prompts[0]) == 5

    asyncio.run(main())


def test_job_survives_the_death_of_a_starting_process(model):
    async def main():
        async with pool_of(model) as pool:
            job = asyncio.create_task(pool.run("prepare", "a", **body()))
            await wait_until(lambda: pool.pids)
            os.kill(pool.pids[0], signal.SIGKILL)
            assert len((await job).prompts[0]) == 5

    asyncio.run(main())


def test_cancelled_jobs_free_the_queue_and_the_process(model):
    async def main():
        async with pool_of(model) as pool:
            running = asyncio.create_task(pool.run("check_schema", "a", **ENDLESS))
            await wait_until(lambda: pool.num_running)
            waiting = asyncio.create_task(pool.run("check_schema", "a", **ENDLESS))
            await asyncio.sleep(0)
            for task in (waiting, running):
                task.cancel()
            await asyncio.gather(waiting, running, return_exceptions=True)
            await pool.run("check_schema", "a", **VALID)  # this call would time out if a cancelled job still ran

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_waiting_jobs_of_different_tenants_run_in_turn(model):
    order = []

    async def main():
        async with pool_of(model) as pool:

            async def run(tenant):
                await pool.run("prepare", tenant, **body())
                order.append(tenant)

            async with asyncio.TaskGroup() as group:
                for tenant in "aaaabbc":
                    group.create_task(run(tenant))

    asyncio.run(main())
    assert "".join(order) == "abcabaa"


@pytest.mark.parametrize("has_tenants", [True, False])
def test_endless_jobs_leave_one_process_for_other_jobs(model, has_tenants):
    async def main():
        async with pool_of(model, 2, has_tenants=has_tenants) as pool:
            hostile = [asyncio.create_task(pool.run("check_schema", "a", **ENDLESS)) for _ in range(5)]
            await wait_until(lambda: pool.num_running == 1)
            other = "b" if has_tenants else "a"
            for _ in range(3):
                assert len((await pool.run("prepare", other, **body())).prompts[0]) == 5
            assert pool.num_running == 1
            assert not any(task.done() for task in hostile)
            for task in hostile:
                task.cancel()
            await asyncio.gather(*hostile, return_exceptions=True)

    asyncio.run(main())


def test_too_many_waiting_jobs_of_a_tenant_are_429(model):
    async def main():
        async with pool_of(model) as pool:
            jobs = [asyncio.create_task(pool.run("prepare", "a", **body())) for _ in range(70)]
            other = asyncio.create_task(pool.run("prepare", "b", **body()))
            done = await asyncio.gather(*jobs, return_exceptions=True)
            refused = [each for each in done if isinstance(each, ApiError)]
            assert {(error.status, error.code) for error in refused} == {(429, "overloaded")}
            assert len(refused) == 6  # 64 calls of a tenant may wait
            await other

    asyncio.run(main())


def test_close_kills_a_hung_process_at_once(model):
    async def main():
        async with pool_of(model) as pool:
            jobs = [asyncio.create_task(pool.run("check_schema", "a", **ENDLESS)) for _ in range(2)]
            await wait_until(lambda: pool.num_running)
            (process,) = map(psutil.Process, pool.pids)
            await pool.close()
            assert {(await api_error(job)).status for job in jobs} == {503}
            assert (await api_error(pool.run("check_schema", "a", **VALID))).status == 503
            process.wait(WAIT)

    asyncio.run(main())


def test_process_that_cannot_start_fails_jobs_with_503(tmp_path):
    async def main():
        async with pool_of(config_of(tmp_path)) as pool:
            error = await api_error(pool.run("prepare", "a", **body()))
            assert (error.status, error.code) == (503, "worker")

    asyncio.run(main())


def test_schema_checks_share_work_and_cache_results(model):
    async def main():
        async with pool_of(model, seconds=30.0) as pool:
            checks = SchemaChecks(pool)
            wrong = Grammar("json", '{"type": "nonsense"}')
            errors = [await api_error(checks.check(wrong, "a")) for _ in range(2)]
            assert errors[0] == errors[1]
            assert errors[0] is not errors[1]  # a shared exception would collect the tracebacks of both requests
            await asyncio.gather(*(checks.check(VALID["schema"], "a") for _ in range(5)))
            waiting = [asyncio.create_task(checks.check(ENDLESS["schema"], "a")) for _ in range(3)]
            await wait_until(lambda: pool.num_running)
            for task in waiting[:2]:
                task.cancel()
            await asyncio.sleep(0)
            assert pool.num_running == 1  # the third caller still waits for the shared check
            waiting[2].cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await pool.close()
            await checks.check(VALID["schema"], "a")  # a cached result needs no process
            assert (await api_error(checks.check(wrong, "a"))) == errors[0]
            assert (await api_error(checks.check(VALID["schema"], "b"))).status == 503  # results are kept per tenant

    asyncio.run(main())


def test_end_of_failed_check_keeps_newer_result(monkeypatch):
    """A failed check starts a timer that removes its result. The timer must not remove the result of a newer check."""
    monkeypatch.setattr(schema_cache, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(schema_cache, "_MAX_CHECKS", 1)
    checked = []

    class Pool:
        async def run(self, _, __, *, schema):
            checked.append(schema)
            if len(checked) == 1:
                raise ApiError(400, "too slow", code="too_complex")

    async def main():
        checks, other = SchemaChecks(Pool()), Grammar("json", "{}")
        assert (await api_error(checks.check(VALID["schema"], "a"))).code == "too_complex"
        await checks.check(other, "a")
        await checks.check(VALID["schema"], "a")
        await asyncio.sleep(0.1)
        await checks.check(VALID["schema"], "a")
        assert checked == [VALID["schema"], other, VALID["schema"]]

    asyncio.run(main())
