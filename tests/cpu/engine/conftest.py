"""Tiny random checkpoints of every architecture, created by transformers. Tests compare kvtier with transformers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

NEEDED = ("transformers", "safetensors", "tokenizers", "jinja2")
collect_ignore_glob = [] if all(importlib.util.find_spec(name) for name in NEEDED) else ["test_*.py"]

# Some virtual machines report AMX, but fail on AMX instructions. oneDNN would use AMX for bf16 matrices.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, one kv head": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread. With more threads, torch is very slow if another process uses one of the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns the folder and the transformers model of a checkpoint.

    The first call with a kind and options creates the checkpoint. Later calls with the same arguments reuse it.
    """
    made: dict[Any, tuple[Path, Any]] = {}

    def make(kind: str, **options: Any) -> tuple[Path, Any]:
        key = (kind, *options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            model = random_model(kind)
            model.save_pretrained(folder, **options)
            made[key] = folder, model
        return made[key]

    return make


def random_model(kind: str) -> Any:
    """Return a model with weights large enough that attention, norms and biases affect the logits."""
    import transformers

    name, changes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**TINY, **changes})
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.ndim == 1 else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.ndim == 1))
    return model
