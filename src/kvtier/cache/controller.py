"""CacheController: carries out plans. It moves bytes and decides nothing.

For now it copies at once, on the current stream, and its report is there when `submit` returns; on CUDA it waits for
its copies. A transfer that fails is reported as failed, for exactly the blocks it had.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvtier.cache.plan import I32, Outcome, Plan, Report, Transfer
from kvtier.errors import ArgumentError, RangeError


class CacheController:
    """The engine's device caches, block-first, one per cache group, and as many blocks of each in host memory."""

    def __init__(self, caches: Sequence[torch.Tensor], num_host_blocks: int, *, rank: int = 0) -> None:
        if not caches or num_host_blocks < 1:
            raise ArgumentError(f"a controller needs caches and host blocks, got {len(caches)} and {num_host_blocks}")
        self.rank = rank
        pinned = caches[0].device.type == "cuda"
        hosts = [
            torch.empty((num_host_blocks, *each.shape[1:]), dtype=each.dtype, pin_memory=pinned) for each in caches
        ]
        self._tiers: dict[str, list[torch.Tensor]] = {"device": list(caches), "host": hosts}
        self._reports: list[Report] = []

    def submit(self, plan: Plan) -> None:
        """Carry out a plan, in its order."""
        outcomes = tuple(self._move(transfer) for transfer in plan.transfers)
        if outcomes:
            self._reports.append(Report(plan.epoch, self.rank, outcomes))

    def poll(self) -> list[Report]:
        """What has been done since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def _move(self, transfer: Transfer) -> Outcome:
        start = time.perf_counter()
        try:
            num_bytes = self._copy(transfer)
        except (RuntimeError, RangeError) as error:  # torch's errors, out of memory included
            return Outcome(transfer.id, False, 0, time.perf_counter() - start, f"{type(error).__name__}: {error}")
        return Outcome(transfer.id, True, num_bytes, time.perf_counter() - start)

    def _copy(self, transfer: Transfer) -> int:
        num_bytes = 0
        for source, target in zip(self._tiers[transfer.source], self._tiers[transfer.target], strict=True):
            _must_be_in(transfer.sources, source, transfer.source)
            _must_be_in(transfer.targets, target, transfer.target)
            blocks = source[torch.from_numpy(transfer.sources.copy()).to(source.device, torch.int64)]
            target[torch.from_numpy(transfer.targets.copy()).to(target.device, torch.int64)] = blocks.to(target.device)
            num_bytes += blocks.nbytes
        if self._tiers["device"][0].device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return num_bytes


def _must_be_in(slots: I32, blocks: torch.Tensor, tier: str) -> None:
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= len(blocks)):
        raise RangeError(f"slots {slots.min()} .. {slots.max()} of {tier}, which has {len(blocks)}")
