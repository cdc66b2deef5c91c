"""`kvtier doctor`: hardware, packages and copy paths of this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from functools import partial
from typing import Any

import torch

import kvtier
from kvtier.engine import native as engine_native
from kvtier.errors import UnavailableError
from kvtier.files import cache_dir
from kvtier.index import native as index_native
from kvtier.layout import CacheGroup
from kvtier.memory import CPU, PINNED, CostTable, Placement, best_host, calibrate, host_pages
from kvtier.memory.copy_paths import PATH_NAMES, CopyContext, why_not
from kvtier.memory.costs import saved_costs
from kvtier.memory.stream import Stream
from kvtier.native_code import num_usable_cores
from kvtier.storage import checksum as storage_native
from kvtier.transfer.strategy import TransferShape, choose

_BLOCKS = {  # block layouts for which the output shows transfer strategies
    "Llama-3-8B, 16 tokens": CacheGroup.attention("main", 32, 8, 128, "bf16", 16),
    "DeepSeek MLA, 16 tokens": CacheGroup.mla("main", 61, 576, "bf16", 16),
}
_NUM_BLOCKS = 512  # blocks per example transfer
_OPTIONAL = {  # optional module -> extra that installs the module
    "cuda.bindings": "cuda",
    "ml_dtypes": "numpy",
    "redis": "redis",
    "obstore": "s3",
    "mooncake": "mooncake",
    "cryptography": "crypto",
    "zmq": "events",
}


def doctor(options: argparse.Namespace) -> int:
    """Calibrate each GPU that has no saved costs (with --calibrate, every GPU), and print the findings. Return 0."""
    progress = partial(print, "measuring", file=sys.stderr)
    gpus = [Placement("cuda", index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    costs = {
        gpu: (None if options.calibrate else saved_costs(gpu)) or calibrate(gpu, progress=progress) for gpu in gpus
    }
    num_cores = num_usable_cores()
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    findings = {
        "kvtier": kvtier.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {num_cores} cores, {memory_gib:.0f} GiB",
        "torch": f"{torch.__version__} ({'CUDA ' + torch.version.cuda if torch.version.cuda else 'no CUDA'})",
        **{module: _installed(module, extra) for module, extra in _OPTIONAL.items()},
        "best host memory": str(best_host()),
        "cache directory": _cache_directory(),
        "CPU kernels": engine_native.native().reason,
        "checksums": storage_native.native().reason,
        "learned eviction": index_native.native().reason,
        **{str(gpu): _describe_gpu(gpu, costs[gpu]) for gpu in gpus},
        **{f"copy {job}": _paths(job) for job in _jobs(gpus)},
    }
    measured = {str(gpu): _measured(gpu, costs[gpu]) for gpu in gpus}
    for name, figures in measured.items():
        findings |= _lines(name, figures)
    if not gpus:
        findings["GPU"] = "none: everything runs on the CPU"
    if options.json:
        print(json.dumps({**findings, **({"measured": measured} if measured else {})}))
    else:
        width = max(len(name) for name in findings)
        for name, value in findings.items():
            print(f"{name:<{width}}  {value}")
    return 0


def _installed(module: str, extra: str) -> str:
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"not installed; pip install 'kvtier[{extra}]'"
    try:
        return importlib.metadata.version(module.replace(".", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _cache_directory() -> str:
    try:
        return str(cache_dir())
    except UnavailableError as error:
        return str(error)


def _describe_gpu(gpu: Placement, costs: CostTable) -> str:
    properties = torch.cuda.get_device_properties(gpu.torch)
    return f"{properties.name}, {properties.total_memory / (1 << 30):.0f} GiB, costs measured in {costs.seconds:.1f} s"


def _jobs(gpus: list[Placement]) -> list[CopyContext]:
    jobs = [CopyContext(CPU, CPU, None)]
    for gpu in gpus:
        stream = Stream(gpu)
        jobs += [CopyContext(src, dst, stream) for src, dst in ((gpu, gpu), (gpu, PINNED), (PINNED, gpu))]
    return jobs


def _paths(job: CopyContext) -> str:
    verdicts = {path: why_not(path, job) for path in PATH_NAMES if job.on_device == (path != "host") or path == "loop"}
    return ", ".join(path if refusal is None else f"no {path} ({refusal})" for path, refusal in verdicts.items())


def _measured(gpu: Placement, costs: CostTable) -> dict[str, Any]:
    """Return a GPU's calibration for JSON. `expected_gbs` is the expected rate for scattered blocks."""
    ways = {"to host": (gpu, PINNED), "to device": (PINNED, gpu)}
    keys = {way: f"{src.kind}>{dst.kind}" for way, (src, dst) in ways.items()}
    node, source = host_pages.node_of_gpu(host_pages.pci_address(gpu))
    properties = torch.cuda.get_device_properties(gpu.torch)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "origin": costs.origin,
        "calibration_seconds": costs.seconds,
        "numa_node": node,
        "numa_source": source,
        "link_gbs": {way: costs.links[key] for way, key in keys.items() if key in costs.links},
        "model_loses": {way: dict(costs.lost.get(key, {})) for way, key in keys.items()},
        "blocks": [
            {"blocks": blocks, "form": form, "way": way, **_expected(src, dst, group, parts, costs)}
            for blocks, group in _BLOCKS.items()
            for form, parts in (("block-first", 1), ("layer-first", len(list(group.tensors()))))
            for way, (src, dst) in ways.items()
        ],
    }


def _expected(src: Placement, dst: Placement, group: CacheGroup, parts: int, costs: CostTable) -> dict[str, Any]:
    nbytes = group.block_bytes * _NUM_BLOCKS
    choice = choose(TransferShape(src, dst, nbytes, parts * _NUM_BLOCKS, _NUM_BLOCKS), costs=costs)
    microseconds = choice.expected_us
    return {
        "strategy": choice.strategy,
        "path": choice.path,
        "expected_gbs": nbytes / microseconds / 1e3 if microseconds else None,
        "why": choice.why,
    }


def _lines(gpu: str, figures: dict[str, Any]) -> dict[str, str]:
    """Return the result of `_measured` as lines of text, by label."""
    node, source = figures["numa_node"], figures["numa_source"]
    lines = {
        f"link {gpu}": ", ".join(f"{rate:.1f} GB/s {way}" for way, rate in figures["link_gbs"].items())
        + (f"; NUMA node {node} ({source})" if node is not None else f"; no NUMA node ({source})"),
    }
    for way, lost in figures["model_loses"].items():
        shares = ", ".join(f"{path} {share:.0%}" for path, share in lost.items())
        name = f"model slowdown by copies {way}, {gpu}"
        lines[name] = f"{shares} of the model's time" if shares else "not measured"
    strategies: dict[str, list[str]] = {}
    for row in figures["blocks"]:
        rate = f" {row['expected_gbs']:.1f} GB/s expected" if row["expected_gbs"] else ""
        name = f"{row['form']} {row['blocks']}, {gpu}"
        strategies.setdefault(name, []).append(f"{row['way']} {row['strategy']}{rate}")
    return lines | {f"blocks {name}": ", ".join(ways) for name, ways in strategies.items()}
