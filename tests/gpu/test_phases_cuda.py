"""On CUDA, one and two steps in flight give the same tokens during arrivals, failures, preemptions and transfers."""

from __future__ import annotations

import pytest
import torch

from phases_support import CacheReader, check_lives

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("phases", [1, 2])
def test_steps_in_flight_on_cuda_do_not_change_the_answers(phases):
    seen = check_lives(CacheReader("cuda"), phases, range(10), 60)
    assert seen["answers"] > 50, seen
