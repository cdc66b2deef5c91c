"""`kvtier doctor`: what this machine has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys

import torch

import kvtier
from kvtier.errors import UnavailableError
from kvtier.layout import CacheGroup
from kvtier.memory import CPU, PINNED, CostTable, Placement, best_host, calibrate, numa
from kvtier.memory.copy_paths import PATH_NAMES, Job, why_not
from kvtier.memory.costs import saved_costs
from kvtier.memory.files import cache_dir
from kvtier.memory.stream import Stream
from kvtier.transfer.strategy import Shape, choose

_BLOCKS = {  # what the strategies are shown for
    "Llama-3-8B, 16 tokens": CacheGroup.attention("main", 32, 8, 128, "bf16", 16),
    "DeepSeek MLA, 16 tokens": CacheGroup.mla("main", 61, 576, "bf16", 16),
}
_NUM_BLOCKS = 512
_OPTIONAL = {"cuda.bindings": "cuda", "ml_dtypes": "numpy"}  # module: the extra that brings it


def doctor(*, as_json: bool = False, recalibrate: bool = False) -> int:
    """Print the findings. 0 also for a machine without a GPU: that is no error."""
    gpus = [Placement("cuda", index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if recalibrate:
        for gpu in gpus:
            calibrate(gpu, progress=lambda text: print(f"measuring {text}", file=sys.stderr))
    found = {
        "kvtier": kvtier.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {_num_cores()} cores, {_memory_gib():.0f} GiB",
        "torch": f"{torch.__version__} ({'CUDA ' + torch.version.cuda if torch.version.cuda else 'no CUDA'})",
        **{module: _installed(module, extra) for module, extra in _OPTIONAL.items()},
        "best host memory": str(best_host()),
        "cache directory": _cache_directory(),
        **{str(gpu): _describe_gpu(gpu) for gpu in gpus},
        **{f"copy {job}": _paths(job) for job in _jobs(gpus)},
    }
    for gpu in gpus:
        costs = saved_costs(gpu)
        if costs is not None:
            found |= _links(gpu, costs)
    if not gpus:
        found["GPU"] = "none: everything runs on the CPU"
    if as_json:
        print(json.dumps(found))
    else:
        width = max(len(name) for name in found)
        for name, value in found.items():
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


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)


def _describe_gpu(gpu: Placement) -> str:
    properties = torch.cuda.get_device_properties(gpu.torch)
    costs = saved_costs(gpu)
    known = "costs measured" if costs else "costs not measured yet (kvtier doctor --calibrate)"
    return f"{properties.name}, {properties.total_memory / (1 << 30):.0f} GiB, {known}"


def _jobs(gpus: list[Placement]) -> list[Job]:
    jobs = [Job(CPU, CPU, None)]
    for gpu in gpus:
        stream = Stream(gpu)
        jobs += [Job(src, dst, stream) for src, dst in ((gpu, gpu), (gpu, PINNED), (PINNED, gpu))]
    return jobs


def _paths(job: Job) -> str:
    verdicts = {path: why_not(path, job) for path in PATH_NAMES if job.on_device == (path != "host") or path == "loop"}
    return ", ".join(path if refusal is None else f"no {path} ({refusal})" for path, refusal in verdicts.items())


def _links(gpu: Placement, costs: CostTable) -> dict[str, str]:
    """The link's limits, what the model loses beside each path, and how blocks would be moved."""
    ways = {"to host": (gpu, PINNED), "to device": (PINNED, gpu)}
    keys = {name: f"{src.kind}>{dst.kind}" for name, (src, dst) in ways.items()}
    node, source = numa.node_of_gpu(numa.pci_address(gpu))
    found = {
        f"link {gpu}": ", ".join(
            f"{costs.links[key]:.1f} GB/s {name}" for name, key in keys.items() if key in costs.links
        )
        + f"; measured in {costs.seconds:.1f} s"
        + (f"; NUMA node {node} ({source})" if node is not None else f"; no NUMA node ({source})"),
    }
    for name, key in keys.items():
        shares = ", ".join(f"{path} {share:.0%}" for path, share in costs.lost.get(key, {}).items())
        found[f"model loses, {name}"] = f"{shares or 'not measured'} of its time while a path is at work"
    for blocks, group in _BLOCKS.items():
        for form, parts in (("block-first", 1), ("layer-first", len(list(group.tensors())))):
            told = []
            for name, (src, dst) in ways.items():
                nbytes = group.block_bytes * _NUM_BLOCKS
                choice = choose(Shape(src, dst, nbytes, parts * _NUM_BLOCKS, _NUM_BLOCKS), costs=costs)
                rate = f" {nbytes / choice.expected_us / 1e3:.1f} GB/s" if choice.expected_us else ""
                told.append(f"{name} {choice.strategy}{rate}")
            found[f"blocks {form}, {blocks}"] = f"{', '.join(told)} expected"
    return found
