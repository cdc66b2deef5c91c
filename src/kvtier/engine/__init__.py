"""Runs a model: weights, tokenizer, forward pass on a paged cache, sampling.

Extra `engine`: safetensors, tokenizers, jinja2, gguf. Importing this package needs none of them. Names are imported on
first use, so that Output, SamplingParams and Tokenizer can be used without torch.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.engine.checkpoint import load_model
    from kvtier.engine.engine import Engine, EngineConfig
    from kvtier.engine.forward import ForwardBatch, SequenceInput
    from kvtier.engine.llm import LLM, Completion
    from kvtier.engine.model import Model, default_ops
    from kvtier.engine.model_config import ModelConfig, RopeConfig
    from kvtier.engine.ops import CpuOps, Ops, TorchOps
    from kvtier.engine.ops_invariant import InvariantOps
    from kvtier.engine.packaged import DEFAULT_MODEL, resolve
    from kvtier.engine.params import Explanation, FinishReason, Logprobs, Output, Penalties, SamplingParams
    from kvtier.engine.runner import EngineRunner
    from kvtier.engine.sampling import RequestSampler, Sample, sample
    from kvtier.engine.sequence import StopChecker
    from kvtier.engine.speculate import DraftProposer, NgramProposer, Proposer
    from kvtier.engine.tokenizer import Tokenizer, TokenStream, load_tokenizer
    from kvtier.engine.weights import LayerWeights, Linear, ModelWeights

__all__ = [
    "DEFAULT_MODEL",
    "LLM",
    "Completion",
    "CpuOps",
    "DraftProposer",
    "Engine",
    "EngineConfig",
    "EngineRunner",
    "Explanation",
    "FinishReason",
    "ForwardBatch",
    "InvariantOps",
    "LayerWeights",
    "Linear",
    "Logprobs",
    "Model",
    "ModelConfig",
    "ModelWeights",
    "NgramProposer",
    "Ops",
    "Output",
    "Penalties",
    "Proposer",
    "RequestSampler",
    "RopeConfig",
    "Sample",
    "SamplingParams",
    "SequenceInput",
    "StopChecker",
    "TokenStream",
    "Tokenizer",
    "TorchOps",
    "default_ops",
    "load_model",
    "load_tokenizer",
    "resolve",
    "sample",
]

_HOMES = MappingProxyType(
    {
        name: module
        for module, names in {
            "checkpoint": "load_model",
            "engine": "Engine EngineConfig",
            "forward": "ForwardBatch SequenceInput",
            "llm": "Completion LLM",
            "model": "Model default_ops",
            "model_config": "ModelConfig RopeConfig",
            "ops": "CpuOps Ops TorchOps",
            "ops_invariant": "InvariantOps",
            "packaged": "DEFAULT_MODEL resolve",
            "params": "Explanation FinishReason Logprobs Output Penalties SamplingParams",
            "runner": "EngineRunner",
            "sampling": "RequestSampler Sample sample",
            "sequence": "StopChecker",
            "speculate": "DraftProposer NgramProposer Proposer",
            "tokenizer": "TokenStream Tokenizer load_tokenizer",
            "weights": "LayerWeights Linear ModelWeights",
        }.items()
        for name in names.split()
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
