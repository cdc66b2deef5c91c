"""A shutdown waits for streams, up to a limit. A crash ends streams at once. The next server reuses blocks on disk."""

from __future__ import annotations

import os
import signal

import httpx
import psutil
import pytest

TEXT = "/v1/completions"
PROMPT = "".join(chr(97 + number * number % 26) for number in range(1000))
NUM_BLOCKS = 1000 // 16


class Stream:
    """An open stream whose first event has arrived."""

    def __init__(self, server, max_tokens: int) -> None:
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self._client = httpx.Client(timeout=60)
        request = self._client.build_request("POST", server.url + TEXT, json=body)
        self._answer = self._client.send(request, stream=True)
        self._lines = self._answer.iter_lines()
        next(self._lines)

    def rest(self) -> list[str]:
        lines = [line for line in self._lines if line]
        self.close()
        return lines

    def close(self) -> None:
        self._answer.close()
        self._client.close()


def ask(server):
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post(TEXT, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def disk(tmp_path):
    return ("--disk", str(tmp_path / "kv"), "--disk-bytes", "64MiB", "--host-blocks", "128", "--always-load")


def is_on_disk(state):
    return state["tiers"][2]["num_used"] >= NUM_BLOCKS


def check_warm(server, expected):
    """Assert that a restarted server returns the expected answer and reads the blocks of the prompt from disk."""
    answer = ask(server)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 960
    assert server.state()["recent"][0]["tokens_from"].get("disk", 0) >= 960


def test_sigterm_drains_requests_and_saves_blocks_to_disk(start, disk):
    server = start(*disk)
    expected = ask(server)
    stream = Stream(server, 400)
    server.process.send_signal(signal.SIGTERM)
    lines = stream.rest()
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]
    assert "error" not in "".join(lines)
    assert server.process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        server.get("/health")
    assert "Traceback" not in server.log
    check_warm(start(*disk), expected)


def test_sigterm_waits_at_most_drain_seconds(start):
    server = start("--drain-seconds", "0.1")
    stream = Stream(server, 1000)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(httpx.RemoteProtocolError):  # the server cuts off the stream
        stream.rest()
    stream.close()
    assert server.process.wait(60) == 0


def test_server_exits_after_engine_is_killed(start, disk):
    server = start(*disk)
    expected = ask(server)
    server.wait_for(is_on_disk)
    stream = Stream(server, 1000)
    os.kill(server.engine_pid, signal.SIGKILL)
    lines = stream.rest()
    assert '"engine_ended"' in lines[-2]
    assert lines[-1] == "data: [DONE]"
    assert server.process.wait(30) == 1
    assert "Traceback" not in server.log
    check_warm(start(*disk), expected)


def test_engine_exits_after_front_end_is_killed(start, disk):
    server = start(*disk)
    expected = ask(server)
    server.wait_for(is_on_disk)
    engine = psutil.Process(server.engine_pid)
    stream = Stream(server, 1000)
    server.process.kill()
    server.process.wait(30)
    engine.wait(30)
    stream.close()
    again = start(*disk, "--port", server.url.rsplit(":", 1)[1])
    assert again.url == server.url
    check_warm(again, expected)
