"""Runs a real model: weights, tokenizer, forward pass on a paged cache, sampling.

Extra `engine`: safetensors, tokenizers, jinja2, gguf. Importing this package needs none of them.
"""

from kvtier.engine.checkpoint import DEFAULT_MODEL, load_model, resolve
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.generation import Explanation, FinishReason, Output
from kvtier.engine.llm import LLM, Completion
from kvtier.engine.model import Model, default_ops
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.ops import CpuOps, Ops, TorchOps
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.engine.runner import EngineRunner
from kvtier.engine.sampling import Logprobs, Penalties, RequestSampler, Sample, SamplingParams, sample
from kvtier.engine.speculate import DraftProposer, NgramProposer, Proposer
from kvtier.engine.stop import Released, StopChecker
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
    "Released",
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
