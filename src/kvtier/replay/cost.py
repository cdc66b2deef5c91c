"""Estimate the duration of a step from the shape of the model and the peak rates of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.replay.hardware import GpuSpec, ModelSpec
from kvtier.scheduler import Step


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work in a step."""

    num_rows: float
    num_tokens: float
    attended_tokens: float
    """Number of tokens that each token of the step attends to, summed over the step."""
    read_tokens: int
    """Number of tokens whose KV each row reads, summed over the rows."""

    @classmethod
    def of(cls, step: Step) -> Work:
        read_tokens = sum(row.first + row.num_tokens for row in step.rows)
        return cls(len(step.rows), step.num_tokens, step.attended_tokens, read_tokens)

    def part(self, count: int) -> Work:
        """Split the work into `count` equal steps and return one of them. Every step reads the KV of all rows."""
        return Work(self.num_rows, self.num_tokens / count, self.attended_tokens / count, self.read_tokens)


StepCost = Callable[[Work], float]
"""Returns the compute time of a step in seconds, without waits for transfers."""


class Roofline:
    """Adds the times of matrix products and of attention. Each is limited by arithmetic or by memory bandwidth.

    products    max( 2 * params per token * tokens / FLOP/s ,   bytes of the weights read / bandwidth )
    attention   max( 4 * layers * heads * head_dim * attended / FLOP/s ,   bytes of the KV read / bandwidth )

    FLOP/s and bandwidth are fractions of the peak rates (see GpuSpec). The host adds fixed times per step and per row.
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec) -> None:
        self._model = model
        self._fixed, self._row = gpu.step_seconds, gpu.row_seconds
        self._bandwidth = gpu.memory_bandwidth * gpu.memory_share
        self._token = 2 * model.used_params / (gpu.flops * gpu.compute_share)
        self._attended = 4 * model.layers * model.heads * model.head_dim / (gpu.flops * gpu.attention_share)
        self._read = model.token_bytes / self._bandwidth

    def host_seconds(self, work: Work) -> float:
        """Return the time in which the host prepares the step. The result of `seconds` includes this time."""
        return self._fixed + self._row * work.num_rows

    def seconds(self, work: Work) -> float:
        model = self._model
        # In a mixture of experts, tokens use different experts, so more tokens read more weights, up to all weights.
        weights = min(model.params, model.used_params * max(1, work.num_tokens)) * model.weight_bytes
        products = max(self._token * work.num_tokens, weights / self._bandwidth)
        attention = max(self._attended * work.attended_tokens, self._read * work.read_tokens)
        return self._fixed + self._row * work.num_rows + products + attention
