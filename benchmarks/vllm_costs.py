"""Cost of the vLLM connector in EngineCore, compared with vLLM's own block hashing, and in a worker. Needs `make vllm`.

.venv-vllm/bin/python -m benchmarks.vllm_costs

Times are CPU times of the thread, because other processes share the cores.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.report import Bar, Row, arguments, at_most, print_table, report
from kvtier.index import Chain, Namespace
from kvtier.integrations.vllm.config import ConnectorConfig
from kvtier.integrations.vllm.connector import KvtierConnector, KvtierMetadata
from kvtier.integrations.vllm.scheduler_side import SchedulerSide
from kvtier.integrations.vllm.worker_side import Handshake, StepPlan
from kvtier.messages import Plan, Report, TransferResult

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import vllm_models
from vllm_support import connector
from vllm_views import cache_views

NUM_TOKENS, BLOCK, NUM_RUNNING = 12_000, 16, 256
NUM_DEVICE, NUM_HOST = 400_000, 400_000
ROUNDS = 30


def main() -> None:
    options = arguments("Cost of the vLLM connector in EngineCore.").parse_args()
    requests: list[Row] = []
    steps: list[Row] = []
    bars: list[Bar] = []
    for stores in ((), ("memory:?bytes=1GiB",)):
        name = "with a store" if stores else "host memory only"
        row = measure_requests(stores)
        requests.append({"case": f"request of {NUM_TOKENS} tokens, {name}", **row})
        bars.append(at_most(f"request, {name}: share of vLLM's hashing", row["of hashing"], 0.5))
        step = measure_decode(stores)
        steps.append({"case": f"decode step of {NUM_RUNNING} requests, {name}", "us per request": step})
        bars.append(at_most(f"decode step, {name}: us per running request", step, 5))
    idle = measure_idle_step()
    bars.append(at_most("worker, step without transfers: us", idle["us per step"], 30))
    print_table(requests)
    print_table(steps)
    print_table([idle])
    report("vllm_costs", [*requests, *steps, idle], bars, options.results)


def make_side(stores: tuple[str, ...]) -> SchedulerSide:
    config = ConnectorConfig.parse({"stores": list(stores), "revision": "1"})
    side = SchedulerSide(config, generate_block_hash_extra_keys, NUM_DEVICE)
    side.start([Handshake(Namespace("model", block_tokens=BLOCK), NUM_HOST, NUM_HOST)])
    side.use_pool(BlockPool(NUM_DEVICE, enable_caching=True, hash_block_size=BLOCK))
    return side


def make_request(name: str, tokens: list[int]) -> Request:
    params = SamplingParams(max_tokens=1000)
    params.update_from_generation_config({}, eos_token_id=None)
    return Request(name, tokens, params, None)


class Output(SimpleNamespace):
    """vLLM's SchedulerOutput of a step, as far as the connector reads it."""

    def __init__(self, scheduled: dict[str, int], tables: dict[str, list[int]]) -> None:
        state = SimpleNamespace(get_block_ids=lambda name: (tables[name],))
        super().__init__(
            preempted_req_ids=(),
            num_scheduled_tokens=scheduled,
            kv_connector_block_state=state,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )


def run_reports(side: SchedulerSide, plan: Any) -> None:
    """Report every transfer and probe of a plan as done."""
    results = tuple(TransferResult(each.id, True, 0, 0.0) for each in plan.transfers)
    lookups = tuple(
        SimpleNamespace(store=each.store, present=b"", absent=each.keys, probe_id=each.id) for each in plan.probes
    )
    side.on_reports([Report(plan.epoch, 0, results, lookups)])  # type: ignore[arg-type]


def measure_requests(stores: tuple[str, ...]) -> dict[str, float]:
    """Measure all calls for a request whose first half is cached, without the conversion of its tokens."""
    side, random = make_side(stores), np.random.default_rng(0)
    hash_function = __import__("vllm.utils.hashing", fromlist=["sha256"]).sha256
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK, hash_function)
    run_reports(side, side.build_step(Output({}, {})).plan)
    conversions, hashings, ours = [], [], []
    prefix = random.integers(0, 100_000, NUM_TOKENS // 2).tolist()
    for number in range(ROUNDS):
        tokens = prefix + random.integers(0, 100_000, NUM_TOKENS // 2).tolist()
        request = make_request(f"r{number}", tokens)
        start = time.thread_time()
        hashes = hasher(request)
        hashing = time.thread_time() - start
        assert len(hashes) == NUM_TOKENS // BLOCK
        start = time.thread_time()
        Chain(side.manager.namespace, list(request.all_token_ids))
        conversion = time.thread_time() - start
        blocks = side._pool.get_new_blocks(NUM_TOKENS // BLOCK + 1)
        table = [block.block_id for block in blocks]
        start = time.thread_time()
        side.on_new_request(request)
        matched = side.num_matched(request, 0) or 0
        side.on_allocated(request, table, matched)
        request.num_computed_tokens = matched
        step = side.build_step(Output({request.request_id: NUM_TOKENS - matched}, {request.request_id: table}))
        taken = time.thread_time() - start
        run_reports(side, step.plan)
        request.num_computed_tokens = NUM_TOKENS
        start = time.thread_time()
        side.on_finished(request, table)
        taken += time.thread_time() - start
        run_reports(side, side.build_step(Output({}, {})).plan)
        conversions.append(conversion)
        hashings.append(hashing)
        ours.append(taken)
    hashing, conversion = statistics.median(hashings[1:]), statistics.median(conversions[1:])
    own = statistics.median(ours[1:]) - conversion
    return {
        "hashing us": hashing * 1e6,
        "connector us": own * 1e6,
        "token conversion us": conversion * 1e6,
        "of hashing": own / hashing,
    }


def measure_decode(stores: tuple[str, ...]) -> float:
    """Return the microseconds per running request of a decode step, averaged over the steps that fill two blocks."""
    side, random = make_side(stores), np.random.default_rng(1)
    requests, tables = [], {}
    for number in range(NUM_RUNNING):
        length = 1000 + number  # the requests fill their blocks in different steps
        request = make_request(f"r{number}", random.integers(0, 100_000, length).tolist())
        side.on_new_request(request)
        tables[request.request_id] = [block.block_id for block in side._pool.get_new_blocks(110)]
        requests.append(request)
    run_reports(side, side.build_step(Output({}, {})).plan)
    for request in requests:
        assert not side.num_matched(request, 0)
        side.on_allocated(request, tables[request.request_id], 0)
    scheduled = {request.request_id: request.num_tokens for request in requests}
    run_reports(side, side.build_step(Output(scheduled, tables)).plan)
    while side.manager.has_plans:  # the store receives the blocks of the prompts
        run_reports(side, side.build_step(Output({}, {})).plan)
    scheduled = dict.fromkeys(scheduled, 1)
    taken = []
    for _ in range(8):
        seconds = 0.0
        for _ in range(2 * BLOCK):
            for request in requests:
                request.num_computed_tokens = request.num_tokens
                request.append_output_token_ids(5)
            output = Output(scheduled, tables)
            start = time.thread_time()
            step = side.build_step(output)
            seconds += time.thread_time() - start
            run_reports(side, step.plan)
        taken.append(seconds / (2 * BLOCK) / NUM_RUNNING)
    return statistics.median(taken) * 1e6


def measure_idle_step() -> dict[str, Any]:
    """Measure all calls of vLLM to a worker's connector in a step without transfers."""
    sizes = {"L": 32, "B": 16, "H": 2, "N": 32, "C": 64}
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": sizes["N"], "max_model_len": 512}
        model = str(vllm_models.make_llama(Path(folder)))
        config = EngineArgs(
            model, **arguments, kv_transfer_config=KVTransferConfig(**connector())
        ).create_engine_config()
        views = cache_views("LBHNC", sizes, torch.float32, "cpu")
        spec = FullAttentionSpec(block_size=sizes["N"], num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(sizes["B"], [], [KVCacheGroupSpec(list(views), spec)])
        worker = KvtierConnector(config, KVConnectorRole.WORKER, cache)
        worker.register_kv_caches(views)
        worker.worker.controller._hosts[0].wait_ready()
    metadata, taken = KvtierMetadata(StepPlan(Plan(1, 0))), []
    for _ in range(5000):
        start = time.thread_time()
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        for name, view in views.items():
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, view, None)
        worker.wait_for_save()
        worker.get_transfer_results(set())
        worker.get_block_ids_with_load_errors()
        worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        taken.append(time.thread_time() - start)
    worker.shutdown()
    return {"case": f"step without transfers, {sizes['L']} layers", "us per step": statistics.median(taken) * 1e6}


if __name__ == "__main__":
    main()
