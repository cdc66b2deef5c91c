"""On CUDA, sampled tokens follow the distribution of the sampling parameters."""

import pytest
import torch

from sampling_support import CASES, check_draws

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("params", CASES, ids=lambda params: f"{params.seed}")
def test_draws_on_cuda_follow_the_computed_distribution(params):
    check_draws(params, 64, "cuda")
