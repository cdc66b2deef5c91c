"""Digest of a model's weights. The digest is part of the namespace of cached blocks.

The hashed elements and their order are part of the on-disk format. Changing them makes stored blocks unreachable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hashlib import _Hash

NUM_SAMPLES = 1000
"""Number of elements to hash per tensor. A sample is enough, because fine-tuning or merging an adapter changes nearly
every element of a matrix."""


def update_digest(digest: _Hash, tensors: Iterable[torch.Tensor]) -> None:
    """Add evenly spaced elements of every tensor to a digest."""
    for tensor in tensors:
        flat = tensor.detach().flatten()
        samples = flat[:: max(1, len(flat) // NUM_SAMPLES)].cpu().contiguous()
        digest.update(samples.view(torch.uint8).numpy().tobytes())
