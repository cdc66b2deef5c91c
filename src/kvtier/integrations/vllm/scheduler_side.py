"""SchedulerSide: the part of the connector in vLLM's EngineCore. It plans transfers and touches no tensors.

    on_new_request ── num_matched ── on_allocated ── (load) ── build_step .. build_step ── on_finished
      prefetch          offer          load            │           save        save           last save
                                        request waits ─┘

An offer is a lease on host blocks between `num_matched` and `on_allocated`. It ends in the same scheduling step, even
if vLLM does not use it, so that waiting requests hold no host memory. Loads and saves have their own leases. A save
also holds a reference to its device blocks, so that vLLM does not reuse them before every rank has reported the save:

    vLLM's block pool:  touch ──────────────── free_blocks
    manager:            save planned ── ranks copy ── apply
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvtier.cache.allocation import Allocation
from kvtier.cache.foreign import ForeignDevice, SavePoint
from kvtier.cache.in_flight import PendingTransfer
from kvtier.cache.manager import CacheManager
from kvtier.cache.prefetch import Prefetch
from kvtier.errors import ArgumentError
from kvtier.index import Chain
from kvtier.integrations.vllm.chains import ChainBuilder, ExtraKeys
from kvtier.integrations.vllm.config import ConnectorConfig, RequestOptions
from kvtier.integrations.vllm.worker_side import Handshake, Load, StepPlan
from kvtier.messages import Report, Route


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request of vLLM, from on_new_request to on_finished."""

    request: Any
    chain: Chain
    options: RequestOptions
    prefetch: Prefetch | None = None
    offer: Allocation | None = None
    num_local: int = 0
    """Number of leading blocks that vLLM had on the device at the last `num_matched`."""
    saved: SavePoint = field(default_factory=SavePoint)
    may_save: bool = True
    may_load: bool = True
    has_run: bool = False
    """True if the request was in a step since its last admission. Otherwise, its blocks are possibly incomplete."""
    was_loaded: bool = False
    saves: set[int] = field(default_factory=set)
    """Ids of saves in flight, except for saves that began before a preemption."""
    tokens_from: dict[str, int] = field(default_factory=dict)
    """Number of loaded tokens by tier."""
    miss: str = ""


class SchedulerSide:
    """Finds, loads and saves the blocks of vLLM's requests. All calls come from the thread of EngineCore."""

    def __init__(
        self,
        config: ConnectorConfig,
        extra_keys: ExtraKeys,
        num_device_blocks: int,
        *,
        drops_last_block: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `drops_last_block`, offer one block less: EAGLE needs the hidden states of the last matched block."""
        self._config, self._extra_keys, self._clock = config, extra_keys, clock
        self._num_device_blocks = num_device_blocks
        self._drops_last_block = drops_last_block
        self._requests: dict[str, TrackedRequest] = {}
        self._offers: list[TrackedRequest] = []
        self._planned_loads: dict[int, Load] = {}
        self._loads: dict[int, str] = {}
        """Load in flight -> request id."""
        self._saves: dict[int, tuple[list[int], TrackedRequest]] = {}
        """Save in flight -> device blocks that it holds, and its request."""
        self._orphans: set[int] = set()
        """Saves in flight whose request has released its own references to the device blocks."""
        self._new_namespace = b""
        self.num_skipped_blocks = 0
        """Full blocks of finished requests that were not saved, for example because host memory was full."""

    # ---- start -----------------------------------------------------------------------------------------------------

    def start(self, handshakes: Sequence[Handshake]) -> None:
        """Create the CacheManager. The workers must have the same namespace and the same size of host memory."""
        first = handshakes[0]
        if any(
            (each.namespace, each.num_host_blocks) != (first.namespace, first.num_host_blocks) for each in handshakes
        ):
            raise ArgumentError(f"the workers have different caches: {[*handshakes]}")
        self.manager = CacheManager(
            first.namespace,
            self._config.cache_config(first.num_host_blocks, self._num_device_blocks),
            num_ranks=len(handshakes),
            num_host_ready=min(each.num_host_ready for each in handshakes),
        )
        self._chains = ChainBuilder(first.namespace, self._extra_keys)
        self._block_tokens = first.namespace.block_tokens

    def use_pool(self, pool: Any) -> None:
        """Set vLLM's BlockPool, in which saves hold references to their device blocks."""
        self._pool = pool

    @property
    def _device(self) -> ForeignDevice:
        assert self.manager.foreign is not None
        return self.manager.foreign

    # ---- admission -------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Begin to fetch the request's blocks from stores."""
        options = RequestOptions.parse(request.kv_transfer_params)
        tracked = TrackedRequest(request, self._chains.build(request), options)
        tracked.may_save, tracked.may_load = options.save, options.load
        self._requests[request.request_id] = tracked
        if options.load:
            tracked.prefetch = self.manager.prefetch(tracked.chain, now=self._clock(), retention=options.retention)

    def num_matched(self, request: Any, num_computed: int) -> int | None:
        """Return the number of tokens to load after the first `num_computed`; None while a prefetch is running.

        vLLM calls this in every step until the request is admitted. Each call first withdraws the previous offer.
        """
        tracked = self._tracked(request)
        self._withdraw(tracked)
        if not tracked.may_load:
            return 0
        now, prefetch = self._clock(), tracked.prefetch
        if prefetch is not None and not self.manager.is_prefetched(prefetch, now=now):
            return None
        retention = tracked.options.retention
        offer = self.manager.match(tracked.chain, now=now, retention=retention, prefetch=prefetch)
        if prefetch is not None and self.manager.retry_prefetch(prefetch, offer, now=now):
            self.manager.abort(offer, now=now)
            return None
        tracked.num_local = num_computed // self._block_tokens
        count = offer.lease.num_matched - self._drops_last_block - tracked.num_local
        if tracked.options.explain:
            tracked.miss = str(self.manager.explain(offer))
        if count <= 0:
            self.manager.abort(offer, now=now)
            return 0
        tracked.offer = offer
        self._offers.append(tracked)
        return count * self._block_tokens

    def on_allocated(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> None:
        """Plan a load of `num_tokens` offered tokens into device blocks, and end the offer and the prefetch.

        Blocks that vLLM has dropped (outside the window) are not loaded. After a load, vLLM calls this with 0 tokens.
        """
        tracked, now = self._tracked(request), self._clock()
        if num_tokens and tracked.offer is not None:
            stop = tracked.num_local + num_tokens // self._block_tokens
            first = max(tracked.num_local, min(self._num_dropped(block_ids), stop - 1))
            blocks = np.array(block_ids[first:stop], np.int32)
            number = self._device.load(tracked.offer, first, blocks, tracked.prefetch)
            self._planned_loads[number] = Load(request.request_id, tuple(blocks.tolist()))
            self._loads[number] = request.request_id
            tracked.tokens_from, tracked.was_loaded = tracked.offer.tokens_from, True
            self.manager.on_scheduled(tracked.offer, now=now)
            self.manager.finish(tracked.offer, now=now)
            tracked.offer = None
        self._withdraw(tracked)
        self._end_prefetch(tracked)

    def tokens_from(self, request: Any) -> Mapping[str, int]:
        """Return the number of loaded tokens of a request by tier."""
        return self._tracked(request).tokens_from

    # ---- steps -----------------------------------------------------------------------------------------------------

    def build_step(self, output: Any) -> StepPlan:
        """Plan the transfers of a step from vLLM's SchedulerOutput."""
        now, block_tokens = self._clock(), self._block_tokens
        for tracked in self._offers:
            self._withdraw(tracked)
        self._offers = []
        for request_id in output.preempted_req_ids or ():
            if request_id in self._requests:
                self._on_preempted(self._requests[request_id], now)
        for request_id, count in output.num_scheduled_tokens.items():
            running = self._requests.get(request_id)
            if running is None:
                continue
            running.has_run = True
            request = running.request
            # Draft tokens may be rejected. They are not in num_tokens, so their KV does not count as computed.
            num_full = min(request.num_computed_tokens + count, request.num_tokens) // block_tokens
            if num_full > running.saved.num_blocks and running.may_save:
                table = output.kv_connector_block_state.get_block_ids(request_id)[0]
                self._save(running, table, num_full, now)
        plan = self.manager.plan(now=now)
        loads, self._planned_loads = self._planned_loads, {}
        namespace, self._new_namespace = self._new_namespace, b""
        return StepPlan(plan, loads, not output.total_num_scheduled_tokens, namespace)

    def on_reports(self, reports: Iterable[Report]) -> list[PendingTransfer]:
        """Apply the workers' reports. Release the device blocks of finished saves. Return the completed transfers."""
        completed = []
        for report in reports:
            for done in self.manager.apply(report):
                completed.append(done)
                if done.transfer.route is Route.DEVICE_TO_HOST:
                    self._on_saved(done)
                elif done.transfer.route is Route.HOST_TO_DEVICE:
                    self._on_loaded(done)
        return completed

    def on_finished(self, request: Any, block_ids: Sequence[int]) -> dict[str, Any] | None:
        """Save the last full blocks. Return an explanation for the response if the request asked for it."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        now = self._clock()
        self._withdraw(tracked)
        self._end_prefetch(tracked)
        if tracked.has_run and (tracked.may_save or tracked.saved.is_over):
            num_full = min(request.num_computed_tokens, request.num_tokens) // self._block_tokens
            if num_full > tracked.saved.num_blocks:
                self._save(tracked, block_ids, num_full, now)
                self.num_skipped_blocks += max(0, self._num_savable(tracked, num_full) - tracked.saved.num_blocks)
        if tracked.has_run and not tracked.was_loaded:
            self._count_use(tracked, now)
        self._orphans |= tracked.saves
        if not tracked.options.explain:
            return None
        explanation: dict[str, Any] = {"tokens_from": dict(tracked.tokens_from), "miss": tracked.miss}
        if tracked.options.error:
            explanation["error"] = tracked.options.error
        return {"kvtier": explanation}

    def reset(self) -> None:
        """Drop all blocks in host memory. With `on_reset: weights`, also stop using all earlier blocks in stores."""
        namespace = None
        if self._config.on_reset == "weights":
            old = self.manager.namespace
            namespace = replace(old, revision=f"{old.revision.partition('+')[0]}+{secrets.token_hex(8)}")
            self._chains.namespace = namespace
            self._new_namespace = namespace.fingerprint
        for tracked in self._requests.values():
            self._withdraw(tracked)
            self._end_prefetch(tracked)
            tracked.saved = SavePoint()
            if namespace is not None:
                tracked.chain = self._chains.build(tracked.request)
                tracked.may_save = tracked.may_save and not tracked.has_run and not self._is_loading(tracked)
        self._offers = []
        self.manager.reset(namespace)

    @property
    def has_work(self) -> bool:
        """True if vLLM should run steps without requests: for new transfers, saves and loads, or a new namespace."""
        transfers = self.manager.transfers
        return bool(
            transfers.has_plan
            or self._saves
            or self._loads
            or any(queue.is_due for queue in self.manager.queues)
            or self._new_namespace
        )

    @property
    def will_free_blocks(self) -> bool:
        """True if some device blocks may become free when saves in flight complete."""
        return bool(self._orphans)

    @property
    def num_held_blocks(self) -> int:
        """Number of references to device blocks that saves hold."""
        return sum(len(blocks) for blocks, _ in self._saves.values())

    def check(self) -> None:
        self.manager.check()

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _tracked(self, request: Any) -> TrackedRequest:
        """Return the state of a request, with all its tokens in the chain."""
        if request.request_id not in self._requests:
            self.on_new_request(request)
        tracked = self._requests[request.request_id]
        if getattr(request, "resumable", False):  # a streaming session may replace earlier tokens
            tracked.chain = self._chains.build(request)
            tracked.saved = SavePoint()
        else:
            self._extend(tracked)
        return tracked

    def _extend(self, tracked: TrackedRequest) -> None:
        known = tracked.chain.num_tokens
        if known < tracked.request.num_tokens:
            tracked.chain.append(tracked.request.all_token_ids[known:])

    def _withdraw(self, tracked: TrackedRequest) -> None:
        if tracked.offer is not None:
            self.manager.abort(tracked.offer, now=self._clock())
            tracked.offer = None

    def _end_prefetch(self, tracked: TrackedRequest) -> None:
        if tracked.prefetch is not None:
            self.manager.end_prefetch(tracked.prefetch)
            tracked.prefetch = None

    def _save(self, tracked: TrackedRequest, table: Sequence[int], num_full: int, now: float) -> None:
        self._extend(tracked)
        num_full = min(self._num_savable(tracked, num_full), tracked.chain.num_blocks, len(table))
        if num_full <= tracked.saved.num_blocks:
            return
        started = self._device.save(
            tracked.chain,
            table,
            tracked.saved,
            num_full,
            num_dropped=self._num_dropped(table),
            now=now,
            retention=tracked.options.retention,
        )
        tracked.may_save = not tracked.saved.is_over
        for number, blocks in started.items():
            held = blocks.tolist()
            self._pool.touch([self._pool.blocks[block] for block in held])
            self._saves[number] = held, tracked
            tracked.saves.add(number)

    def _num_savable(self, tracked: TrackedRequest, num_full: int) -> int:
        """Return how many of a request's leading full blocks the setting `save_generated` allows to save."""
        num_prompt = tracked.request.num_prompt_tokens // self._block_tokens
        return num_full if self._config.save_generated else min(num_full, num_prompt)

    def _num_dropped(self, table: Sequence[int]) -> int:
        """Return the number of leading null blocks, which vLLM has dropped because they are outside the window."""
        null, count = self._pool.null_block.block_id, 0
        while count < len(table) and table[count] == null:
            count += 1
        return count

    def _on_saved(self, done: PendingTransfer) -> None:
        number = done.transfer.id
        blocks, tracked = self._saves.pop(number)
        self._orphans.discard(number)
        tracked.saves.discard(number)
        if 0 in done.arrived:
            tracked.saved = SavePoint()  # the next save copies every missing block
        # vLLM evicts blocks in the order of their release. Release the last block first, as it is the least useful.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def _on_loaded(self, done: PendingTransfer) -> None:
        tracked = self._requests.get(self._loads.pop(done.transfer.id))
        if tracked is not None and 0 in done.arrived:
            tracked.may_load = False  # another load of these blocks would fail again

    def _on_preempted(self, tracked: TrackedRequest, now: float) -> None:
        """Handle the loss of a request's device blocks, and begin a new prefetch. Its saves in flight continue."""
        tracked.has_run = False
        tracked.saved = SavePoint()
        self._orphans |= tracked.saves
        tracked.saves = set()
        if tracked.may_load and tracked.prefetch is None:
            self._extend(tracked)
            tracked.prefetch = self.manager.prefetch(tracked.chain, now=now, retention=tracked.options.retention)

    def _count_use(self, tracked: TrackedRequest, now: float) -> None:
        """Count a use of the host blocks of a request that loaded none. It used the same blocks in vLLM's own cache."""
        allocation = self.manager.match(tracked.chain, now=now, retention=tracked.options.retention)
        self.manager.on_scheduled(allocation, now=now)
        self.manager.finish(allocation, now=now)

    def _is_loading(self, tracked: TrackedRequest) -> bool:
        return tracked.request.request_id in self._loads.values()
