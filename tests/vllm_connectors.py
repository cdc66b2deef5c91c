"""A KvtierConnector with injected faults. vLLM processes import it through `kv_connector_module_path`.

The environment variable KVTIER_FAULTS contains initial values for fields of the class Faults as JSON. Functions of
vllm_scenarios change the faults while vLLM runs.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvtier.integrations.vllm.connector import KvtierConnector
from kvtier.integrations.vllm.worker_side import WorkerSide
from kvtier.memory.copy_paths import run_path
from kvtier.memory.copy_plan import DST
from kvtier.worker.controller import CacheController


@dataclass
class Faults:
    """Faults of the copies between device and host."""

    fail_loads: int = 0
    """If this number is n > 0, every n-th load raises an exception."""
    fail_saves: int = 0
    """If this number is n > 0, every n-th save raises an exception."""
    rank: int = -1
    """The rank on which copies fail and `ready_slots` applies, or -1 for all ranks."""
    ready_slots: int = 0
    """If greater than 0, at most this number of host slots is reported as ready."""
    num_loads: int = 0
    num_saves: int = 0
    loads_may_run: threading.Event = field(default_factory=threading.Event)
    saves_may_run: threading.Event = field(default_factory=threading.Event)
    """A load waits until `loads_may_run` is set, and a save until `saves_may_run` is set. Both are set at the start."""

    def __post_init__(self) -> None:
        self.loads_may_run.set()
        self.saves_may_run.set()


class SlowController(CacheController):
    """A controller that reports at most `ready_slots` host slots as ready, as if host memory were growing."""

    ready_slots = 0

    @property
    def num_host_ready(self) -> int:
        return min(self.ready_slots, super().num_host_ready)


class FaultyConnector(KvtierConnector):
    """A KvtierConnector whose copies can fail or wait."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.faults = Faults(**json.loads(os.environ.get("KVTIER_FAULTS", "{}")))
        storages = [each.untyped_storage() for each in kv_caches.values()]
        self._device_memory = [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages]
        super().register_kv_caches(kv_caches)

    def make_worker(self, namespace: Any, cache: Any, sharding: Any) -> WorkerSide:
        self._rank = sharding.rank
        worker = WorkerSide(self._config, namespace, cache, sharding, mover=self._move)
        if self.faults.ready_slots and self.faults.rank in (-1, self._rank):
            SlowController.ready_slots = self.faults.ready_slots
            worker.controller.__class__ = SlowController
        return worker

    def _move(self, path: Any, context: Any, pieces: Any) -> Any:
        faults = self.faults
        target = int(np.asarray(pieces.table)[DST][0])
        if any(first <= target < end for first, end in self._device_memory):
            faults.loads_may_run.wait()
            faults.num_loads += 1
            count, every, kind = faults.num_loads, faults.fail_loads, "load"
        else:
            faults.saves_may_run.wait()
            faults.num_saves += 1
            count, every, kind = faults.num_saves, faults.fail_saves, "save"
        if every and count % every == 0 and faults.rank in (-1, self._rank):
            raise RuntimeError(f"{kind} {count} failed, as injected by the test")
        return run_path(path, context, pieces)


def faults_here() -> Faults:
    """Return the faults of the connector's worker side in this process."""
    return get_kv_transfer_group().faults
