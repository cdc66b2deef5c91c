"""A server with two ranks returns the answers of a server with one. If one process fails, all processes exit."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import httpx
import psutil

PROMPT = "A conversation whose KV blocks are split among the ranks, by attention head. " * 6


def ask(server, prompt: str = PROMPT) -> tuple[str, int]:
    """Return the text of an answer and the number of cached prompt tokens."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 20, "temperature": 0}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    response = answer.json()
    return response["choices"][0]["text"], response["usage"]["prompt_tokens_details"]["cached_tokens"]


def ranks_of(server) -> list[psutil.Process]:
    children = psutil.Process(server.engine_pid).children()
    return [process for process in children if "rank_process" in " ".join(process.cmdline())]


def exits(server, *processes: psutil.Process) -> bool:
    """Send a request, which must fail. Return True if the server exits with an error and all `processes` exit."""
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError):  # the server might have exited already
        assert server.post("/v1/completions", body).status_code >= 500
    _, alive = psutil.wait_procs(processes, 60)
    return server.process.wait(60) != 0 and not alive


def test_disk_tier_written_by_one_rank_is_read_by_two_ranks(server, start, tmp_path):
    expected, _ = ask(server)
    tiers = ("--blocks", "64", "--disk", str(tmp_path / "kv"), "--disk-bytes", "64MiB", "--kv-shards", "2")
    alone = start(*tiers, "--always-load")
    assert ask(alone) == (expected, 0)
    assert alone.stop() == 0
    both = start("--tensor-parallel", "2", *tiers, "--always-load")
    (rank,) = ranks_of(both)
    text, num_cached = ask(both)
    assert text == expected
    assert num_cached > 400
    assert both.state()["tiers"][2]["used_bytes"] > 0
    engine = psutil.Process(both.engine_pid)
    engine.kill()
    assert exits(both, engine, rank)


def test_server_exits_after_rank_is_killed(start):
    server = start("--tensor-parallel", "2")
    (rank,) = ranks_of(server)
    engine = psutil.Process(server.engine_pid)
    ask(server)
    rank.kill()
    assert exits(server, engine, rank)
    assert "the process of rank 1 ended with exit code -9" in server.log


def test_number_of_ranks_that_does_not_divide_heads_fails(tiny_model):
    command = [sys.executable, "-m", "kvtier", "serve", "--port", "0", "--model", str(tiny_model)]
    ended = subprocess.run([*command, "--tensor-parallel", "4"], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "2 KV heads cannot be split into 4 equal shards" in ended.stderr
