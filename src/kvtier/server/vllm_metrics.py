"""VllmMetrics: the metrics of the server under vLLM's names, for dashboards, routers and autoscalers of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtier.engine.params import Explanation
from kvtier.metrics import Registry

if TYPE_CHECKING:
    from kvtier.server.request_log import RequestRecord

_LABELS = ("model_name", "engine")
_TOKENS = tuple(float(digit * 10**decade) for decade in range(6) for digit in (1, 2, 5))  # histogram bounds
# Finish reason of a RequestRecord -> finish reason of vLLM. All other reasons become "error".
_REASONS = {"stop": "stop", "length": "length", "disconnected": "abort", "timeout": "abort"}


class VllmMetrics:
    """Declares metrics with vLLM's names, labels and meanings in a registry, and updates them."""

    def __init__(self, registry: Registry, model_name: str, block_tokens: int) -> None:
        self._labels = (model_name, "0")
        self._gauges = {
            name: registry.gauge(f"vllm:{name}", text, _LABELS).of(*self._labels)
            for name, text in {
                "num_requests_running": "Requests in the batch.",
                "num_requests_waiting": "Requests that wait for the batch.",
                "kv_cache_usage_perc": "Share of the device blocks that requests use; 1 is 100 percent.",
            }.items()
        }
        self._totals = {
            name: registry.counter(f"vllm:{name}_total", text, _LABELS).of(*self._labels)
            for name, text in {
                "prefix_cache_queries": "Prompt tokens looked up.",
                "prefix_cache_hits": "Prompt tokens found in device memory.",
                "external_prefix_cache_queries": "Prompt tokens looked up below device memory.",
                "external_prefix_cache_hits": "Prompt tokens found in host memory and stores.",
                "prompt_tokens": "Prompt tokens of finished requests.",
                "generation_tokens": "Generated tokens of finished requests.",
                "num_preemptions": "Preemptions of finished requests.",
            }.items()
        }
        self._seconds = {
            name: registry.histogram(f"vllm:{name}_seconds", text, _LABELS).of(*self._labels)
            for name, text in {
                "time_to_first_token": "Time from a request to its first token.",
                "inter_token_latency": "Time between two tokens of an answer.",
                "request_time_per_output_token": "Average time per token after the first one.",
                "e2e_request_latency": "Time from a request to its end.",
                "request_queue_time": "Time from a request to its admission by the scheduler.",
                "request_prefill_time": "Time from admission to the first token.",
                "request_decode_time": "Time from the first token to the end.",
                "request_inference_time": "Time from admission to the end.",
            }.items()
        }
        self._sizes = {
            name: registry.histogram(f"vllm:request_{name}_tokens", text, _LABELS, _TOKENS).of(*self._labels)
            for name, text in {
                "prompt": "Prompt tokens per request.",
                "generation": "Generated tokens per request.",
            }.items()
        }
        self._finished = registry.counter(
            "vllm:request_success_total", "Finished requests.", (*_LABELS, "finished_reason")
        )
        self._asleep = registry.gauge("vllm:engine_sleep_state", "1 for the current state.", (*_LABELS, "sleep_state"))
        self._config = registry.gauge(
            "vllm:cache_config_info", "Configuration of the cache.", (*_LABELS, "block_size", "num_gpu_blocks")
        )
        self._block_tokens = str(block_tokens)
        self.gaps = self._seconds["inter_token_latency"]

    def ended(self, record: RequestRecord, explanation: Explanation | None) -> None:
        """Count a finished request. `explanation` is None if the engine finished no answer."""
        self._finished.of(*self._labels, _REASONS.get(record.finish, "error")).add()
        self._totals["prompt_tokens"].add(record.prompt_tokens)
        self._totals["generation_tokens"].add(record.new_tokens)
        self._sizes["prompt"].observe(record.prompt_tokens)
        self._sizes["generation"].observe(record.new_tokens)
        seconds = {"e2e_request_latency": record.seconds}
        ttft, queued = record.ttft_seconds, None if explanation is None else explanation.waited_seconds
        if explanation is not None:
            self._totals["num_preemptions"].add(explanation.num_preempted)
        if queued is not None:
            seconds |= {"request_queue_time": queued, "request_inference_time": record.seconds - queued}
        if ttft is not None:
            decode = record.seconds - ttft
            seconds |= {"time_to_first_token": ttft, "request_decode_time": decode}
            if record.new_tokens > 1:
                seconds["request_time_per_output_token"] = decode / (record.new_tokens - 1)
        if ttft is not None and queued is not None:
            seconds["request_prefill_time"] = ttft - queued
        for name, value in seconds.items():
            self._seconds[name].observe(max(0.0, value))

    def update(self, snapshot: Mapping[str, Any]) -> None:
        """Set the metrics of the engine from its part of GET /state."""
        device = snapshot["tiers"][0]
        hits = snapshot["hits"]
        in_device = hits["by_tier"][device["name"]]
        below = sum(hits["by_tier"].values()) - in_device
        num_blocks = device["num_blocks"]
        self._gauges["num_requests_running"].set(snapshot["running"])
        self._gauges["num_requests_waiting"].set(snapshot["waiting"])
        self._gauges["kv_cache_usage_perc"].set(device["num_pinned"] / num_blocks if num_blocks else 0.0)
        self._totals["prefix_cache_queries"].raise_to(hits["queried_tokens"])
        self._totals["prefix_cache_hits"].raise_to(in_device)
        self._totals["external_prefix_cache_queries"].raise_to(hits["queried_tokens"] - in_device)
        self._totals["external_prefix_cache_hits"].raise_to(below)
        for state, value in {"awake": not snapshot["asleep"], "discard_all": snapshot["asleep"]}.items():
            self._asleep.of(*self._labels, state).set(float(value))
        # The number of blocks is a label, so /control/resize starts a new series. Set all older series to 0.
        for series in self._config.series.values():
            series.set(0.0)
        self._config.of(*self._labels, self._block_tokens, str(num_blocks)).set(1.0)
