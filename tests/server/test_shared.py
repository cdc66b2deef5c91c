"""Two servers share Redis and an S3 bucket. Conversations move between the servers.

If a server or a store is killed, no answer is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import store_servers
from server_support import ServerProcess
from store_servers import S3_KEY, S3_SECRET, wait_for

CHAT = "/v1/chat/completions"
BLOCK_TOKENS = 16
TURNS = 3
TALKS = 4


class Stores:
    """A Redis and an S3 server. Both can be killed, and restarted on the same ports without data."""

    def __init__(self, folder) -> None:
        self._folder, self._redis, self._s3 = folder, contextlib.ExitStack(), contextlib.ExitStack()
        self._redis_port = self._s3_port = None
        self.restart()

    def restart(self) -> None:
        """Kill the servers that run. Start both servers without data."""
        self.kill_redis()
        self.kill_s3()
        folder = self._folder / uuid.uuid4().hex
        redis, s3 = store_servers.redis_server, store_servers.s3_server
        self._redis_port = self._redis.enter_context(redis(folder / "redis", port=self._redis_port))
        self._s3_port = self._s3.enter_context(s3(folder / "s3", port=self._s3_port))

    @property
    def options(self) -> list[str]:
        s3 = f"s3://{S3_KEY}:{S3_SECRET}@test/kv?endpoint=http://127.0.0.1:{self._s3_port}&region=us-east-1&timeout=5s"
        urls = (f"redis://127.0.0.1:{self._redis_port}?timeout=5s", s3)
        return [word for url in urls for word in ("--shared", url)]

    def kill_redis(self) -> None:
        self._redis.close()

    def kill_s3(self) -> None:
        self._s3.close()

    def close(self) -> None:
        self.kill_redis()
        self.kill_s3()


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        try:
            started_stores = stack.enter_context(contextlib.closing(Stores(tmp_path_factory.mktemp("stores"))))
        except store_servers.NotInstalled as missing:
            pytest.skip(str(missing))
        yield started_stores


@pytest.fixture(scope="module")
def start(stores, tiny_model, tmp_path_factory):
    """Yield a function that starts a server with both stores.

    All servers compute identical results for equal texts, and load every cached block instead of computing it.
    """
    folder, started = tmp_path_factory.mktemp("logs"), []

    def run(*arguments: str) -> ServerProcess:
        options = ["--model", str(tiny_model), "--threads", "1", "--blocks", "512", "--host-blocks", "512"]
        options += ["--always-load", "--invariant", *stores.options, *arguments]
        started.append(ServerProcess(folder / uuid.uuid4().hex, *options))
        return started[-1]

    yield run
    with ThreadPoolExecutor() as pool:
        list(pool.map(ServerProcess.stop, started))
    for server in started:
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def servers(start):
    """Return two servers. A test that kills one of them must start a replacement."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: start(), range(2)))


def body_of(server, messages, max_tokens=12, **options):
    return {
        "model": server.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **options,
    }


def ask(server, messages, **options):
    answer = server.post(CHAT, body_of(server, messages, **options))
    answer.raise_for_status()
    return answer.json()


def text_of(answer) -> str:
    return answer["choices"][0]["message"]["content"]


def cached_of(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def question(talk: str, turn: int) -> dict[str, str]:
    return {"role": "user", "content": hashlib.sha512(f"{talk}, {turn}".encode()).hexdigest()}


def play(talk: str, send) -> list[str]:
    """Run the conversation `talk`. `send(turn, messages)` returns the response to a turn. Return all answers."""
    messages, texts = [], []
    for turn in range(TURNS):
        messages = [*messages, question(talk, turn)]
        texts.append(text_of(send(turn, messages)))
        messages = [*messages, {"role": "assistant", "content": texts[-1]}]
    return texts


def truth_of(server, talk: str) -> list[str]:
    """Return the expected answers of a conversation. To avoid cache hits, every request has its own salt."""

    def send(_, messages):
        answer = ask(server, messages, cache_salt=uuid.uuid4().hex)
        assert cached_of(answer) == 0
        return answer

    return play(talk, send)


def play_all(name: str, send) -> list[list[str]]:
    """Run several conversations concurrently. Conversation n calls `send(n + turn, messages)` for each turn."""
    with ThreadPoolExecutor(TALKS) as pool:
        numbers = range(TALKS)
        return list(pool.map(lambda n: play(f"{name} {n}", lambda turn, messages: send(n + turn, messages)), numbers))


def truths(name: str, servers) -> list[list[str]]:
    with ThreadPoolExecutor(TALKS) as pool:
        return list(pool.map(lambda n: truth_of(servers[n % 2], f"{name} {n}"), range(TALKS)))


def num_shared(server) -> int:
    """Return the number of blocks in the stores, as counted by the server."""
    return next(tier["num_used"] for tier in server.state()["tiers"] if tier["name"] == "shared")


def test_conversation_reuses_blocks_computed_by_other_server(servers):
    lengths = [0]  # number of prompt tokens of each turn, after an initial 0
    before = [num_shared(server) for server in servers]

    def send(turn, messages):
        server = servers[turn % 2]
        answer = ask(server, messages)
        # The other server computed these tokens in the previous turn.
        computed = lengths[-1] // BLOCK_TOKENS * BLOCK_TOKENS
        assert cached_of(answer) >= computed
        assert server.state()["recent"][0]["tokens_from"].get("shared", 0) >= min(computed, BLOCK_TOKENS)
        lengths.append(answer["usage"]["prompt_tokens"])
        server.wait_for(lambda _: num_shared(server) >= before[turn % 2] + lengths[-1] // BLOCK_TOKENS)
        return answer

    texts = play("to and fro", send)
    assert lengths[1] > 4 * BLOCK_TOKENS
    assert texts == truth_of(servers[0], "to and fro")


class Stream:
    """A long stream whose first event has arrived."""

    def __init__(self, server, messages) -> None:
        self._client = httpx.Client(timeout=60)
        body = body_of(server, messages, max_tokens=300, stream=True)
        self._answer = self._client.send(self._client.build_request("POST", server.url + CHAT, json=body), stream=True)
        self._lines = self._answer.iter_lines()
        next(self._lines)

    def rest(self) -> list[str]:
        with contextlib.closing(self._client), contextlib.closing(self._answer):
            return list(self._lines)


class Countdown:
    """Counts events that happen on several threads, and lets a thread wait for the first `number` events."""

    def __init__(self, number: int) -> None:
        self._left, self._lock, self._is_zero = number, threading.Lock(), threading.Event()

    def count(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._is_zero.set()

    def wait(self) -> None:
        assert self._is_zero.wait(60)


def kill(server) -> None:
    """Kill both processes of a server at once, so that nothing is saved."""
    engine = server.engine_pid
    for pid in (server.process.pid, engine):
        os.kill(pid, signal.SIGKILL)
    server.process.wait(30)


@pytest.mark.parametrize("victim", [0, 1])
def test_requests_to_killed_server_succeed_on_other_server(servers, start, victim):
    survivor, name = servers[1 - victim], f"victim {victim}"
    long = [{"role": "user", "content": f"Say a lot, {name}."}]
    expected = truths(name, servers)
    long_truth = text_of(ask(survivor, long, max_tokens=300, cache_salt=uuid.uuid4().hex))
    failed, half = [], Countdown(TURNS * TALKS // 2)

    def send(number, messages):
        """Send the messages to one server, and to the other server if the first server fails."""
        half.count()
        for index in (number % 2, (number + 1) % 2):
            try:
                return ask(servers[index], messages)
            except httpx.HTTPError as error:
                failed.append((index, error))
        raise AssertionError(f"neither server answered: {failed}")

    stream = Stream(servers[victim], long)
    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(play_all, name, send)
        half.wait()
        kill(servers[victim])
        with pytest.raises(httpx.TransportError):  # the server was killed in the middle of its answer
            stream.rest()
        assert text_of(ask(survivor, long, max_tokens=300)) == long_truth
        assert played.result() == expected
    assert {index for index, _ in failed} <= {victim}
    servers[victim] = start()


def test_killed_stores_fail_no_request_and_are_used_again(servers, stores):
    expected = truths("stores", servers)
    quarter, half = Countdown(TURNS * TALKS // 4), Countdown(TURNS * TALKS // 2)

    def send(number, messages):
        quarter.count()
        half.count()
        return ask(servers[number % 2], messages)  # no retry

    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(play_all, "stores", send)
        quarter.wait()
        stores.kill_redis()
        half.wait()
        stores.kill_s3()
        assert played.result() == expected
    assert play_all("stores", lambda number, messages: ask(servers[(number + 1) % 2], messages)) == expected
    stores.restart()

    def is_shared() -> bool:
        """Send a question to both servers. Return True if the second server finds blocks in a store."""
        salt = uuid.uuid4().hex
        first, second = (ask(server, [question("back", 0)], cache_salt=salt) for server in servers)
        assert text_of(first) == text_of(second)
        return cached_of(second) > 0

    wait_for(is_shared, "the stores to be used again", 60)
