"""`load_model`: from a name or a path to a model that computes."""

from __future__ import annotations

from pathlib import Path

import torch

from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.ops import Ops
from kvtier.engine.packaged import DEFAULT_MODEL, resolve
from kvtier.engine.weights import SafetensorsFolder, assemble
from kvtier.errors import CheckpointError
from kvtier.memory.torch_types import AnyDType, element_type, torch_dtype


def load_model(
    model: str | Path = DEFAULT_MODEL,
    dtype: AnyDType = "f32",
    device: str | torch.device = "cpu",
    ops: Ops | None = None,
) -> Model:
    """Read a model's weights onto a device. `ops` is how it computes, the device's fast way unless given."""
    path, kind, place = resolve(model), torch_dtype(element_type(dtype)), torch.device(device)
    if not kind.is_floating_point:
        raise CheckpointError(f"a model cannot compute in {kind}; take f32, bf16 or f16")
    if path.is_dir():
        config = ModelConfig.from_folder(path)
        with SafetensorsFolder(path) as folder:
            return Model(config, assemble(config, folder, kind, place), ops)
    from kvtier.engine.gguf import GgufFile

    file = GgufFile(path)
    return Model(file.config, assemble(file.config, file, kind, place), ops)
