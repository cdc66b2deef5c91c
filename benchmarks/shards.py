"""The cost of dividing stored blocks by KV heads: write the blocks of a rank to a disk and read them, by shard count.

One rank has blocks of Llama-3-8B (16 tokens, 2 MiB of bf16). With one shard, a block is stored as it is in host memory.
With more shards, the bytes of each object are gathered first. Gathering alone is measured for comparison, and so is one
copy of the same bytes, which is the limit.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import arguments, best, print_table, report
from kvtier.layout import CacheGroup, KVLayout
from kvtier.messages import Plan, Route, TransferRequest, slot_bytes
from kvtier.storage import open_shards
from kvtier.worker.controller import CacheController
from kvtier.worker.sharding import Sharding, parts_of

BLOCKS, ROUNDS = 64, 5
LAYOUT = KVLayout(16, (CacheGroup.attention("main", 32, 8, 128, "bf16", 16),))
SHARDS = (1, 2, 4, 8)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="of the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = [_measure(num_shards, Path(folder)) for num_shards in SHARDS]
    print_table(rows)
    report("shards", rows, [], options.results)


def _measure(num_shards: int, folder: Path) -> dict[str, object]:
    """Return GB/s for one number of shards. Writes may stay in the page cache, for every number of shards."""
    (group,) = LAYOUT.groups
    store = open_shards(
        [f"disk:{folder / str(num_shards)}?bytes=1GiB&segment=64MiB&free=0"], range(num_shards), num_shards
    )
    sharding = Sharding(0, 1, num_shards)
    cache = torch.zeros(1, group.block_bytes, dtype=torch.uint8)
    controller = CacheController(LAYOUT, [cache], BLOCKS, stores={"disk": store}, sharding=sharding)
    host = controller._hosts[0].slots().numpy()
    host[:] = np.random.default_rng(0).integers(0, 256, host.shape, np.uint8)
    slots = np.random.default_rng(1).permutation(BLOCKS)
    parts = parts_of(LAYOUT.groups, sharding)
    objects = {part: np.zeros((BLOCKS, part.nbytes), np.uint8) for part in parts}
    whole = np.zeros_like(host)

    rounds = itertools.count()

    def run(purpose: Route, number: int = 0) -> None:
        keys = b"".join(hashlib.sha256(b"%d %d" % (number, block)).digest() for block in range(BLOCKS))
        ends = (
            ("host", "disk", slot_bytes(slots), b"")
            if purpose is Route.HOST_TO_STORE
            else ("disk", "host", b"", slot_bytes(slots))
        )
        controller.submit(Plan(1, 0, (TransferRequest(1, purpose, *ends, keys),)))
        while controller.is_busy:
            controller.wait(1.0)
            for found in controller.poll():
                assert all(outcome.ok for outcome in found.results), found

    def gather() -> None:
        for at, slot in enumerate(slots.tolist()):
            for part in parts:
                part.gather(host[slot], objects[part][at])

    tasks = {
        "write": lambda: run(Route.HOST_TO_STORE, next(rounds)),  # objects that exist are not written again
        "read": lambda: run(Route.STORE_TO_HOST),
        "gather": gather,
        "copy": lambda: np.copyto(whole, host),
    }
    seconds = best(tasks, ROUNDS)
    controller.close()
    total = BLOCKS * group.block_bytes / 1e9
    return {"shards": num_shards, **{f"{name} GB/s": total / taken for name, taken in seconds.items()}}


if __name__ == "__main__":
    main()
