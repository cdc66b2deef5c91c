"""A server with small tiers gets random requests and control calls. It answers like a server without cache hits."""

from __future__ import annotations

import random
import secrets
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

SEED = 19
NUM_REQUESTS = 16
TIERS = [
    "--blocks",
    "40",
    "--host-blocks",
    "24",
    "--disk-bytes",
    "2MiB",
    "--block-tokens",
    "8",
    "--write",
    "write_back",
    "--always-load",
]
STEPS = ["--invariant", "--draft-tokens", "3", "--max-rows", "6", "--max-step-tokens", "48"]
STEMS = ("the quick brown fox " * 3, "abcabcabc " * 6, '{"a": 1, "b": [1,2,3]} ' * 3, "héllo wörld " * 4)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
OPTIONAL = {
    "logprobs": (0, 3),
    "repetition_penalty": (0.8, 1.3),
    "frequency_penalty": (-1, 1.5),
    "presence_penalty": (1.1,),
    "top_p": (0.8,),
    "top_k": (7,),
    "stop": (["e"], ["ab\n", "é"]),
    "cache_salt": ("x", "y"),
    "logit_bias": ({"97": 3, "98": -2.5},),
    "bad_words": (["th", "x"],),
    "prompt_logprobs": (0, 2),
}
ENDS = ({}, {}, {"ignore_eos": True}, {"response_format": FORMAT}, {"guided_regex": "[a-f]{2,9}"})


def make_request(model, rng):
    """Return a completion request with random values for a random subset of the optional parameters."""
    prompt = rng.choice(STEMS)[: rng.randrange(20, 60)] + rng.choice(("", " tail", f" tail {rng.randrange(3)}"))
    body = {"model": model, "prompt": prompt, "max_tokens": rng.randrange(1, 40), "seed": rng.randrange(5)}
    body["temperature"] = rng.choice((0, 0, 1, 1.5))
    if body["temperature"]:
        body["n"] = rng.randrange(1, 4)
    chosen = {name: rng.choice(values) for name, values in OPTIONAL.items() if rng.random() < 0.25}
    return body | chosen | rng.choice(ENDS)


def control(server, rng):
    """Send a random control call, and then a request whose client disconnects before the response."""
    stem = rng.choice(STEMS)
    calls = [
        ("/control/demote", {"prompt": stem}),
        ("/control/drop", {"prompt": stem[:40]}),
        ("/control/prefetch", {"prompt": stem[:50]}),
        ("/control/reset", {"clear_stores": rng.random() < 0.3}),
        ("/control/resize", {"tier": "host", "num_blocks": rng.randrange(8, 40)}),
        ("/control/resize", {"tier": "device", "num_blocks": rng.randrange(36, 60)}),
    ]
    path, body = rng.choice(calls)
    assert server.post(path, body).status_code in (200, 409)
    abandoned = {"model": server.model, "prompt": stem[:50], "max_tokens": 60, "n": 3}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json=abandoned, timeout=0.01)


def choices(server, body):
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_answers_equal_answers_of_server_without_cache_reuse(start, tmp_path):
    rng = random.Random(SEED)
    tiered = start(*TIERS, *STEPS, "--disk", str(tmp_path / "kv"))
    plain = start("--invariant", "--blocks", "2048")
    requests = [make_request(tiered.model, rng) for _ in range(NUM_REQUESTS)]
    order = rng.sample([*range(NUM_REQUESTS)] * 2, 2 * NUM_REQUESTS)
    with ThreadPoolExecutor(6) as threads:
        answers = [(number, threads.submit(choices, tiered, requests[number])) for number in order]
        for _ in range(12):
            control(tiered, rng)
        expected = [choices(plain, {**body, "cache_salt": secrets.token_hex(8)}) for body in requests]
        different = [requests[number] for number, answer in answers if answer.result() != expected[number]]
    assert different == []
    assert tiered.stop() == plain.stop() == 0
    assert "Traceback" not in tiered.log
