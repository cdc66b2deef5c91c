"""The requests of one tenant do not change the streams of another tenant."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("llguidance")

from server_support import ServerProcess

CONFIG = """
[[tenants]]
name = "victim"
key = "victim-secret-key"

[[tenants]]
name = "attacker"
key = "attacker-secret-key"
"""
# The model computes NaN for this text. Victims generate JSON, which cannot contain this raw control character.
NAN_TEXT = "\x00"
SCHEMA = {"type": "string", "minLength": 100, "maxLength": 100}
VICTIMS = [
    {"temperature": 0},
    {"seed": 1, "temperature": 1.2},
    {"seed": 2, "top_p": 0.6, "repetition_penalty": 1.3},
    {"seed": 3, "top_k": 20, "min_p": 0.05, "frequency_penalty": 1, "logprobs": 2},
]
ATTACKS = [
    ({"prompt": NAN_TEXT}, 500),
    ({"prompt": NAN_TEXT, "top_p": 0.5, "n": 3, "logprobs": 5}, 500),
    ({"prompt": NAN_TEXT, "response_format": {"type": "json_object"}}, 500),
    ({"repetition_penalty": 1e-45, "top_p": 0.5}, 400),
    ({"repetition_penalty": 1e-300, "top_k": 5}, 400),
    ({"repetition_penalty": 0.0099}, 400),
    ({"repetition_penalty": 100.5}, 400),
    ({"temperature": 1e9}, 400),
    ({"repetition_penalty": 0.01, "top_p": 0.5, "presence_penalty": -2, "frequency_penalty": -2}, 200),
    ({"repetition_penalty": 100, "min_p": 1, "temperature": 5e-324, "top_p": 5e-324}, 200),
]


@pytest.fixture(scope="module")
def tenants(tiny_model, tmp_path_factory):
    """Yield a server with two tenants and a model that computes NaN for one token."""
    import safetensors.torch

    folder = tmp_path_factory.mktemp("tenants")
    model = shutil.copytree(tiny_model, folder / "model")
    # NAN_TEXT is byte 0. The vocabulary represents this byte by the character U+0100.
    token = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"][chr(0x100)]
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    safetensors.torch.save_file(weights, model / "model.safetensors", {"format": "pt"})
    (folder / "kvtier.toml").write_text(CONFIG)
    arguments = ("--model", str(model), "--threads", "1", "--config", str(folder / "kvtier.toml"), "--invariant")
    process = ServerProcess(folder / "log", *arguments)
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log, process.log


def stream(server, options, begun):
    """Run the stream of a victim. Set `begun` after the first line. Return text, text offsets and finish reason."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {"model": server.model, "prompt": "Once", "max_tokens": 700, "stream": True, "response_format": form}
    headers, chunks = {"Authorization": "Bearer victim-secret-key"}, []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, **options}, headers=headers, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            begun.set()
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                chunks.append((choice["text"], choice["logprobs"], choice["finish_reason"]))
    texts, reports, reasons = zip(*chunks, strict=True)
    offsets = [offset for report in reports if report for offset in report["text_offset"]]
    return "".join(texts), offsets, reasons[-1]


def streams(server, attack=lambda: None):
    """Run the streams of all victims concurrently, and call `attack` while the streams run."""
    begun = [threading.Event() for _ in VICTIMS]
    with ThreadPoolExecutor(len(VICTIMS)) as threads:
        futures = [
            threads.submit(stream, server, options, event) for options, event in zip(VICTIMS, begun, strict=True)
        ]
        for event in begun:
            assert event.wait(60), "a stream has not begun"
        attack()
        return [future.result() for future in futures]


def test_attacks_do_not_change_streams_of_other_tenants(tenants):
    expected = streams(tenants)
    for text, _, reason in expected:
        assert len(json.loads(text)) == 100
        assert reason == "stop"
    answers = []

    def attack():
        for options, _ in ATTACKS:
            body = {"model": tenants.model, "prompt": "hello", "max_tokens": 8, **options}
            answers.append(tenants.post("/v1/completions", body, "attacker-secret-key"))

    assert streams(tenants, attack) == expected
    assert [answer.status_code for answer in answers] == [status for _, status in ATTACKS]
    for answer in answers:
        if answer.status_code == 500:
            assert "no token can be sampled" in answer.json()["error"]["message"]
