"""The scheduler side of the vLLM connector without vLLM. Requests, the block pool and workers are simulated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.index import Namespace
from kvtier.integrations.vllm.config import ConnectorConfig
from kvtier.integrations.vllm.metrics import totals_of
from kvtier.integrations.vllm.scheduler_side import SchedulerSide
from kvtier.integrations.vllm.worker_side import Handshake
from kvtier.messages import Report, Route, StoreLookup, TransferResult

BLOCK = 4
NUM_BLOCKS, NUM_PROMPT_BLOCKS = 9, 7
"""Number of full blocks of a request, and number of full blocks of its prompt."""


class Pool:
    """Simulates vLLM's BlockPool, which counts references to device blocks. Block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(num_blocks)]
        self.null_block = self.blocks[0]

    def touch(self, blocks: list[SimpleNamespace]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[SimpleNamespace]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0


class Engine:
    """Simulates EngineCore with a scheduler side. A transfer stays in flight until `report` is called for its route."""

    def __init__(self, num_host: int, **settings: object) -> None:
        config = ConnectorConfig.parse({"stores": ["memory:?bytes=1MiB"], **settings})
        self.pool, self.transfers = Pool(100), {}
        self.side = SchedulerSide(config, lambda *_: (None, 0), 100, clock=lambda: 0.0)
        self.side.start([Handshake(Namespace("model", block_tokens=BLOCK), num_host, num_host)])
        self.side.use_pool(self.pool)
        self.step({})

    def step(self, scheduled: dict[str, int], tables: dict[str, list[int]] | None = None) -> None:
        """Plan a step, and report the keys of all its probes as absent."""
        state = SimpleNamespace(get_block_ids=lambda name: ((tables or {})[name],))
        output = SimpleNamespace(
            preempted_req_ids=(),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            kv_connector_block_state=state,
        )
        plan = self.side.build_step(output).plan
        self.transfers |= {each.id: each for each in plan.transfers}
        lookups = tuple(StoreLookup(each.store, absent=each.keys, probe_id=each.id) for each in plan.probes)
        if lookups:
            self.side.on_reports([Report(plan.epoch, 0, (), lookups)])

    def report(self, route: Route) -> int:
        """Report all transfers in flight on a route as done. Return the number of transferred blocks."""
        done = [each for each in self.transfers.values() if each.route is route]
        for each in done:
            del self.transfers[each.id]
        self.side.on_reports([Report(0, 0, tuple(TransferResult(each.id, True, 0, 0.0) for each in done), ())])
        return sum(max(len(each.sources), len(each.targets)) for each in done)

    def answer(self, name: str, seed: int, *, num_local: int = 0) -> None:
        """Compute a request in one step, finish it, and report its device-to-host transfers as done.

        The first `num_local` blocks of the request are already on the device.
        """
        tokens = [seed * 1000 + number for number in range(NUM_BLOCKS * BLOCK + 2)]
        request = SimpleNamespace(
            request_id=name,
            all_token_ids=tokens,
            num_tokens=len(tokens),
            num_prompt_tokens=NUM_PROMPT_BLOCKS * BLOCK,
            num_computed_tokens=0,
            kv_transfer_params=None,
            cache_salt=None,
            lora_request=None,
            mm_features=[],
            prompt_embeds=None,
        )
        table = list(range(1 + seed * 10, 11 + seed * 10))
        self.side.on_new_request(request)
        self.side.num_matched(request, num_local * BLOCK)
        self.side.on_allocated(request, table, 0)
        request.num_computed_tokens = num_local * BLOCK
        self.step({name: len(tokens) - num_local * BLOCK}, {name: table})
        self.report(Route.DEVICE_TO_HOST)
        request.num_computed_tokens = len(tokens)
        self.side.on_finished(request, table)
        self.step({})
        self.report(Route.DEVICE_TO_HOST)
        self.step({})


def test_saves_are_skipped_while_store_writes_host_blocks():
    """While a slow store writes all host blocks, none can be evicted, and new saves find no free host slot."""
    engine = Engine(num_host=16)
    engine.answer("first", 0)
    engine.answer("second", 1)
    assert engine.side.num_skipped_blocks == 2 * NUM_BLOCKS - 16
    assert engine.report(Route.HOST_TO_STORE) == 16
    engine.answer("third", 2)  # the store has written the host blocks, so they can be evicted
    assert engine.side.num_skipped_blocks == 2 * NUM_BLOCKS - 16
    assert {block.ref_cnt for block in engine.pool.blocks} == {0}
    engine.side.check()


def test_skipped_blocks_are_saved_with_next_request():
    engine = Engine(num_host=16)
    engine.answer("first", 0)
    engine.answer("second", 1)
    engine.report(Route.HOST_TO_STORE)
    engine.answer("second again", 1, num_local=NUM_BLOCKS)  # all its blocks are on the device
    assert engine.report(Route.HOST_TO_STORE) == 2 * NUM_BLOCKS - 16
    assert engine.side.num_skipped_blocks == 2 * NUM_BLOCKS - 16


@pytest.mark.parametrize(("save_generated", "num_skipped"), [(True, 2), (False, 0)])
def test_skipped_blocks_exclude_blocks_that_need_no_save(save_generated, num_skipped):
    engine = Engine(num_host=NUM_PROMPT_BLOCKS, save_generated=save_generated)
    engine.answer("only", 0)
    assert engine.side.num_skipped_blocks == num_skipped


def test_metrics_count_blocks_in_flight_to_a_store():
    engine = Engine(num_host=16)
    engine.answer("only", 0)
    samples = totals_of(engine.side.manager, engine.side.num_held_blocks, engine.side.num_skipped_blocks)
    assert samples["moving_blocks"] == {"load": 0, "save": 0, "fetch": 0, "store": NUM_BLOCKS}
    assert samples["skipped_blocks"] == {"save": 0}
