"""Run vLLM's schedulers with kvtier's scheduler side and simulated workers, without weights, threads or a clock.

    SteppedEngine      vLLM's EngineCore loop: schedule, execute, update, with one or two batches in flight
    SimulatedWorker    a rank: device and host memory, a memory store, and transfers that the test ends

The KV of a position is a digest of the salt and of all tokens up to the position. In each step, the test checks the KV
of every position that a rank reads. Wrong loads, saves or block references thus fail the test at the first wrong read.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier.index import Namespace
from kvtier.integrations.vllm import register
from kvtier.integrations.vllm.connector import (
    KvtierHandshake,
    KvtierMetadata,
    KvtierWorkerMetadata,
    drops_blocks,
)
from kvtier.integrations.vllm.worker_side import Handshake, Load, StepPlan, failed_blocks
from kvtier.messages import Report, Route, StoreLookup, TransferRequest, TransferResult, split_keys

BLOCK = 4
VOCABULARY = 64
EOS = 63
MAX_LENGTH = 64


@dataclass(frozen=True)
class EngineSetup:
    """Sizes and settings of a SteppedEngine."""

    is_async: bool = False
    num_device_blocks: int = 24
    num_host_blocks: int = 32
    num_host_ready: int = 32
    num_ranks: int = 1
    max_running: int = 4
    max_step_tokens: int = 12
    num_drafts: int = 0
    window: int = 0
    """Sliding window of all layers in tokens, or 0 for full attention."""
    policy: str = "fcfs"
    caches_prefixes: bool = True
    extra: tuple[tuple[str, Any], ...] = ()
    """Settings in kv_connector_extra_config."""


@functools.lru_cache(1 << 16)
def kv_of(salt: str, tokens: tuple[int, ...]) -> int:
    """Return the KV of the last token: a digest of the salt and of all tokens."""
    data = salt.encode() + b"\0" + np.array(tokens, "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


@dataclass
class Conversation:
    """The expected tokens of a request. Each generated token depends on all tokens before it."""

    prompt: tuple[int, ...]
    salt: str
    version: int = 0
    """Version of the weights that compute the KV."""
    tokens: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)

    def extend(self, count: int) -> None:
        """Compute the KV of the first `count` positions, and the tokens that are generated from this KV."""
        if not self.tokens:
            self.tokens = list(self.prompt)
        while len(self.kv) < count:
            self.kv.append(kv_of(f"{self.version} {self.salt}", tuple(self.tokens[: len(self.kv) + 1])))
            if len(self.kv) == len(self.tokens):
                self.tokens.append(self.kv[-1] % VOCABULARY)

    def change_weights(self, version: int, sampled: list[int]) -> None:
        """Compute all KV with other weights from now on. The tokens sampled so far stay the same."""
        self.version = version
        self.tokens, self.kv = [*self.prompt, *sampled], []

    def token(self, position: int) -> int:
        self.extend(position)
        return self.tokens[position]


class Garbage:
    """Creates values that differ from the KV of all tokens."""

    def __init__(self) -> None:
        self._next = 0

    def value(self) -> int:
        self._next -= 1
        return self._next

    def fill(self, memory: np.ndarray, block: int) -> None:
        memory[block] = self.value()


@dataclass
class PendingCopy:
    """A transfer that a rank has started."""

    request: TransferRequest
    load: Load | None
    namespace: bytes


class SimulatedWorker:
    """One rank. A copy stays in flight until the test calls `finish`.

    With `fails_requests`, a failed load fails the whole request. Otherwise, only the blocks that did not arrive fail.
    """

    def __init__(self, rank: int, setup: EngineSetup, namespace: bytes, *, fails_requests: bool) -> None:
        self.rank, self._namespace = rank, namespace
        self._store: dict[bytes, np.ndarray] = {}
        self.garbage = Garbage()
        self.device = np.zeros((setup.num_device_blocks, BLOCK), np.int64)
        self.host = np.zeros((setup.num_host_blocks, BLOCK), np.int64)
        for memory in (self.device, self.host):
            for block in range(len(memory)):
                self.garbage.fill(memory, block)
        self.copies: list[PendingCopy] = []
        self.damaged: set[int] = set()
        self.num_host_ready = min(setup.num_host_ready, setup.num_host_blocks)
        self._results: list[TransferResult] = []
        self._lookups: list[StoreLookup] = []
        self._grown = 0
        self._new_damage: set[int] = set()
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._fails_requests = fails_requests
        self._epoch = 0

    def begin_step(self, step: StepPlan) -> None:
        """Start the loads of a step. The target blocks of a load contain garbage until the load ends."""
        if step.namespace:
            self._namespace = step.namespace
        for transfer in step.plan.transfers:
            if transfer.route is Route.HOST_TO_DEVICE:
                self.copies.append(PendingCopy(transfer, step.loads[transfer.id], self._namespace))
                for block in transfer.targets.tolist():
                    self.garbage.fill(self.device, block)

    def end_step(self, step: StepPlan) -> None:
        """Apply the drops and probes of `step.plan` to the store. Then start all transfers except loads."""
        plan = step.plan
        self._epoch = plan.epoch
        for drop in plan.drops:
            for key in split_keys(drop.keys) if drop.keys else list(self._store):
                self._store.pop(self._named(key), None)
        for probe in plan.probes:
            keys = split_keys(probe.keys) if probe.keys else [key[-32:] for key in self._store]
            present = b"".join(key for key in keys if self._named(key) in self._store)
            absent = b"".join(key for key in keys if self._named(key) not in self._store)
            self._lookups.append(StoreLookup(probe.store, present, absent, probe.id))
        for transfer in plan.transfers:
            if transfer.route is not Route.HOST_TO_DEVICE:
                self.copies.append(PendingCopy(transfer, None, self._namespace))

    def finish(self, copy: PendingCopy, failing: set[int]) -> None:
        """End a transfer. The blocks at the positions `failing` in the transfer do not arrive."""
        self.copies.remove(copy)
        transfer = copy.request
        arrived = bytearray(
            self._copy_block(transfer, number, copy.namespace) if number not in failing else 0
            for number in range(transfer.num_blocks)
        )
        ok = 0 not in arrived
        result = TransferResult(transfer.id, ok, 0, 0.0, "" if ok else "injected", b"" if ok else bytes(arrived))
        self._results.append(result)
        if copy.load is not None:
            self._loaded.add(copy.load.request_id)
            if not ok and self._fails_requests:
                self._failed_requests.add(copy.load.request_id)
            elif not ok:
                self._failed |= failed_blocks(copy.load, result)

    def _copy_block(self, transfer: TransferRequest, number: int, namespace: bytes) -> int:
        """Copy one block and return 1. If the source block is damaged or missing, return 0."""
        route = transfer.route
        if route is Route.DEVICE_TO_HOST:
            slot = int(transfer.targets[number])
            self.host[slot] = self.device[transfer.sources[number]]
            self.damaged.discard(slot)
        elif route is Route.HOST_TO_DEVICE:
            slot = int(transfer.sources[number])
            if slot in self.damaged:
                return 0
            self.device[transfer.targets[number]] = self.host[slot]
        else:
            key = namespace + split_keys(transfer.keys)[number]
            if route is Route.HOST_TO_STORE:
                slot = int(transfer.sources[number])
                if slot in self.damaged:
                    return 0
                self._store[key] = self.host[slot].copy()
            else:
                slot = int(transfer.targets[number])
                if key not in self._store:
                    return 0
                self.host[slot] = self._store[key]
                self.damaged.discard(slot)
        return 1

    def _named(self, key: bytes) -> bytes:
        return self._namespace + key

    def grow(self, num_slots: int) -> None:
        self.num_host_ready = min(self.num_host_ready + num_slots, len(self.host))
        self._grown = self.num_host_ready

    def damage(self, slot: int) -> None:
        self.garbage.fill(self.host, slot)
        self.damaged.add(slot)
        self._new_damage.add(slot)

    def output(self) -> KVConnectorOutput:
        """Return the results since the last call, like the worker side of the connector."""
        damaged = np.array(sorted(self._new_damage & self.damaged), "<i4").tobytes()
        parts = tuple(self._results), tuple(self._lookups), self._grown, damaged
        reports = (Report(self._epoch, self.rank, *parts),) if any(parts) else ()
        output = KVConnectorOutput(
            finished_recving=self._loaded or None,
            invalid_block_ids=self._failed,
            failed_recving=self._failed_requests,
            kv_connector_worker_meta=KvtierWorkerMetadata(reports) if reports else None,
        )
        self._results, self._lookups, self._grown = [], [], 0
        self._loaded, self._failed, self._failed_requests, self._new_damage = set(), set(), set(), set()
        return output


@dataclass
class RunningRow:
    """The state of a request in the model runner."""

    conversation: Conversation
    table: list[int]
    num_computed: int
    num_known: int
    """Number of prompt tokens and sampled tokens."""
    drafts: list[int] = field(default_factory=list)


@dataclass
class Batch:
    """A scheduled step. `output` is set when the step has been executed."""

    scheduled: Any
    output: ModelRunnerOutput | None = None
    drafts: DraftTokenIds | None = None


@functools.cache
def _base_config(model: Path, num_drafts: int, policy: str, caches_prefixes: bool) -> Any:
    speculative = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 2}
    return EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_hybrid_kv_cache_manager=True,
        max_model_len=MAX_LENGTH,
        block_size=32,
        scheduling_policy=policy,
        enable_prefix_caching=caches_prefixes,
        kv_cache_memory_bytes=64 << 20,
        speculative_config=speculative if num_drafts else None,
    ).create_engine_config()


class SteppedEngine:
    """vLLM's scheduler with simulated workers. The test runs the scheduler step by step."""

    def __init__(self, model: Path, setup: EngineSetup) -> None:
        self.setup = setup
        register()
        config = copy.deepcopy(_base_config(model, setup.num_drafts, setup.policy, setup.caches_prefixes))
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvtierConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"host_bytes": 1 << 20} | dict(setup.extra),
        )
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = setup.num_device_blocks
        limits = config.scheduler_config
        limits.async_scheduling = setup.is_async
        limits.max_num_seqs, limits.max_num_batched_tokens = setup.max_running, setup.max_step_tokens
        limits.max_num_scheduled_tokens = setup.max_step_tokens
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        spec = SlidingWindowSpec(**shape, sliding_window=setup.window) if setup.window else FullAttentionSpec(**shape)
        caches = KVCacheConfig(setup.num_device_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = AsyncScheduler if setup.is_async else Scheduler
        self.scheduler = kind(config, caches, StructuredOutputManager(config), BLOCK, log_stats=True)
        self.connector: Any = self.scheduler.connector
        self.side = self.connector.scheduler
        self.now = 0.0
        self.side._clock = lambda: self.now
        num_ready = min(setup.num_host_ready, setup.num_host_blocks)
        namespace = Namespace("model", block_tokens=BLOCK)
        handshake = KvtierHandshake(Handshake(namespace, setup.num_host_blocks, num_ready))
        config.parallel_config.tensor_parallel_size = setup.num_ranks
        self.connector.set_xfer_handshake_metadata(dict.fromkeys(range(setup.num_ranks), handshake))
        self.workers = [
            SimulatedWorker(rank, setup, namespace.fingerprint, fails_requests=drops_blocks(caches))
            for rank in range(setup.num_ranks)
        ]
        self._aggregator = KVOutputAggregator(self.connector.get_finished_count() or setup.num_ranks)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._rows: dict[str, RunningRow] = {}
        self.requests: dict[str, Request] = {}
        self.conversations: dict[str, Conversation] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.batches: deque[Batch] = deque()
        self.counts: Counter[str] = Counter()
        self.guesses_right = lambda: True
        """Returns True if the next draft token should be correct."""

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        salt: str = "",
        options: dict[str, Any] | None = None,
        priority: int = 0,
        skips_cache: bool = False,
    ) -> str:
        name = f"r{len(self.conversations)}"
        sampling = SamplingParams(max_tokens=max_tokens, skip_reading_prefix_cache=skips_cache or None)
        sampling.update_from_generation_config({}, EOS)
        request = Request(
            name,
            list(prompt),
            sampling,
            None,
            cache_salt=salt or None,
            block_hasher=self._hasher,
            priority=priority,
            arrival_time=float(len(self.conversations)),
        )
        request.kv_transfer_params = {"kvtier": options} if options else None
        self.requests[name], self.outputs[name] = request, []
        self.conversations[name] = Conversation(tuple(prompt), salt, self.counts["new weights"])
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.finished |= {each.request_id for each in self._abort(name)}

    def _abort(self, name: str) -> list[Request]:
        return self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def reset(self, *, preempts: bool = False, is_deep: bool = False) -> bool:
        """Reset vLLM's prefix cache, and the connector if `is_deep`. Return True if vLLM has reset its cache.

        If the setup is not async, first finish all batches. With `preempts`, preempt running requests, except while a
        batch is in flight or other work holds blocks.
        """
        while self.batches and not self.setup.is_async:
            self.execute()
            self.update()
        is_held = self.side.has_work or self.scheduler.deferred_frees or self.scheduler.kv_holding_waiting
        if preempts and (is_held or self.batches):
            preempts = False
        was_reset = self.scheduler.reset_prefix_cache(preempts, is_deep)
        if was_reset and is_deep and not self.batches and self.side._config.on_reset == "weights":
            self.counts["new weights"] += 1
            for name, conversation in self.conversations.items():
                conversation.change_weights(self.counts["new weights"], self.outputs[name])
        return was_reset

    @property
    def unfinished(self) -> list[str]:
        return [name for name in self.requests if name not in self.finished]

    # ---- steps -----------------------------------------------------------------------------------------------------

    def schedule(self) -> bool:
        """Schedule a batch, unless the queue of batches is full or vLLM has no requests.

        Return True if a batch was scheduled.
        """
        if len(self.batches) > self.setup.is_async or not self.scheduler.has_requests():
            return False
        self.batches.append(Batch(self.scheduler.schedule()))
        self.counts["preempted"] += len(self.batches[-1].scheduled.preempted_req_ids or ())
        return True

    def execute(self) -> bool:
        """Execute the oldest batch that has not been executed yet."""
        batch = next((each for each in self.batches if each.output is None), None)
        if batch is None:
            return False
        scheduled = batch.scheduled
        self._update_rows(scheduled)
        metadata = scheduled.kv_connector_metadata
        assert isinstance(metadata, KvtierMetadata)
        names = list(scheduled.num_scheduled_tokens)
        for worker in self.workers:
            worker.begin_step(metadata.step)
        sampled = [self._forward(name, scheduled.num_scheduled_tokens[name]) for name in names]
        for worker in self.workers:
            worker.end_step(metadata.step)
        outputs = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: number for number, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=worker.output(),
            )
            for worker in self.workers
        ]
        batch.output = self._aggregator.aggregate(outputs)
        batch.drafts = self._draft(names)
        return True

    def update(self) -> bool:
        """Update the scheduler with the result of the oldest batch, if this batch has been executed."""
        if not self.batches or self.batches[0].output is None:
            return False
        batch = self.batches.popleft()
        outputs = self.scheduler.update_from_output(batch.scheduled, batch.output)
        if batch.drafts is not None and not self.setup.is_async:
            self.scheduler.update_draft_token_ids(batch.drafts)
        for group in outputs.values():
            for each in group.outputs:
                self.outputs[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.finished.add(each.request_id)
        return True

    def step(self) -> bool:
        """Schedule a batch if possible; otherwise finish the oldest batch. Return False if there is nothing to do."""
        if self.schedule():
            return True
        self.execute()
        return self.update()

    def _update_rows(self, scheduled: Any) -> None:
        """Update the rows from the scheduler's output alone, as the model runner does."""
        for name in scheduled.finished_req_ids:
            self._rows.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            conversation = self.conversations[new.req_id]
            num_known = len(conversation.prompt)
            self._rows[new.req_id] = RunningRow(conversation, [*new.block_ids[0]], new.num_computed_tokens, num_known)
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self._rows[name]
            if name in cached.resumed_req_ids:
                num_known = len(cached.all_token_ids[name])
                self._rows[name] = RunningRow(row.conversation, [*blocks[0]], num_computed, num_known)
            else:
                row.table += blocks[0] if blocks is not None else []
                assert self.setup.num_drafts or row.num_computed == num_computed, f"{name}: the positions differ"
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            if not self.setup.is_async:
                self._rows[name].drafts = drafts

    def _forward(self, name: str, count: int) -> list[int]:
        """Check all KV that a request reads, write its new KV, and return the sampled tokens."""
        row = self._rows[name]
        conversation, first, stop = row.conversation, row.num_computed, row.num_computed + count
        conversation.extend(stop + 1)
        self._check_reads(name, row)
        # Positions >= num_known contain draft tokens. If a draft token is wrong, its KV and all later KV are wrong.
        num_right = min(stop, row.num_known)
        while num_right < stop and row.drafts[num_right - row.num_known :][:1] == [conversation.tokens[num_right]]:
            num_right += 1
        for position in range(first, stop):
            block = row.table[position // BLOCK]
            assert block, f"{name}: position {position} has no block"
            for worker in self.workers:
                kv = conversation.kv[position] if position < num_right else worker.garbage.value()
                worker.device[block, position % BLOCK] = kv
        row.num_computed, row.drafts = num_right, []
        self.counts["computed"] += count
        if stop < row.num_known:
            return []
        sampled = conversation.tokens[row.num_known : num_right + 1]
        row.num_known = num_right + 1
        return sampled

    def _check_reads(self, name: str, row: RunningRow) -> None:
        first = row.num_computed
        begin = max(0, first + 1 - self.setup.window) if self.setup.window else 0
        for worker in self.workers:
            for position in range(begin, first):
                block = row.table[position // BLOCK]
                assert worker.device[block, position % BLOCK] == row.conversation.kv[position], (
                    f"{name} on rank {worker.rank}: device block {block} has wrong KV at position {position}"
                )

    def _draft(self, names: list[str]) -> DraftTokenIds | None:
        """Propose draft tokens for the requests of a step."""
        if not self.setup.num_drafts:
            return None
        for name in names:
            row = self._rows[name]
            positions = range(row.num_known, row.num_known + self.setup.num_drafts)
            row.drafts = [
                row.conversation.token(position) if self.guesses_right() else VOCABULARY for position in positions
            ]
        return DraftTokenIds(names, [[*self._rows[name].drafts] for name in names])

    # ---- checks ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the invariants of kvtier, the references to vLLM's blocks, and the tokens generated so far."""
        self.side.check()
        pool = self.scheduler.kv_cache_manager.block_pool
        expected: Counter[int] = Counter()
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for table in manager.req_to_blocks.values():
                expected.update(block.block_id for block in table)
        for _, blocks in self.scheduler.deferred_frees:
            expected.update(block.block_id for block in blocks)
        for held, _ in self.side._saves.values():
            expected.update(held)
        found = {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null}
        del expected[0]  # the null block of vLLM
        assert found == dict(expected)
        for name, tokens in self.outputs.items():
            conversation = self.conversations[name]
            conversation.extend(len(conversation.prompt) + len(tokens))
            assert tokens == conversation.tokens[len(conversation.prompt) :][: len(tokens)], name

    def finish_copies(self) -> None:
        for worker in self.workers:
            for each in list(worker.copies):
                worker.finish(each, set())

    def end_copies(self, draws: random.Random, ending: float, failing: float) -> None:
        """End each transfer of each rank with probability `ending`. Each block fails with probability `failing`."""
        for worker in self.workers:
            for each in list(worker.copies):
                if draws.random() < ending:
                    blocks = range(each.request.num_blocks)
                    worker.finish(each, {block for block in blocks if draws.random() < failing})

    def drain(self, max_steps: int = 2000) -> None:
        """Finish all requests, loads and saves. Check that no device block is still in use."""
        for _ in range(max_steps):
            self.finish_copies()
            self.now += 1.0
            if not self.step():
                break
        else:
            statuses = {name: str(self.requests[name].status) for name in self.unfinished}
            raise AssertionError(f"the engine still has work: {statuses}, connector has work: {self.side.has_work}")
        assert not self.unfinished, self.unfinished
        self.check()
        side, scheduler = self.side, self.scheduler
        left = [side._requests, side._loads, side._saves, side._orphans, side._offers]
        left += [scheduler.requests, scheduler.running, scheduler.deferred_frees]
        assert not any(left), left
        in_flight = {each.transfer.route for each in side.manager.transfers.in_flight.values()}
        assert in_flight <= {Route.HOST_TO_STORE, Route.STORE_TO_HOST}
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1

    def totals(self) -> Counter[str]:
        """Return the number of events by name, so that a test can check which events occurred."""
        for route, stats in self.side.manager.transfers.counts.items():
            self.counts[route.value] += stats.num_blocks
            self.counts[f"{route.value} failed"] += stats.num_failed
        return self.counts
