"""Blocks between the device cache and host memory: our transfers compared with one contiguous copy and the peers.

python -m benchmarks.transfer                 on the GPU if there is one, else on the CPU
python -m benchmarks.transfer --device cpu    on the CPU
python -m benchmarks.transfer --tune          the staging ring's parameters, on the GPU
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.report import Bar, Row, arguments, at_least, print_table, report
from kvtier.layout import CacheGroup, KVLayout
from kvtier.transfer import DeviceCache, HostMemory, TransferManager

CPU_BYTES = 128 << 20
BLOCK_KIB = [64, 256, 1024, 2048]
ROUNDS = 100  # best of many: other processes use the cores for seconds


def main() -> None:
    parser = arguments("Block transfers on this machine.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tune", action="store_true", help="compare sizes of the staging ring and of its kernel")
    options = parser.parse_args()
    if options.tune:
        from benchmarks.transfer_overlap import tune

        report("transfer_tune", tune(), [], options.results)
    elif options.device == "cuda":
        from benchmarks.transfer_gpu import measure_gpu

        report("transfer_gpu", *measure_gpu(), options.results)
    else:
        report("transfer_cpu", *measure_cpu(), options.results)


def measure_cpu() -> tuple[list[Row], list[Bar]]:
    """Measure scattered blocks between two areas of host memory, for both cache layouts and directions."""
    rows: list[Row] = []
    for kib in BLOCK_KIB:
        group = CacheGroup.attention("main", 1, kib // 4, 64, "bf16", 16)  # key and value, half a block each
        rows += _cpu_case(f"block-first {kib} KiB", group, "block-first")
    rows += _cpu_case("Llama-3-8B layer-first", CacheGroup.attention("main", 32, 8, 128, "bf16", 16), "layer-first")
    print_table(rows)
    worst = min(float(str(row["of memcpy"])) for row in rows)
    return rows, [at_least("scattered blocks of 64 KiB and more: worst share of memcpy", worst, 0.8)]


def _cpu_case(name: str, group: CacheGroup, form: str) -> list[Row]:
    count = CPU_BYTES // group.block_bytes
    num_blocks = count * 2
    cache = make_cache(group, num_blocks, form, torch.device("cpu"))
    host = HostMemory(group, num_blocks, background=False)
    choose = np.random.default_rng(0)
    device_ids, host_ids = (choose.permutation(num_blocks)[:count] for _ in range(2))
    src, dst = (torch.ones(count * group.block_bytes, dtype=torch.uint8) for _ in range(2))
    a, b = src.numpy(), dst.numpy()
    with TransferManager(KVLayout(16, (group,))) as manager:
        manager.register(cache, host)
        seconds = shuffled_best(
            {
                "save": lambda: manager.save(device_ids, host_ids).wait(),
                "load": lambda: manager.load(device_ids, host_ids).wait(),
                "memcpy, torch": lambda: dst.copy_(src),
                "memcpy, numpy": lambda: np.copyto(b, a),
            },
            ROUNDS,
        )
    memcpy = min(seconds["memcpy, torch"], seconds["memcpy, numpy"])
    moved = count * group.block_bytes
    return [
        {
            "case": name,
            "way": way,
            "ms": seconds[way] * 1e3,
            "GB/s": moved / seconds[way] / 1e9,
            "memcpy GB/s": moved / memcpy / 1e9,
            "of memcpy": memcpy / seconds[way],
        }
        for way in ("save", "load")
    ]


def shuffled_best(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the best seconds of each task, in a random order each round: memcpy leaves dirty lines in the cache."""
    order, seconds = random.Random(0), dict.fromkeys(tasks, float("inf"))
    for attempt in range(rounds + 1):
        for name in order.sample(list(tasks), len(tasks)):
            start = time.perf_counter()
            tasks[name]()
            if attempt:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def make_cache(group: CacheGroup, num_blocks: int, form: str, device: torch.device) -> DeviceCache:
    def random_bytes(nbytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (num_blocks, nbytes), dtype=torch.uint8, device=device)

    if form == "block-first":
        return DeviceCache.block_first(group, random_bytes(group.block_bytes))
    return DeviceCache.layer_first(
        group, [{t.name: random_bytes(t.nbytes) for t in layer.tensors} for layer in group.layers]
    )


if __name__ == "__main__":
    main()
