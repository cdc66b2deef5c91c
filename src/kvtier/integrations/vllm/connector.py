"""KvtierConnector: vLLM's connector interface. Its methods call the scheduler side or the worker side.

vLLM 0.32 defines the order and the requirements of the calls (docs/vllm.md). An exception in a call would stop vLLM for
all requests. Failed loads, saves and store calls are therefore reported as values, not as exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.errors import ArgumentError, UnavailableError
from kvtier.integrations.vllm.config import ConnectorConfig
from kvtier.integrations.vllm.identity import namespace_of
from kvtier.integrations.vllm.layouts import device_cache_of
from kvtier.integrations.vllm.metrics import METRICS, Collector, added
from kvtier.integrations.vllm.scheduler_side import SchedulerSide
from kvtier.integrations.vllm.worker_side import Handshake, StepPlan, WorkerSide
from kvtier.messages import Report
from kvtier.worker.sharding import Sharding

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

MIN_VERSION = (0, 32)
_STATS_SECONDS = 1.0  # interval of the statistics that EngineCore sends to the front end
_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "memory": CacheHitSource.HOST}
"""Name of a memory tier, or URL scheme of a store -> vLLM's name for the place of a hit."""


@dataclass
class KvtierMetadata(KVConnectorMetadata):
    """Message from the scheduler side to all workers, sent in every step."""

    step: StepPlan


@dataclass
class KvtierWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from the workers to the scheduler side."""

    reports: tuple[Report, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvtierWorkerMetadata:
        assert isinstance(other, KvtierWorkerMetadata)
        return KvtierWorkerMetadata(self.reports + other.reports)


@dataclass
class KvtierHandshake(KVConnectorHandshakeMetadata):
    """Message from each worker to the scheduler side, sent once at start."""

    handshake: Handshake


class KvtierStats(KVConnectorStats):
    """Increases of the connector's counters in an interval, and the latest gauges."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"{name} {label}": value for name, values in self.data.items() for label, value in values.items() if value
        }

    def is_empty(self) -> bool:
        return not any(any(values.values()) for values in self.data.values())


class KvtierPromMetrics(KVConnectorPromMetrics):
    """The connector's metrics in vLLM's /metrics."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            key: (self._counter_cls if metric.is_counter else self._gauge_cls)(
                name=metric.name, documentation=metric.help, labelnames=[*labelnames, metric.label]
            )
            for key, metric in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, values in transfer_stats_data.items():
            for label, value in values.items():
                series = self._metrics[key].labels(*labels, label)
                if METRICS[key].is_counter:
                    series.inc(value)
                else:
                    series.set(value)


class KvtierConnector(KVConnectorBase_V1):
    """kvtier's host memory and stores below vLLM's device cache."""

    requires_kv_delivery = False
    """A request that is preempted or finished does not wait for its saves."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = ConnectorConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        _check_supported(vllm_config, kv_cache_config, self._config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        # After a failed load, vLLM continues after the last loaded block. If the model has attention windows, the
        # window before that position may contain blocks that vLLM has dropped. The request must then start again.
        self._drops_blocks = drops_blocks(kv_cache_config)
        self._failed_blocks: set[int] = set()
        self._reports: list[Report] = []
        self._next_stats = 0.0
        if role is KVConnectorRole.SCHEDULER:
            speculative = vllm_config.speculative_config
            self._scheduler = SchedulerSide(
                self._config,
                generate_block_hash_extra_keys,
                kv_cache_config.num_blocks,
                drops_last_block=speculative is not None and speculative.use_eagle_block_drop(),
            )

    # ---- scheduler side --------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "this connector belongs to a worker"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        handshakes = [each.handshake for _, each in sorted(metadata.items()) if isinstance(each, KvtierHandshake)]
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        if len(handshakes) != ranks:
            raise ArgumentError(
                f"{len(handshakes)} of {ranks} workers sent kvtier's handshake: if a MultiConnector has several "
                f"connectors with a handshake, list KvtierConnector first"
            )
        self.scheduler.start(handshakes)
        self._collector = Collector(self.scheduler.manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler.use_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self.scheduler.num_matched(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.on_allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        schemes = {store.config.name: store.scheme for store in self._config.stores}
        sources: dict[CacheHitSource, int] = {}
        for tier, count in self.scheduler.tokens_from(request).items():
            source = _SOURCES.get(schemes.get(tier, tier), CacheHitSource.EXTERNAL_UNSPECIFIED)
            if count:
                sources[source] = sources.get(source, 0) + count
        if sum(sources.values()) != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KvtierMetadata(self.scheduler.build_step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvtierWorkerMetadata):
            self.scheduler.on_reports(meta.reports)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.on_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.will_free_blocks

    def reset_cache(self) -> bool | None:
        self.scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        return ()

    # ---- worker side -----------------------------------------------------------------------------------------------

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None, "register_kv_caches was not called"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, parallel = self._kv_cache_config, self._vllm_config.parallel_config
        group = config.kv_cache_groups[0]
        tensor_parallel = parallel.tensor_parallel_size
        has_heads = any(spec.head_size_v != 0 and spec.max_tp_shards != 1 for spec in _specs_of(group))
        cache, pages = device_cache_of(kv_caches, group.layer_names, config.num_blocks, has_heads=has_heads)
        total_heads = self._vllm_config.model_config.get_total_num_kv_heads()
        replicas = max(config.kv_tp_replicas, tensor_parallel // total_heads)
        if replicas > 1 and has_heads and self._config.kv_shards not in (0, tensor_parallel):
            raise ArgumentError(
                f"{replicas} ranks hold the same KV heads, so kv_shards must be the tensor-parallel size "
                f"{tensor_parallel}, got {self._config.kv_shards}"
            )
        page_format = _page_format(self._vllm_config, config, group)
        if replicas > 1 and has_heads:
            page_format += f" {tensor_parallel} ranks"
        namespace = namespace_of(
            self._config, self._vllm_config, cache.group, tensor_parallel if has_heads else 1, page_format
        )
        rank = parallel.rank % tensor_parallel
        sharding = Sharding(rank, tensor_parallel, self._config.kv_shards or tensor_parallel)
        self._worker = self.make_worker(namespace, cache, sharding)
        if self._config.verify_loads:
            self._worker.verify_loads(pages)

    def make_worker(self, namespace: Any, cache: Any, sharding: Sharding) -> WorkerSide:
        """Return the worker side. Tests override this to inject failures."""
        return WorkerSide(self._config, namespace, cache, sharding)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return KvtierHandshake(self.worker.handshake)

    def _step(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvtierMetadata)
        return metadata.step

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KvtierMetadata)
        self.worker.begin_step(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.start_early(self._step())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are asynchronous: a request is not in a step before its load has ended

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return  # whole blocks are saved after the forward pass

    def wait_for_save(self) -> None:
        self.worker.start_others(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self.worker.poll(is_idle=self._step().is_idle)
        self._reports += results.reports
        if self._drops_blocks:
            return KVConnectorTransferResults(finished_recving=results.loaded, failed_recving=results.failed_requests)
        self._failed_blocks |= results.failed_blocks
        return KVConnectorTransferResults(finished_recving=results.loaded)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports, self._reports = tuple(self._reports), []
        return KvtierWorkerMetadata(reports) if reports else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ---- statistics and class methods ------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        now = time.monotonic()
        if self._scheduler is None or now < self._next_stats:
            return None
        self._next_stats = now + _STATS_SECONDS
        side = self._scheduler
        return KvtierStats(data=self._collector.collect(side.num_held_blocks, side.num_skipped_blocks))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvtierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnectorPromMetrics:
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """With `layout: auto`, request block-first cache tensors on CUDA, so that one copy transfers a block."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        is_auto = ConnectorConfig.parse(extra).layout == "auto"
        return "BLHNC" if is_auto and current_platform.is_cuda() else None


def _check_supported(vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
    """Raise an error if kvtier does not support the version of vLLM, its configuration, or the attention layers."""
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if version < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise UnavailableError(f"kvtier needs vLLM {wanted} or newer, this is {vllm.__version__}")
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role != "kv_both":
        raise ArgumentError(f'KvtierConnector loads and saves: set "kv_role": "kv_both", got {transfer.kv_role!r}')
    if transfer.kv_load_failure_policy != "recompute" and not config.allow_fail_policy:
        raise ArgumentError(
            'vLLM would fail every request whose load failed: set "kv_load_failure_policy": "recompute" in '
            '--kv-transfer-config, or "allow_fail_policy": true in kv_connector_extra_config'
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ArgumentError(f"KvtierConnector does not support {name} = {getattr(parallel, name)}")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not all(map(_is_supported, _specs_of(groups[0]))):
        kinds = ", ".join(sorted({type(spec).__name__ for group in groups for spec in _specs_of(group)}))
        raise ArgumentError(
            f"KvtierConnector supports models with one group of attention layers, this model has {len(groups)} groups "
            f"({kinds}); hybrid and state-space models are not supported"
        )


def _page_format(vllm_config: Any, kv_cache_config: Any, group: Any) -> str:
    """Describe the form of a page (one layer of a block): platform, backends, layout, quantization, CPU features."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = sorted({layers[name].get_attn_backend().get_name() for name in group.layer_names if name in layers})
    specs = _specs_of(group)
    modes = sorted({str(spec.kv_quant_mode) for spec in specs})
    parts = [current_platform.device_type, *backends, kv_cache_config.kv_cache_layout, *modes]
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        kind = vllm_config.cache_config.cache_dtype
        parts += sorted({_get_attn_isa(spec.dtype, spec.block_size, spec.head_size, kind) for spec in specs})
    return " ".join(map(str, parts))


def _is_supported(spec: Any) -> bool:
    """True if each block of tokens has its own device block, which vLLM does not overwrite while a request uses it."""
    kinds = FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec
    return isinstance(spec, kinds) and not hasattr(spec, "rswa_window")


def drops_blocks(kv_cache_config: Any) -> bool:
    """Return True if some layers have attention windows. vLLM may then free blocks that a window has passed."""
    groups = kv_cache_config.kv_cache_groups
    return not all(isinstance(spec, FullAttentionSpec) for group in groups for spec in _specs_of(group))


def _specs_of(group: Any) -> list[Any]:
    """Return the specs of a group: one spec for all layers, or one per layer if the page sizes differ."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]
