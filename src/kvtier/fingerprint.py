"""Digests of a model's weights and files. They are part of the namespaces of cached blocks.

The hashed elements and their order are part of the on-disk format. Changing them makes stored blocks unreachable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashlib import _Hash

    import torch

NUM_SAMPLES = 1000
"""Minimum number of elements to hash per tensor. A smaller tensor is hashed whole. A sample is enough, because
both fine-tuning a model and merging an adapter change nearly every element of a matrix."""
_SAMPLE_BYTES = 4096  # one page, the smallest unit that the operating system reads from a disk
_NUM_FILE_SAMPLES = 64  # 256 KiB per file
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def update_digest(digest: _Hash, tensors: Iterable[torch.Tensor]) -> None:
    """Add evenly spaced elements of every tensor to a digest."""
    import torch

    for tensor in tensors:
        flat = tensor.detach().flatten()
        samples = flat[:: max(1, len(flat) // NUM_SAMPLES)].cpu().contiguous()
        digest.update(samples.view(torch.uint8).numpy().tobytes())


def files_digest(folder: Path) -> bytes:
    """Return a digest of a model's or adapter's files: names, sizes, whole configurations, and samples of the weights.

    Weights are sampled, because hashing whole files would take minutes. A sample is enough, because training changes
    nearly every element of a matrix. In safetensors files, each vector and each bias is also sampled on its own,
    because the samples of a file miss most of them.
    """
    digest = hashlib.sha256()
    for path in model_files(folder):
        size = path.stat().st_size
        digest.update(canonical([path.name, size]))
        with path.open("rb") as file:
            if path.suffix == ".json":
                digest.update(file.read())
            else:
                digest.update(file.read(1 << 16))  # in a safetensors file: names, types and shapes of the first tensors
                for number in range(_NUM_FILE_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_FILE_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            with suppress(SafetensorError), safe_open(str(path), "pt") as tensors:
                shapes = {name: tensors.get_slice(name).get_shape() for name in sorted(tensors.keys())}
                small = [name for name, shape in shapes.items() if len(shape) < 2 or "bias" in name]
                update_digest(digest, map(tensors.get_tensor, small))
    return digest.digest()


def model_files(folder: Path) -> Sequence[Path]:
    """Return the weight and config files of a folder, or only `folder` if it is a file."""
    if folder.is_file():
        return [folder]
    names = ("config.json", "adapter_config.json")
    found = [path for path in folder.glob("*") if path.suffix in _WEIGHT_FILES or path.name in names]
    return sorted(path for path in found if path.is_file())


def canonical(value: Any) -> bytes:
    """Encode nested tuples of strings, bytes and numbers without ambiguity. Lists count as tuples."""
    if isinstance(value, tuple | list):
        parts = [canonical(each) for each in value]
        return b"(" + b"".join(len(part).to_bytes(8, "little") + part for part in parts) + b")"
    data = value if isinstance(value, bytes) else repr(value).encode()
    return type(value).__name__.encode() + b":" + data
