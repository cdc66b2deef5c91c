"""Runs a real model: weights, tokenizer, forward pass on a paged cache, sampling.

Extra `engine`: safetensors, tokenizers, jinja2, gguf. Importing this package needs none of them.
"""

from kvtier.engine.checkpoint import DEFAULT_MODEL, load_model, resolve
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model import Model, default_ops
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.ops import CpuOps, Ops, TorchOps
from kvtier.engine.ops_invariant import InvariantOps
from kvtier.engine.weights import LayerWeights, Linear, ModelWeights

__all__ = [
    "DEFAULT_MODEL",
    "CpuOps",
    "ForwardBatch",
    "InvariantOps",
    "LayerWeights",
    "Linear",
    "Model",
    "ModelConfig",
    "ModelWeights",
    "Ops",
    "RopeConfig",
    "SequenceInput",
    "TorchOps",
    "default_ops",
    "load_model",
    "resolve",
]
