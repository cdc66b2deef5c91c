"""Cache tensors in vLLM's memory layouts, and recorded steps of vLLM, for tests and benchmarks without vLLM."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from kvtier.integrations.vllm.worker_side import Load, StepPlan
from kvtier.messages import Plan, Route, TransferRequest, slot_bytes

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Names of vLLM's layouts. A name lists the axes from the outermost to the innermost: layer (L), block (B), head (H),
token (N) and content (C)."""
STEPS = Path(__file__).parent / "data" / "vllm_steps.jsonl"
"""File with the transfers of 40 random conversations with 4 preemptions, recorded with vLLM 0.32 (CPU, 40 device
blocks, 128 host slots)."""
NUM_DEVICE_BLOCKS, NUM_HOST_SLOTS = 40, 128


def cache_views(
    layout: str, sizes: dict[str, int], dtype: torch.dtype, device: str | torch.device
) -> dict[str, torch.Tensor]:
    """Return one view [block, head, token, content] per layer.

    All views share one allocation in the order of `layout`.
    """
    shape = [sizes[axis] for axis in layout]
    nbytes = math.prod(shape) * dtype.itemsize
    whole = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device).view(dtype).view(shape)
    layers = whole.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layer.{number}": layers[number] for number in range(sizes["L"])}


def recorded_steps() -> Iterator[StepPlan]:
    """Yield the recorded steps. Every load belongs to a different request."""
    for number, line in enumerate(STEPS.read_text().splitlines(), 1):
        transfers, loads = [], {}
        for transfer_id, name, sources, targets in json.loads(line):
            route = Route(name)
            ends = ("device", "host") if route is Route.DEVICE_TO_HOST else ("host", "device")
            slots = [slot_bytes(np.array(each, np.int32)) for each in (sources, targets)]
            transfers.append(TransferRequest(transfer_id, route, *ends, *slots))
            if route is Route.HOST_TO_DEVICE:
                loads[transfer_id] = Load(f"request-{transfer_id}", tuple(targets))
        yield StepPlan(Plan(number, 0, tuple(transfers)), loads)
