"""kvtier as a KV connector of vLLM (docs/vllm.md).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_bytes": "16GiB"}}'

    EngineCore    SchedulerSide   CacheManager without a device tier: finds, loads and saves blocks
        │  StepPlan ↓   ↑ Report
    Worker        WorkerSide      CacheController: copies between vLLM's cache tensors, host memory and stores

Only `connector` imports vLLM. The other modules work with vLLM's objects but do not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.integrations.vllm.connector import KvtierConnector

__all__ = ["KvtierConnector", "register"]


def register() -> None:
    """Register the connector's name with vLLM. Called through the entry point group `vllm.general_plugins`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvtierConnector" not in KVConnectorFactory._registry:  # plugins may be loaded twice in one process
        module = "kvtier.integrations.vllm.connector"
        KVConnectorFactory.register_connector("KvtierConnector", module, "KvtierConnector")


def __getattr__(name: str) -> Any:
    if name != "KvtierConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.integrations.vllm.connector import KvtierConnector

    return KvtierConnector
