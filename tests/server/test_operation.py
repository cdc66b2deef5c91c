"""Disconnects, an unresponsive engine, overload, API keys, tenants, quotas and priorities of a server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest

from server_support import ServerProcess
from support import stop_process

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
ODD_PATHS = (
    *("/%2e%2e/state", "//state", "/./state", "/v1/../state", "/health/../state", "http://x/state"),
    *("/state%00", "/%73tate", "/%ff", "/control%2Freset", "/STATE", "/state;x", "/state?x", "/state/", "/state#x"),
)
LONG = {"prompt": "tell me everything", "max_tokens": 1900, "ignore_eos": True, "stream": True}


def stream(server, body=None, key=""):
    """Open a stream. If the status is 200, read the first line. Return the client, the response and the other lines."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = httpx.Client(timeout=60, headers=headers)
    answer = client.send(
        client.build_request("POST", server.url + TEXT, json={"model": server.model, **(body or LONG)}), stream=True
    )
    lines = answer.iter_lines()
    if answer.status_code == 200:
        next(lines)
    return client, answer, lines


def drained(state):
    return (state["running"], state["waiting"], state["holds"], state["in_flight"]) == (0, 0, 0, 0)


# ---- disconnects ----


def test_disconnect_frees_the_blocks_of_the_request(server):
    server.wait_for(drained)
    client, answer, _ = stream(server)
    state = server.wait_for(lambda state: state["running"] == 1)
    assert state["tiers"][0]["num_pinned"] > 0
    answer.close()
    client.close()
    state = server.wait_for(drained)
    assert state["tiers"][0]["num_pinned"] == 0
    assert state["recent"][0]["finish"] == "disconnected"
    assert state["recent"][0]["new_tokens"] < 1900


def test_disconnect_before_first_token_cancels_the_request(server):
    for body in (LONG, {**LONG, "stream": False}):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json={"model": server.model, **body}, timeout=httpx.Timeout(30, read=0.001))
        server.wait_for(drained)


# The client may leave a socket open when a stream is closed. The garbage collector then warns at an arbitrary time.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_many_disconnects_free_all_blocks(server):
    before = server.state()

    async def one(client, number):
        created = await client.completions.create(
            model=server.model, prompt=f"{number} hello", max_tokens=200, stream=True
        )
        count = 0
        async for _ in created:
            count += 1
            if count > number % 20:
                await created.close()
                return

    async def all_of_them():
        async with server.async_client() as client:
            await asyncio.gather(*(one(client, number) for number in range(64)))

    asyncio.run(all_of_them())
    state = server.wait_for(drained)
    assert state["tiers"][0]["num_pinned"] == before["tiers"][0]["num_pinned"] == 0


def test_disconnects_leave_no_tasks(server):
    def num_tasks():
        lines = server.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("kvtier_tasks "))

    server.wait_for(drained)
    before = num_tasks()
    opened = [stream(server) for _ in range(20)]
    assert num_tasks() >= before + 20
    for client, answer, _ in opened:
        answer.close()
        client.close()
    wait_until(lambda: num_tasks() <= before)


def responses(server, status):
    """Return the number of responses from /v1/completions with this status."""
    prefix = f'kvtier_http_responses_total{{route="{TEXT}",status="{status}"}} '
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(prefix)]
    return float(lines[0].split()[-1]) if lines else 0.0


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {seconds} s"
        time.sleep(0.02)


def test_disconnect_before_the_response_is_counted_as_499(server):
    address, num_logged = urlsplit(server.url), len(server.log)
    num_errors = [responses(server, status) for status in (400, 500)]
    server.wait_for(drained)
    body = json.dumps({"model": server.model, **LONG, "stream": False}).encode()
    for sent in (body, body[:10]):  # disconnect while the engine computes, then while the body arrives
        before = responses(server, 499)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode())
            connection.sendall(b"Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
            connection.sendall(sent)
            if sent is body:
                server.wait_for(lambda state: state["running"] == 1)
        wait_until(lambda before=before: responses(server, 499) == before + 1)
    server.wait_for(drained)
    assert [responses(server, status) for status in (400, 500)] == num_errors
    assert '"error"' not in server.log[num_logged:]


# ---- an engine that does not reply ----


def test_stopped_engine_causes_503_and_is_killed_on_sigterm(start):
    server = start("--engine-reply-seconds", "0.5", "--drain-seconds", "1")
    assert server.get("/health").status_code == 200
    stop_process(engine := server.engine_pid)
    try:
        with ThreadPoolExecutor(3) as threads:
            answers = [*threads.map(server.get, ("/state", "/control/tiers", "/metrics"))]
        assert [answer.json()["error"]["code"] for answer in answers] == ["engine_unresponsive"] * 3
        assert {answer.status_code for answer in answers} == {503}
        assert server.get("/health").status_code == 503
        refused = server.post("/control/reset", {"clear_stores": False})
        assert refused.status_code == 503
        assert "0.5 s" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: server.get("/health").status_code == 200)
    assert server.state()["status"] == "ok"
    process = psutil.Process(engine)
    stop_process(engine)
    server.process.send_signal(signal.SIGTERM)
    # The server gives a responsive engine 60 s to save the cache. This engine is suspended, so it is killed earlier.
    assert server.process.wait(50) == 1
    process.wait(10)


@pytest.fixture(scope="module")
def narrow(tiny_model, tmp_path_factory):
    """Yield a server with one row in the batch and one place in the queue. Control calls time out after 0.5 s."""
    options = ("--model", str(tiny_model), "--threads", "1", "--max-rows", "1", "--max-waiting", "1")
    process = ServerProcess(tmp_path_factory.mktemp("narrow") / "log", *options, "--control-seconds", "0.5")
    yield process
    assert process.stop() == 0


def test_control_call_that_times_out_is_504(narrow):
    stop_process(engine := narrow.engine_pid)
    try:
        answer = narrow.get("/state")
    finally:
        os.kill(engine, signal.SIGCONT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    wait_until(lambda: narrow.get("/state").status_code == 200)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_server_at_once(start, number):
    server = start("--engine-reply-seconds", "600", "--drain-seconds", "600")
    client, answer, _ = stream(server)
    engine = psutil.Process(server.engine_pid)
    stop_process(engine.pid)  # without a second signal, the server would wait for the stream and the engine
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "another SIGTERM" in server.log)
    assert server.process.poll() is None
    server.process.send_signal(number)
    assert server.process.wait(30) == 128 + number
    engine.wait(30)
    answer.close()
    client.close()


HANGING = """
import asyncio, sys, threading
from kvtier.server import serve as server
from kvtier.server.config import EngineOptions, ServerConfig

server._THREAD_SECONDS = 0.5

def ready(address):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    print("ready", flush=True)

if __name__ == "__main__":
    sys.exit(server.serve(ServerConfig(EngineOptions(sys.argv[1], threads=1), port=0), ready=ready))
"""


def test_exit_does_not_wait_for_a_hanging_thread(tiny_model, tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    command = [sys.executable, str(tmp_path / "hanging.py"), str(tiny_model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


STOPPED = """
import os, signal, sys
from kvtier.server import serve as server
from kvtier.server.config import EngineOptions, ServerConfig, Tenant
from kvtier.server.engine_client import EngineClient

def load_tokenizer(model):  # called while the engine starts
    os.kill(os.getpid(), signal.SIGTERM)
    return tokenizer(model)

async def call(self, name, /, **arguments):
    if name == "set_quota":  # the engine is ready, but the server does not listen yet
        os.kill(os.getpid(), signal.SIGTERM)
    return await original(self, name, **arguments)

tokenizer, original = server.load_tokenizer, EngineClient.call
if sys.argv[2] == "starting":
    server.load_tokenizer = load_tokenizer
else:
    EngineClient.call = call

if __name__ == "__main__":
    tenant = Tenant("alice", "key-of-alice", device_blocks=4)
    config = ServerConfig(EngineOptions(sys.argv[1], threads=1), port=0, tenants=(tenant,))
    sys.exit(server.serve(config, ready=lambda address: print("ready", flush=True)))
"""


@pytest.mark.parametrize("phase", ["starting", "started"])
def test_sigterm_before_listening_exits_with_0(tiny_model, tmp_path, phase):
    (tmp_path / "stopped.py").write_text(STOPPED)
    command = [sys.executable, str(tmp_path / "stopped.py"), str(tiny_model), phase]
    result = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


# ---- overload ----


@pytest.fixture(scope="module")
def strict(tiny_model, tmp_path_factory):
    """Yield a server that has low limits and lacks llguidance."""
    limits = ("--max-rows", "1", "--max-waiting", "1", "--request-seconds", "3", "--body-seconds", "0.5")
    folder = tmp_path_factory.mktemp("strict")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['llguidance'] = None\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ("--model", str(tiny_model), "--threads", "1", *limits)
    process = ServerProcess(folder / "log", *options, env={"PYTHONPATH": path})
    yield process
    assert process.stop() == 0


def test_full_queue_is_429_with_retry_after(narrow):
    client, answer, _ = stream(narrow)
    stop_process(engine := narrow.engine_pid)  # otherwise, the first request could finish before the queue is full

    def ask(prompt):
        return narrow.client().completions.create(model=narrow.model, prompt=prompt, max_tokens=1)

    with ThreadPoolExecutor(2) as threads:
        try:
            futures = [threads.submit(ask, "me too"), threads.submit(ask, "and me")]
            (refused,), (waiting,) = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
            error = refused.exception()
            assert narrow.post(CHAT, {"model": narrow.model, "messages": MESSAGES, "n": 3}).status_code == 429
        finally:
            os.kill(engine, signal.SIGCONT)
            answer.close()
            client.close()
        assert waiting.result().usage.completion_tokens == 1
    assert isinstance(error, openai.RateLimitError)
    assert int(error.response.headers["retry-after"]) >= 1
    assert error.code == "overloaded"
    assert ask("me too").usage.completion_tokens == 1


def test_request_longer_than_request_seconds_times_out(strict):
    answers = []
    body = {"model": strict.model, **LONG, "stream": False}
    thread = threading.Thread(target=lambda: answers.append(strict.post(TEXT, body)))
    client, _, lines = stream(strict)
    stop_process(engine := strict.engine_pid)  # otherwise, the requests could finish before the timeout
    try:
        thread.start()  # this request waits in the queue until its timeout
        events = [line for line in lines if line]
        client.close()
        thread.join()
    finally:
        os.kill(engine, signal.SIGCONT)
    assert events[-1] == "data: [DONE]"
    assert '"timeout"' in events[-2]
    assert answers[0].status_code == 504
    assert answers[0].json()["error"]["code"] == "timeout"
    strict.wait_for(drained)


def test_schema_without_llguidance_is_400(strict):
    body = {"model": strict.model, "prompt": "x", "max_tokens": 1, "response_format": {"type": "json_object"}}
    answer = strict.post(TEXT, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "llguidance" in answer.json()["error"]["message"]
    assert strict.post(TEXT, {**body, "response_format": {"type": "text"}}).status_code == 200


def test_incomplete_body_is_408(strict):
    address = urlsplit(strict.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: 100\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_slow_body_is_408(strict):
    """The limit of 0.5 s is for the whole body. The bytes arrive 0.05 s apart, so the body would take 10 s."""
    address, response = urlsplit(strict.url), b""
    with socket.create_connection((address.hostname, address.port), timeout=0.05) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: 200\r\n\r\n")
        for _ in range(200):
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                response = connection.recv(1000)
                break
    assert response.startswith(b"HTTP/1.1 408 ")


# ---- keys and tenants ----

CONFIG = """
[serve]
max-waiting = 8

[[tenants]]
name = "acme"
key = "acme-secret-key"
max_requests = 1

[[tenants]]
name = "bits"
key = "bits-secret-key"
tokens_per_minute = 30

[[tenants]]
name = "hasty"
key = "hasty-secret-key"
max_requests = 1
tokens_per_minute = 30

[[tenants]]
name = "small"
key = "small-secret-key"
device_blocks = 12
host_blocks = 8

[[tenants]]
name = "root"
key = "root-secret-key"
admin = true
"""


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "kvtier.toml").write_text(CONFIG)
    arguments = ("--model", str(tiny_model), "--threads", "1", "--config", str(folder / "kvtier.toml"))
    process = ServerProcess(folder / "log", *arguments, "--host-blocks", "256", "--log-level", "debug")
    yield process
    assert process.stop() == 0


def test_request_without_valid_key_is_401(guarded):
    body = {"model": guarded.model, "messages": MESSAGES, "max_tokens": 1}
    for key in ("", "wrong", "acme-secret-ke", "acme-secret-key2"):
        for answer in (guarded.post(CHAT, body, key), guarded.get("/v1/models", key), guarded.get("/state", key)):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong").models.list()
    assert guarded.get("/health").status_code == 200
    assert guarded.post(CHAT, body, "acme-secret-key").status_code == 200


@pytest.mark.parametrize("path", ODD_PATHS)
def test_odd_path_spelling_does_not_bypass_the_key(guarded, path):
    address = urlsplit(guarded.url)
    for key, refused in (("", (401,)), ("acme-secret-key", (400, 403, 404))):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        with contextlib.closing(connection):
            connection.putrequest("GET", path)
            connection.putheader("Authorization", f"Bearer {key}")
            connection.endheaders()
            assert connection.getresponse().status in refused


def test_admin_paths_without_admin_key_are_403(guarded):
    for path in ("/state", "/metrics", "/control/explain/x"):
        assert guarded.get(path, "acme-secret-key").status_code == 403
        assert guarded.get(path, "root-secret-key").status_code in (200, 404)


def test_tenants_do_not_see_each_others_cache(guarded):
    def cached(key, **extra):
        body = {"model": guarded.model, "prompt": "shared secret " * 20, "max_tokens": 1, **extra}
        return guarded.post(TEXT, body, key).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("acme-secret-key") == 0
    assert cached("acme-secret-key") > 200
    assert cached("root-secret-key") == 0
    assert cached("root-secret-key", cache_salt="acme") == 0
    assert cached("root-secret-key", cache_salt="acme\0") == 0
    assert cached("acme-secret-key") > 200


def test_tenant_over_max_requests_is_429(guarded):
    client, answer, _ = stream(guarded, key="acme-secret-key")
    try:
        body = {"model": guarded.model, "prompt": "x", "max_tokens": 1}
        refused = guarded.post(TEXT, body, "acme-secret-key")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "tenant_requests"
        assert guarded.post(TEXT, body, "root-secret-key").status_code == 200
    finally:
        answer.close()
        client.close()
    guarded.wait_for(drained, key="root-secret-key")
    assert guarded.post(TEXT, body, "acme-secret-key").status_code == 200


def test_large_body_of_tokenize_counts_as_one_request(guarded):
    text = {"messages": MESSAGES, "chat_template_kwargs": {"note": "x" * 3000}}
    for path, body in (("/tokenize", text), ("/detokenize", {"tokens": [5] * 2000})):
        assert guarded.post(path, body, "acme-secret-key").status_code == 200


def test_two_authorization_headers_are_400(guarded):
    for keys in (("acme-secret-key", "root-secret-key"), ("root-secret-key", "root-secret-key")):
        headers = [("Authorization", f"Bearer {key}") for key in keys]
        answer = httpx.get(f"{guarded.url}/state", headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_header")


def test_tenant_over_tokens_per_minute_is_429(guarded):
    body = {"model": guarded.model, "prompt": "0123456789", "max_tokens": 25, "ignore_eos": True}
    assert guarded.post(TEXT, body, "bits-secret-key").status_code == 200
    refused = guarded.post(TEXT, body, "bits-secret-key")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "tenant_tokens"
    assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_disconnect_before_first_token_charges_the_prompt(guarded):
    body = {"model": guarded.model, "prompt": "x" * 500, "max_tokens": 1}

    async def ask(client):
        return await client.post(guarded.url + TEXT, json=body, headers={"Authorization": "Bearer hasty-secret-key"})

    async def leave():
        """Send two requests. Wait until one of them is rejected, and cancel the other. Return the rejection's code."""
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = [asyncio.ensure_future(ask(client)) for _ in range(2)]
            (refused,), (admitted,) = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            admitted.cancel()
            await asyncio.wait([admitted])
            return refused.result().json()["error"]["code"]

    stop_process(engine := guarded.engine_pid)  # so that no token is generated
    try:
        assert asyncio.run(leave()) == "tenant_requests"
        deadline = time.monotonic() + 30
        while (code := asyncio.run(error_code(ask))) == "tenant_requests":  # until the server detects the disconnect
            assert time.monotonic() < deadline
    finally:
        os.kill(engine, signal.SIGCONT)
    assert code == "tenant_tokens"


async def error_code(ask):
    async with httpx.AsyncClient(timeout=10) as client:
        return (await ask(client)).json()["error"]["code"]


def test_tenant_above_block_quota_evicts_own_blocks_only(guarded):
    def cached(key, prompt, **more):
        body = {"model": guarded.model, "prompt": prompt, "max_tokens": 1, **more}
        answer = guarded.post(TEXT, body, key)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    mine = [f"{letter * 8} mine " * 5 for letter in "abcdef"]  # each prompt has 70 tokens, which fill four blocks
    cached("root-secret-key", theirs := "theirs " * 20)
    for number, prompt in enumerate(mine):
        cached("small-secret-key", prompt, cache_salt=f"part {number % 2}")
    tiers = {tier["name"]: tier for tier in guarded.get("/control/tiers", "root-secret-key").json()["tiers"]}
    assert 0 < tiers["device"]["used_by"]["small"] <= 12
    assert 0 < tiers["host"]["used_by"]["small"] <= 8
    # More than half of the device blocks are free, so only the quota can have caused evictions.
    assert tiers["device"]["num_used"] < tiers["device"]["num_blocks"] // 2
    assert cached("small-secret-key", mine[5], cache_salt="part 1") == 64
    assert cached("small-secret-key", mine[0], cache_salt="part 0") == 0
    assert cached("root-secret-key", theirs) == 128


def test_prompt_that_fills_the_block_quota_is_400(guarded):
    # The prompt fills the 12 device blocks that the tenant may use, so there is no block for the answer.
    body = {"model": guarded.model, "prompt": "x" * 192, "max_tokens": 1}
    refused = guarded.post(TEXT, body, "small-secret-key")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "192" in refused.json()["error"]["message"]
    assert guarded.post(TEXT, body, "root-secret-key").status_code == 200


def test_serve_with_quota_for_a_missing_tier_fails(tiny_model, tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text('[[tenants]]\nname = "small"\nkey = "small-secret-key"\nhost_blocks = 8\n')
    done = kvtier("serve", "--model", str(tiny_model), "--port", "0", "--config", str(file))
    assert done.returncode == 1
    assert "no tier 'host' in memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_log_and_state_contain_no_text_and_no_key(guarded):
    marker = "xylophone-7431"
    answers = [
        guarded.post(
            TEXT, {"model": guarded.model, "prompt": marker, "max_tokens": 1, "user": marker}, "root-secret-key"
        ),
        guarded.post(
            CHAT, {"model": guarded.model, "messages": [{"role": "user", "content": [marker]}]}, "root-secret-key"
        ),
        guarded.post(CHAT, {"model": guarded.model, "messages": MESSAGES, marker: 1}, "root-secret-key"),
        guarded.get(f"/v1/models/{marker}?q={marker}", "root-secret-key"),
        guarded.post(TEXT, content=marker.encode(), key="root-secret-key"),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 400, 404, 400]
    guarded.wait_for(  # the server may write a log line after the response
        lambda _: guarded.log.count("http method=") >= 5, key="root-secret-key"
    )
    for secret in (marker, "secret-key", "Hello"):
        assert secret not in guarded.log
        assert secret not in guarded.get("/state", "root-secret-key").text
        assert secret not in guarded.get("/metrics", "root-secret-key").text


# ---- recorded requests ----


def test_record_option_writes_a_trace_without_text(start, tiny_model, tmp_path):
    file = tmp_path / "requests.jsonl"
    server = start("--record", str(file))
    for number in range(3):
        body = {"model": server.model, "prompt": f"{'xylophone ' * 20}{number}", "max_tokens": 4, "ignore_eos": True}
        assert server.post(TEXT, body).status_code == 200
    assert server.stop() == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    results = [(line["prompt_tokens"], line["answer_tokens"], line["state"]) for line in requests]
    assert results == [(201, 4, "finished")] * 3
    assert requests[0]["keys"][:12] == requests[1]["keys"][:12] == requests[2]["keys"][:12]
    assert "xylophone" not in file.read_text()
    replayed = kvtier("replay", str(file), "--json", "--capacities", "0")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["trace"]["num_requests"] == 3
    again = kvtier("serve", "--port", "0", "--record", str(file), "--model", str(tiny_model))
    assert again.returncode == 1
    assert "not overwritten" in again.stderr


# ---- failures at start ----


def kvtier(*arguments):
    command = [sys.executable, "-m", "kvtier", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_serve_on_a_used_port_fails_with_a_message(server, tiny_model):
    done = kvtier("serve", "--model", str(tiny_model), "--port", server.url.rsplit(":", 1)[1])
    assert done.returncode == 1
    assert "cannot listen at 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_with_missing_model_fails_with_a_message():
    done = kvtier("serve", "--model", "/no/such", "--port", "0")
    assert done.returncode == 1
    assert "there is no model at /no/such" in done.stderr
    assert "Traceback" not in done.stderr


# ---- priority ----


def test_priority_does_not_change_order_between_tenants(start, tmp_path):
    config = tmp_path / "tenants.toml"
    names = ("first", "second", "operator")
    tables = [f'[[tenants]]\nname = "{name}"\nkey = "{name}-key-key"\n' for name in names]
    config.write_text("".join(tables) + "admin = true\n")
    server = start("--max-rows", "1", "--config", str(config))
    client, answer, _ = stream(server, key="operator-key-key")

    def ask(name, priority):
        body = {"model": server.model, "prompt": name, "max_tokens": 1, "priority": priority}
        return server.post(TEXT, body, f"{name}-key-key")

    with ThreadPoolExecutor(2) as threads:
        for num_waiting, (name, priority) in enumerate((("first", 0), ("second", 1000)), 1):
            threads.submit(ask, name, priority)
            server.wait_for(lambda state, n=num_waiting: state["waiting"] == n, key="operator-key-key")
        answer.close()
        client.close()
    state = server.wait_for(drained, key="operator-key-key")
    # `recent` lists the newest finished request first. `second` had the higher priority, but finished after `first`.
    assert [record["tenant"] for record in state["recent"]] == ["second", "first", "operator"]
