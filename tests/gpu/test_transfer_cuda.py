"""Transfers on a GPU: waits between streams, staging of large transfers, lifetimes, threads, and calibration."""

import gc
import json
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from kvtier.cli import main
from kvtier.errors import LayerSwapTimeoutError
from kvtier.layout import CacheGroup
from kvtier.memory import PINNED, Event, Placement, Stream, calibrate, cuda
from kvtier.memory.costs import saved_costs
from kvtier.transfer import (
    DeviceCache,
    HostMemory,
    TransferConfig,
    TransferManager,
    TransferStatus,
    swap_cache_per_layer,
)
from transfer_support import arrival_ms, in_flight_bytes, layout_of, num_layers_done

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
GPU = Placement("cuda", 0)
GROUP = CacheGroup.attention("main", 8, 8, 128, "bf16", 16)  # a block has 16 tensors of 32 KiB
NUM_BLOCKS = 600


def new_manager(form, num_blocks=NUM_BLOCKS, config=None):
    """Return a manager, the tensors of each layer, and the host memory. A block has 512 KiB in both memories."""
    shape = (num_blocks, GROUP.num_layers, 2, GROUP.layers[0].tensors[0].nbytes)
    whole = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    if form == "block-first":
        cache, tensors = DeviceCache.block_first(GROUP, whole), [[whole[:, i, k] for k in (0, 1)] for i in range(8)]
    else:
        tensors = [[whole[:, i, k].contiguous() for k in (0, 1)] for i in range(8)]
        cache = DeviceCache.layer_first(GROUP, [{"key": k, "value": v} for k, v in tensors])
    host = HostMemory(GROUP, num_blocks, GPU, piece_bytes=64 << 20)
    host.wait_ready(timeout=120)
    manager = TransferManager(layout_of(GROUP), GPU, config)
    manager.register(cache, host)
    return manager, tensors, host


def contents(tensors):
    torch.cuda.synchronize()
    return torch.stack([torch.stack(pair, 1) for pair in tensors], 1).flatten(1)


@pytest.mark.parametrize("strategy", [None, "direct", "kernel", "staged"])
@pytest.mark.parametrize("form", ["block-first", "layer-first"])
def test_concurrent_save_and_load_of_300_blocks_are_exact(form, strategy):
    manager, tensors, host = new_manager(form)
    before, random = contents(tensors), np.random.default_rng(0)
    blocks, slots = random.permutation(NUM_BLOCKS), random.permutation(NUM_BLOCKS)
    out, into, kept, free = blocks[:300], blocks[300:], slots[:300], slots[300:]
    with manager:
        assert manager.save(into, free, strategy=strategy).wait(60).status is TransferStatus.DONE
        for tensor in (part for pair in tensors for part in pair):
            tensor[torch.from_numpy(into).cuda()] = 0
        torch.cuda.synchronize()
        save = manager.save(out, kept, strategy=strategy)
        load = manager.load(into, free, strategy=strategy, layer_wise=True)
        assert save.wait(60).status is load.wait(60).status is TransferStatus.DONE
        assert torch.equal(contents(tensors), before)
        stored = np.stack([host.block(int(slot)).numpy() for slot in kept[:40]])
        assert np.array_equal(stored, before[torch.from_numpy(out[:40]).cuda()].cpu().numpy())
        assert strategy is None or save.report.choice.strategy == strategy


def test_layer_first_cache_uses_staging_and_block_first_does_not():
    for form, strategy in (("block-first", "direct"), ("layer-first", "staged")):
        manager, _, _ = new_manager(form)
        with manager:
            compiled = manager.compile("d2h", range(0, 400, 2), range(0, 400, 2))
            assert (compiled.choice.strategy, compiled.choice.path) == (strategy, "driver")
            assert "us" in compiled.choice.why  # the estimated time, in microseconds


@pytest.mark.parametrize("form", ["block-first", "layer-first"])
def test_save_waits_for_kernel_that_writes_the_blocks(form):
    manager, tensors, host = new_manager(form)
    compute = torch.cuda.Stream()
    with manager:
        with torch.cuda.stream(compute):
            torch.cuda._sleep(100_000_000)
            for tensor in (part for pair in tensors for part in pair):
                tensor.fill_(7)
            save = manager.save([5, 9], [2, 4], urgent=True)  # a save waits for the current stream by default
        assert save.report is None
        assert save.wait(60).status is TransferStatus.DONE
        assert set(np.unique(host.block(4).numpy()).tolist()) == {7}


@pytest.mark.parametrize("form", ["block-first", "layer-first"])
def test_layer_compute_waits_for_load_without_blocking_host(form):
    manager, tensors, host = new_manager(form)
    for slot in range(300):
        host.block(slot).fill(3)
    compute, gate = Stream(GPU), Stream(GPU)
    seen = torch.zeros(8, dtype=torch.int64, device="cuda")
    with manager:
        manager.load([0], [0], layer_wise=True).wait(60)
        seen[0] = (tensors[0][0][:300] == 3).sum()  # warm up, because the first use is slow
        torch.cuda.synchronize()
        with torch.cuda.stream(gate.native):
            torch.cuda._sleep(2_000_000_000)
        load = manager.load(range(300), range(300), layer_wise=True, after=gate.record())
        with torch.cuda.stream(compute.native):
            for layer in range(8):
                load.layers.wait(layer, compute)
                seen[layer] = (tensors[layer][0][:300] == 3).sum()
        assert num_layers_done(load) == 0  # all copies are enqueued, but they still wait for `gate`
        with pytest.raises(LayerSwapTimeoutError):
            load.layers.wait(7, timeout=0)
        compute.synchronize()
        assert seen.tolist() == [tensors[0][0][:300].numel()] * 8
        assert load.wait(60).status is TransferStatus.DONE
        assert 0 < arrival_ms(load, 0) < arrival_ms(load, 7)


def test_urgent_load_overtakes_blocked_bulk_load():
    manager, _, _ = new_manager("block-first")
    gate = Stream(GPU)
    with manager:
        with torch.cuda.stream(gate.native):
            torch.cuda._sleep(400_000_000)
        bulk = manager.load(range(300), range(300), urgent=False, after=gate.record())
        assert manager.load([400], [400], after=Event()).wait(60).status is TransferStatus.DONE
        assert bulk.report is None
        assert bulk.wait(60).status is TransferStatus.DONE


def test_bulk_in_flight_bytes_stay_within_limit():
    config = TransferConfig(slice_bytes=16 << 20, max_in_flight_bytes=32 << 20)
    manager, _, _ = new_manager("block-first", config=config)
    gate = Stream(GPU)
    with manager:
        with torch.cuda.stream(gate.native):
            torch.cuda._sleep(200_000_000)
        bulk = manager.save(range(NUM_BLOCKS), range(NUM_BLOCKS), after=gate.record())
        while bulk.report is None:
            assert in_flight_bytes(manager, "d2h", urgent=False) <= 32 << 20
        assert bulk.wait().status is TransferStatus.DONE


def test_tensors_dropped_during_save_stay_alive():
    manager, tensors, host = new_manager("layer-first")
    expected = contents(tensors)[:300].cpu()
    gate = Stream(GPU)
    with manager:
        with torch.cuda.stream(gate.native):
            torch.cuda._sleep(200_000_000)
        save = manager.save(range(300), range(300), after=gate.record())
        manager._caches.clear()
        del tensors
        gc.collect()
        junk = [torch.full((64 << 20,), 9, dtype=torch.uint8, device="cuda") for _ in range(8)]
        assert save.wait(60).status is TransferStatus.DONE
        assert torch.equal(torch.stack([host.block(slot).torch() for slot in range(300)]), expected)
        del junk


def test_host_memory_is_pinned_in_pieces_until_freed():
    host = HostMemory(GROUP, 300, GPU, piece_bytes=32 << 20)
    host.wait_ready(timeout=60)
    pointer = host.block(299).data()
    assert cuda.placement_of(pointer) == PINNED
    host.free()
    gc.collect()
    assert cuda.placement_of(pointer) != PINNED


def test_swap_across_pinned_pieces_makes_one_copy_per_piece():
    host = HostMemory(GROUP, 300, GPU, piece_bytes=32 << 20)
    host.wait_ready(timeout=60)
    cache = torch.randint(0, 256, (300, GROUP.block_bytes), dtype=torch.uint8, device="cuda")
    result = swap_cache_per_layer(cache, host.block_view(), range(300), range(300), "d2h")
    assert result.num_entries == 5  # 150 MiB in pieces of 32 MiB
    assert torch.equal(torch.stack([host.block(slot).torch() for slot in range(300)]), cache.cpu())


def test_transfers_in_fresh_threads_keep_current_device():
    manager, tensors, _ = new_manager("layer-first")
    results = []

    def work():
        results.append((manager.save([1, 2], [1, 2]).wait(60).status, torch.cuda.current_device()))
        results.append((manager.load([3, 4], [1, 2], urgent=True).wait(60).status, torch.cuda.current_device()))

    with manager:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [(TransferStatus.DONE, 0)] * 6
        both = contents(tensors)
        assert torch.equal(both[[1, 2]], both[[3, 4]])


def test_slow_staging_ring_switches_kernel_stream():
    manager, tensors, _ = new_manager("layer-first", config=TransferConfig(strategy="staged"))
    before, slots = contents(tensors), np.random.default_rng(0).permutation(NUM_BLOCKS)
    with manager:
        used = set()
        for _ in range(4):
            assert manager.save(np.arange(NUM_BLOCKS), slots, urgent=True).wait(60).status is TransferStatus.DONE
            for tensor in (part for pair in tensors for part in pair):
                tensor.zero_()
            assert manager.load(np.arange(NUM_BLOCKS), slots).wait(60).status is TransferStatus.DONE
            assert torch.equal(contents(tensors), before)
            for lane in manager._lanes.values():
                used.add((lane.direction, lane._ring._kernels.handle))
                lane._ring._best_gbs = 1e6  # every copy counts as slow
        assert len(used) >= 6  # without a switch, each of the 2 lanes would have used 1 kernel stream


def test_calibrate_measures_link_speed_and_model_slowdown():
    table = calibrate(GPU)
    assert table.seconds < 10  # a loose limit; a benchmark checks the limit of 3 s
    assert set(table.links) == set(table.lost) == {"cuda>pinned", "pinned>cuda"}
    assert min(table.links.values()) > 1
    assert all(0 <= share <= 1 for paths in table.lost.values() for share in paths.values())
    kept = saved_costs(GPU)
    assert kept is not None
    assert kept.links == table.links


def test_doctor_reports_link_and_strategies(capsys):
    calibrate(GPU)
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    measured = results.pop("measured")
    assert dict(re.split(r" {2,}", line, maxsplit=1) for line in output.splitlines()) == results
    assert "GB/s to host" in results["link cuda:0"]
    assert "driver" in results["model slowdown by copies to host, cuda:0"]
    figures = measured["cuda:0"]
    assert figures["memory_bytes"] == torch.cuda.get_device_properties(0).total_memory
    assert set(figures["link_gbs"]) == set(figures["model_loses"]) == {"to host", "to device"}
    strategies = {(block["form"], block["strategy"]) for block in figures["blocks"]}
    assert strategies == {("block-first", "direct"), ("layer-first", "staged")}
    slowest = min(figures["link_gbs"].values())
    assert all(0.5 * slowest < block["expected_gbs"] < 1.2 * slowest for block in figures["blocks"])


def test_doctor_in_fresh_process_calibrates(tmp_path):
    environment = {**os.environ, "KVTIER_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "kvtier", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "measuring" in done.stderr
    assert json.loads(done.stdout)["measured"]["cuda:0"]["calibration_seconds"] > 0


def test_event_synchronize_waits_for_short_and_long_work():
    stream = Stream(GPU)
    for cycles in (200_000, 100_000_000):  # 0.1 ms and 50 ms; in the longer wait, the thread sleeps in the driver
        event = Event(blocking=True)
        with torch.cuda.stream(stream.native):
            torch.cuda._sleep(cycles)
        stream.record(event)
        assert event.synchronize() is True
        assert event.query()
