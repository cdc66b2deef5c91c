"""Run a language model: load weights, tokenize text, compute forward passes on a paged KV cache, sample tokens.

The extra `engine` installs safetensors, tokenizers, jinja2 and gguf. kvtier.engine can be imported without them. Names
that need torch are imported on first use.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvtier.engine.packaged import DEFAULT_MODEL, resolve
from kvtier.engine.params import Explanation, FinishReason, Logprobs, Output, Penalties, PromptLogprobs, SamplingParams
from kvtier.engine.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from kvtier.engine.checkpoint import load_model
    from kvtier.engine.engine import Engine, EngineConfig
    from kvtier.engine.llm import LLM, Completion
    from kvtier.engine.model import Model
    from kvtier.engine.model_config import ModelConfig
    from kvtier.engine.ops_invariant import InvariantOps
    from kvtier.engine.runner import EngineRunner
    from kvtier.engine.speculate import DraftProposer, NgramProposer, Proposer

__all__ = [
    "DEFAULT_MODEL",
    "LLM",
    "Completion",
    "DraftProposer",
    "Engine",
    "EngineConfig",
    "EngineRunner",
    "Explanation",
    "FinishReason",
    "InvariantOps",
    "Logprobs",
    "Model",
    "ModelConfig",
    "NgramProposer",
    "Output",
    "Penalties",
    "PromptLogprobs",
    "Proposer",
    "SamplingParams",
    "Tokenizer",
    "load_model",
    "load_tokenizer",
    "resolve",
]

_MODULE_OF = MappingProxyType(
    {
        "load_model": "checkpoint",
        "Model": "model",
        "ModelConfig": "model_config",
        "InvariantOps": "ops_invariant",
        "EngineRunner": "runner",
        **dict.fromkeys(("Engine", "EngineConfig"), "engine"),
        **dict.fromkeys(("LLM", "Completion"), "llm"),
        **dict.fromkeys(("DraftProposer", "NgramProposer", "Proposer"), "speculate"),
    }
)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
