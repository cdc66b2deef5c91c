"""The tiers with a cache on the GPU: the same machine, over copy streams and pinned memory."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tiers_machine import TiersMachine, run

pytestmark = pytest.mark.gpu


class CudaTiersMachine(TiersMachine):
    """With the device tier on CUDA."""

    device: ClassVar[str] = "cuda"


def test_no_wrong_byte_is_ever_handed_out_on_cuda():
    run(CudaTiersMachine, 25, ("device", "host"))  # a disk hit in so few is luck
