"""A faulty row on CUDA fails only its own request. Detecting the fault needs no extra synchronization."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.random_weights import random_weights

from engine_helpers import VOCAB
from fault_support import STAGES, check_row_faults
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.ops import TorchOps
from kvtier.engine.sampling import (
    COLUMNS,
    NO_TOKEN,
    PARAMS,
    RequestSampler,
    Resident,
    SamplingParams,
    draw,
    to_samples,
)
from sampling_support import sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TINY = ModelConfig("llama", 2, 64, 96, 4, 2, 16, VOCAB, 256, norm_eps=1e-5, rope=RopeConfig(10000.0))
NOT_FINITE = (torch.nan, torch.inf, -torch.inf)
KINDS = {
    "greedy": {"temperature": 0.0},
    "random": {"seed": 1},
    "top_p": {"seed": 1, "top_p": 0.5},
    "top_k": {"seed": 1, "top_k": 5},
}


@pytest.fixture(scope="module")
def model():
    return Model(TINY, random_weights(TINY, torch.float32, torch.device("cuda"), seed=1))


@pytest.mark.filterwarnings("ignore:.*(proposer failed|no draft)")
# On CUDA, a kernel applies the penalties, so they cannot raise an error on the host.
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "penalties"])
def test_row_fault_on_cuda_ends_only_the_faulty_request(model, stage, monkeypatch):
    """Use TorchOps. With TritonOps, logits differ by up to 1e-3 between batches, which changes some random tokens."""
    plain = Model(TINY, model.weights, TorchOps())
    check_row_faults(plain, stage, monkeypatch, exact=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_sample_on_cuda_fails_only_rows_with_non_finite_logits(kind, value):
    logits = torch.randn(4, 32000, device="cuda")
    params = SamplingParams(**KINDS[kind])
    expected = sample(logits[1:].clone(), [RequestSampler(params) for _ in range(3)])
    logits[0] = value
    requests = [RequestSampler(params) for _ in range(4)]
    samples = sample(logits, requests)
    assert samples[0].token_id == NO_TOKEN
    assert requests[0].error
    assert samples[1:] == expected


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", KINDS)
def test_sample_on_cuda_does_not_synchronize(kind):
    params = SamplingParams(**KINDS[kind])
    for mode in ("default", "error"):  # the first call compiles the kernels
        logits = torch.randn(4, 32000, device="cuda")
        logits[2] = torch.nan
        requests = [RequestSampler(params) for _ in range(4)]
        heads = np.zeros((4, COLUMNS), np.int64)
        heads[:, PARAMS] = np.stack([request.resident for request in requests])
        counts = torch.zeros(1, 32000, dtype=torch.int32, device="cuda")
        positions = torch.zeros(4, dtype=torch.int64, device="cuda")
        resident = Resident(torch.from_numpy(heads).cuda(), positions, counts, [-1] * 4)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            drawn = draw(logits, requests, [0] * 4, resident)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        samples = to_samples(drawn, drawn.tokens.tolist(), requests)
        assert [row.token_id == NO_TOKEN for row in samples] == [False, False, True, False]
