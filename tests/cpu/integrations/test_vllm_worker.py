"""The worker side of the vLLM connector with vLLM's memory layouts. Some tests run steps recorded in vLLM."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from kvtier.errors import ArgumentError
from kvtier.index import Namespace
from kvtier.integrations.vllm.config import ConnectorConfig
from kvtier.integrations.vllm.layouts import device_cache_of
from kvtier.integrations.vllm.worker_side import Load, StepPlan, WorkerSide, failed_blocks
from kvtier.memory.copy_paths import run_path
from kvtier.messages import Plan, Route, TransferRequest, TransferResult, slot_bytes
from kvtier.worker.sharding import Sharding
from vllm_views import LAYOUTS, NUM_DEVICE_BLOCKS, NUM_HOST_SLOTS, cache_views, recorded_steps

SIZES = {"L": 3, "B": NUM_DEVICE_BLOCKS, "H": 2, "N": 32, "C": 16}
"""L: layers. B: blocks. H: heads. N: tokens per block. C: elements per token and head, of K and V together."""
SLEEP_CYCLES = 100_000_000  # about 50 ms
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
)
DEVICES = ["cpu", CUDA]
FULL_SIZES = {
    "cpu": {"L": 4, "B": 96, "H": 8, "N": 16, "C": 256},
    "cuda": {"L": 32, "B": 512, "H": 8, "N": 16, "C": 256},
}
"""One block of one layer has 64 KiB in bfloat16, as in Llama-3-8B. On a GPU, the whole cache has 1 GiB."""


def make_worker(
    layout="LBHNC",
    device="cpu",
    dtype=torch.float32,
    sizes=SIZES,
    num_slots=NUM_HOST_SLOTS,
    *,
    has_heads=True,
    **options,
):
    views = cache_views(layout, sizes, dtype, device)
    cache, pages = device_cache_of(views, list(views), sizes["B"], has_heads=has_heads)
    config = ConnectorConfig(host_bytes=cache.group.slot_bytes * num_slots)
    namespace = Namespace("model", block_tokens=sizes["N"])
    return WorkerSide(config, namespace, cache, Sharding(), **options), views, pages


def run(worker: WorkerSide, step: StepPlan) -> tuple[set[str], set[int]]:
    """Run a step and wait for its transfers. Return the requests whose load has ended, and the failed blocks."""
    worker.begin_step(step)
    worker.start_early(step)
    worker.start_loads(step)
    worker.start_others(step)
    expected = {transfer.id for transfer in step.plan.transfers}
    loaded, failed = set(), set()
    while expected:
        results = worker.poll(is_idle=True)
        loaded |= results.loaded
        failed |= results.failed_blocks
        expected -= {result.transfer_id for report in results.reports for result in report.results}
    return loaded, failed


def block_bytes(views: dict[str, torch.Tensor], block: int) -> bytes:
    """Return the content of a device block, independent of the layout in memory."""
    return b"".join(view[block].cpu().contiguous().view(torch.uint8).numpy().tobytes() for view in views.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [*LAYOUTS, "MLA"])
def test_worker_recorded_steps_are_bit_exact(layout, device):
    """Compare every loaded block with the content that was saved to its host slot."""
    is_mla = layout == "MLA"
    sizes = {**SIZES, "H": 1, "C": 72} if is_mla else SIZES
    dtype = torch.bfloat16 if is_mla else torch.float32
    worker, views, _ = make_worker("LBNHC" if is_mla else layout, device, dtype, sizes, has_heads=not is_mla)
    saved: dict[int, bytes] = {}
    num_loaded = 0
    for step in recorded_steps():
        by_route = {route: [each for each in step.plan.transfers if each.route is route] for route in Route}
        for transfer in by_route[Route.DEVICE_TO_HOST]:
            for block, slot in zip(transfer.sources.tolist(), transfer.targets.tolist(), strict=True):
                for view in views.values():  # the forward pass of this step computes the block
                    view[block].copy_(torch.randn(view[block].shape).to(view.dtype))
                saved[slot] = block_bytes(views, block)
        loaded, failed = run(worker, step)
        assert loaded == {load.request_id for load in step.loads.values()}
        assert not failed
        for transfer in by_route[Route.HOST_TO_DEVICE]:
            for slot, block in zip(transfer.sources.tolist(), transfer.targets.tolist(), strict=True):
                assert block_bytes(views, block) == saved[slot]
                num_loaded += 1
    assert num_loaded > 100
    worker.close()


def test_latent_blocks_that_rank_0_stored_are_loaded_by_rank_1(tmp_path):
    """With MLA, all ranks have the same blocks. Rank 0 writes the blocks to the disk, and rank 1 reads them."""
    blocks, url = np.arange(4, dtype=np.int32), f"disk:{tmp_path}?bytes=64MiB&segment=1MiB&free=0"
    keys = b"".join(hashlib.sha256(bytes([block])).digest() for block in blocks)
    config = ConnectorConfig.parse({"host_bytes": "1MiB", "stores": [url]})
    namespace, name = Namespace("model", block_tokens=SIZES["N"]), config.stores[0].config.name
    ranks = []
    for rank in range(2):
        views = cache_views("LBNHC", {**SIZES, "H": 1, "C": 72}, torch.bfloat16, "cpu")
        cache, _ = device_cache_of(views, list(views), SIZES["B"], has_heads=False)
        ranks.append((WorkerSide(config, namespace, cache, Sharding(rank, 2, 2)), views))
    for view in ranks[0][1].values():
        view.copy_(torch.randn(view.shape))
    for worker, _ in ranks:
        slots = slot_bytes(blocks)
        if worker is ranks[0][0]:
            run(worker, step_of(1, transfer_of(1, Route.DEVICE_TO_HOST, blocks, blocks)))
            moved = TransferRequest(2, Route.HOST_TO_STORE, "host", name, source_slots=slots, keys=keys)
        else:
            moved = TransferRequest(2, Route.STORE_TO_HOST, name, "host", target_slots=slots, keys=keys)
        assert run(worker, step_of(2, moved)) == (set(), set())
    run(ranks[1][0], step_of(3, transfer_of(3, Route.HOST_TO_DEVICE, blocks, blocks)))
    for block in blocks:
        assert block_bytes(ranks[1][1], block) == block_bytes(ranks[0][1], block)
    for worker, _ in ranks:
        worker.close()


def transfer_of(number: int, route: Route, device_blocks, host_slots) -> TransferRequest:
    """Return a transfer between device blocks and host slots."""
    slots = [slot_bytes(np.asarray(each, np.int32)) for each in (device_blocks, host_slots)]
    if route is Route.DEVICE_TO_HOST:
        return TransferRequest(number, route, "device", "host", *slots)
    return TransferRequest(number, route, "host", "device", *reversed(slots))


def step_of(number: int, *transfers: TransferRequest) -> StepPlan:
    loads = {
        each.id: Load(f"request-{each.id}", tuple(each.targets.tolist()))
        for each in transfers
        if each.route is Route.HOST_TO_DEVICE
    }
    return StepPlan(Plan(number, 0, transfers), loads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [*LAYOUTS, "MLA"])
def test_worker_concurrent_large_transfers_are_exact(layout, device):
    """Save one half of the blocks while the other half is loaded, with block sizes of real models."""
    is_mla = layout == "MLA"
    sizes = FULL_SIZES[device] | ({"H": 1, "C": 576} if is_mla else {})
    count = sizes["B"] // 2
    worker, views, _ = make_worker(
        "LBNHC" if is_mla else layout, device, torch.bfloat16, sizes, sizes["B"], has_heads=not is_mla
    )
    worker.controller._hosts[0].wait_ready()
    draws = np.random.default_rng(0)
    blocks, slots = draws.permutation(sizes["B"]), draws.permutation(sizes["B"])
    first = torch.from_numpy(blocks[:count]).to(device)
    second = torch.from_numpy(blocks[count:]).to(device)
    expected = [(view[first].clone(), view[second].clone()) for view in views.values()]
    run(worker, step_of(1, transfer_of(1, Route.DEVICE_TO_HOST, blocks[:count], slots[:count])))
    for view in views.values():
        view[first] = 0
    load = transfer_of(2, Route.HOST_TO_DEVICE, blocks[:count], slots[:count])
    save = transfer_of(3, Route.DEVICE_TO_HOST, blocks[count:], slots[count:])
    assert run(worker, step_of(2, load, save)) == ({"request-2"}, set())
    for view in views.values():
        view[second] = 0
    run(worker, step_of(3, transfer_of(4, Route.HOST_TO_DEVICE, blocks[count:], slots[count:])))
    for view, (one, other) in zip(views.values(), expected, strict=True):
        # Compare integers, because random bytes contain NaN, which is not equal to itself.
        assert torch.equal(view[first].view(torch.int16), one.view(torch.int16))
        assert torch.equal(view[second].view(torch.int16), other.view(torch.int16))
    worker.close()


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_worker_save_reads_what_the_forward_pass_wrote(layout, device):
    """The forward pass is still queued on the stream when the worker starts the save."""
    worker, views, _ = make_worker(layout, device)
    saved = {name: torch.randn_like(view[3]) for name, view in views.items()}
    step = step_of(1, transfer_of(1, Route.DEVICE_TO_HOST, [3], [7]))
    torch.cuda.synchronize()
    worker.begin_step(step)
    torch.cuda._sleep(SLEEP_CYCLES)
    for name, view in views.items():
        view[3].copy_(saved[name])
    worker.start_others(step)
    poll_until_idle(worker)
    run(worker, step_of(2, transfer_of(2, Route.HOST_TO_DEVICE, [5], [7])))
    for name, view in views.items():
        assert torch.equal(view[5], saved[name])
    worker.close()


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_worker_load_runs_during_the_forward_pass(layout, device):
    """A load waits for kernels that were queued before its step, but not for the kernels of its step."""
    worker, views, _ = make_worker(layout, device)
    run(worker, step_of(1, transfer_of(1, Route.DEVICE_TO_HOST, [3], [7])))
    saved = {name: view[3].clone() for name, view in views.items()}
    old = {name: view[5].clone() for name, view in views.items()}
    read = {name: torch.empty_like(each) for name, each in old.items()}
    step = step_of(2, transfer_of(2, Route.HOST_TO_DEVICE, [5], [7]))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    for name, view in views.items():
        read[name].copy_(view[5])  # an earlier step still reads the block that the load will overwrite
    worker.begin_step(step)
    worker.start_early(step)
    torch.cuda._sleep(20 * SLEEP_CYCLES)  # the forward pass of this step, about 1 s
    forward = torch.cuda.Event()
    forward.record()
    worker.start_loads(step)
    (result,) = poll_until_idle(worker)
    assert result.ok
    assert not forward.query()
    torch.cuda.synchronize()
    for name, view in views.items():
        # Compare integers, because random bytes contain NaN, which is not equal to itself.
        assert torch.equal(read[name].view(torch.int32), old[name].view(torch.int32))
        assert torch.equal(view[5].view(torch.int32), saved[name].view(torch.int32))
    worker.close()


@pytest.mark.parametrize("device", DEVICES)
def test_worker_starts_each_load_once(device):
    """On a CPU, the forward pass blocks the worker, so a load must start before the forward pass."""
    worker, _, _ = make_worker(device=device)
    step = next(step for step in recorded_steps() if step.loads)
    worker.begin_step(step)
    worker.start_early(step)
    assert worker.controller.is_busy == (device == "cpu")
    worker.start_loads(step)
    assert sorted(result.transfer_id for result in poll_until_idle(worker)) == sorted(step.loads)
    worker.close()


def poll_until_idle(worker: WorkerSide) -> list[TransferResult]:
    results: list[TransferResult] = []
    while worker.controller.is_busy:
        results += [result for report in worker.poll(is_idle=True).reports for result in report.results]
    return results


def test_worker_reports_blocks_of_failed_copy_without_raising():
    is_broken = True

    def mover(*arguments):
        if is_broken:
            raise RuntimeError("the link is down")
        return run_path(*arguments)

    worker, _, _ = make_worker(mover=mover)
    steps = list(recorded_steps())
    load = next(step for step in steps if step.loads)
    loaded, failed = run(worker, load)
    assert loaded == {each.request_id for each in load.loads.values()}
    assert failed == {block for each in load.loads.values() for block in each.blocks}
    is_broken = False
    assert run(worker, load) == (loaded, set())
    worker.close()


def test_verifier_fails_load_of_changed_host_block():
    worker, _, pages = make_worker()
    worker.verify_loads(pages)
    steps = list(recorded_steps())
    at = next(number for number, step in enumerate(steps) if step.loads)
    for step in steps[:at]:
        run(worker, step)
    transfer = next(each for each in steps[at].plan.transfers if each.route is Route.HOST_TO_DEVICE)
    worker.controller._hosts[0].block(int(transfer.sources[0])).numpy()[3] ^= 1
    _, failed = run(worker, steps[at])
    assert failed == {int(transfer.targets[0])}
    worker.close()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (TransferResult(1, True, 0, 0.0), set()),
        (TransferResult(1, False, 0, 0.0), {7, 8, 9}),
        (TransferResult(1, False, 0, 0.0, "", b"\1\0\1"), {8}),
    ],
)
def test_failed_blocks_follow_the_mask_of_the_result(result, expected):
    assert failed_blocks(Load("a", (7, 8, 9)), result) == expected


def test_worker_with_host_bytes_below_one_block_raises():
    views = cache_views("LBHNC", SIZES, torch.float32, "cpu")
    cache, _ = device_cache_of(views, list(views), SIZES["B"], has_heads=True)
    with pytest.raises(ArgumentError, match="raise host_bytes"):
        WorkerSide(ConnectorConfig(host_bytes=100), Namespace("model", block_tokens=32), cache, Sharding())
