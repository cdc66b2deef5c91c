"""Metrics under vLLM's names, and the metrics port, which needs no API key."""

from __future__ import annotations

import socket
import subprocess
import sys

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from server_support import VERIFY

KEY = "key-of-the-admin"
# vLLM's dashboard and the routers llm-d, AIBrix and production-stack use the samples with these names.
READ_BY_OTHERS = [
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_inference_time_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_count",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:engine_sleep_state",
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def samples(text: str) -> dict[str, list]:
    """Return the samples of a metrics page by name."""
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.fixture
def guarded(start):
    """Start a server with an admin key and a metrics port. Return the server and the address of the metrics port."""
    port = free_port()
    server = start("--metrics-port", str(port), env={"KVTIER_ADMIN_KEY": KEY})
    return server, f"http://127.0.0.1:{port}"


def get(url: str, **options) -> httpx.Response:
    return httpx.request(options.pop("method", "GET"), url, verify=VERIFY, timeout=60, **options)


def test_metrics_port_needs_no_key_and_has_no_prompts(guarded):
    server, address = guarded
    prompt = "a secret prompt that repeats itself, a secret prompt"
    body = {"model": server.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        assert server.post("/v1/completions", body, KEY).status_code == 200
    assert server.get("/metrics").status_code == 401
    page = get(f"{address}/metrics")
    assert page.status_code == 200
    assert "secret" not in page.text
    found = samples(page.text)
    assert [name for name in READ_BY_OTHERS if name not in found] == []
    value = {name: found[name][0].value for name in READ_BY_OTHERS}
    assert value["vllm:generation_tokens_total"] == 8
    assert value["vllm:request_success_total"] == value["vllm:time_to_first_token_seconds_count"] == 2
    assert value["vllm:inter_token_latency_seconds_count"] == 6
    assert value["vllm:prompt_tokens_total"] == 2 * len(prompt)
    assert value["vllm:prefix_cache_hits_total"] == len(prompt) // 16 * 16
    assert found["vllm:request_success_total"][0].labels["finished_reason"] == "length"
    assert found["vllm:cache_config_info"][0].labels["block_size"] == "16"
    assert {sample.labels["model_name"] for name in READ_BY_OTHERS for sample in found[name]} == {server.model}


def test_metrics_port_negotiates_openmetrics(guarded):
    _, address = guarded
    with httpx.Client(verify=VERIFY, timeout=60) as client:
        text = client.get(f"{address}/metrics")
        accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.2"
        opened = client.get(f"{address}/metrics", headers={"accept": accept})
    assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert opened.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    names = {sample.name for family in parse_open_metrics(opened.text) for sample in family.samples}
    assert names == set(samples(text.text))
    assert {"process_cpu_seconds_total", "kvtier_engine_process_cpu_seconds_total"} < names
    assert {"python_gc_collections_total", "kvtier_engine_gc_collections_total"} < names


def test_metrics_port_serves_only_get_metrics(guarded):
    _, address = guarded
    for path in ("/", "/state", "/v1/models", "/health", "/metrics/"):
        assert get(address + path).status_code == 404, path
    assert get(f"{address}/metrics", method="POST").status_code == 405


def test_sleep_state_metric_follows_the_engine(guarded):
    server, _ = guarded

    def states() -> dict[str, float]:
        found = samples(server.get("/metrics", KEY).text)["vllm:engine_sleep_state"]
        return {sample.labels["sleep_state"]: sample.value for sample in found}

    assert states() == {"awake": 1, "discard_all": 0}
    assert server.post("/control/sleep", key=KEY).status_code == 200
    assert states() == {"awake": 0, "discard_all": 1}


def test_server_with_metrics_port_stops_cleanly(guarded):
    server, address = guarded
    with httpx.Client(verify=VERIFY) as client:  # keeps a connection to the port open
        assert client.get(f"{address}/metrics").status_code == 200
        assert server.stop() == 0
    assert "Traceback" not in server.log, server.log


def test_metrics_port_in_use_fails_with_a_message(tiny_model):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        command = [sys.executable, "-m", "kvtier", "serve", "--model", str(tiny_model), "--port", "0"]
        done = subprocess.run([*command, "--metrics-port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "try another --metrics-port" in done.stderr
