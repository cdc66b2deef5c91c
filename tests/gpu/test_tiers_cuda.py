"""Run the state machine of the tiers with a device cache on a GPU, copy streams and pinned memory."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tiers_machine import TiersMachine, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class CudaTiersMachine(TiersMachine):
    device: ClassVar[str] = "cuda"


def test_tiers_on_cuda_never_return_wrong_bytes():
    run(CudaTiersMachine, 25, ("device", "host"))  # disk hits are too rare to be required in 25 examples
