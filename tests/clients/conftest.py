"""Start servers for tests of clients. `make test-clients` installs the clients in a separate environment.

The server runs in the environment of kvtier: in .venv, or with the interpreter given by KVTIER_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("KVTIER_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
# The model answers with one sentence. If a tool call is forced, it answers with the first valid call. Each byte of a
# prompt is one token, so the tool descriptions of some clients need a long context.
_MAKE_SCRIPTED = """
import json, sys
from pathlib import Path
from scripted_model import make_scripted_model
folder = make_scripted_model(Path(sys.argv[1]), ["It will ", "rain."])
config = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
"""
_MAKE_RANDOM = """
import sys
from pathlib import Path
from tiny_model import make_tiny_model
make_tiny_model(Path(sys.argv[1]))
"""


def run_python(script: str, *arguments: str) -> str:
    """Run a script in the environment of kvtier, and return its output."""
    command = [PYTHON, "-c", script, *arguments]
    return subprocess.run(command, env=_environment(), check=True, capture_output=True, text=True).stdout


def _environment() -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@contextmanager
def _serve(folder: Path) -> Iterator[str]:
    """Serve a model inside a `with` statement. Yield the address of the server."""
    command = [PYTHON, "-m", "kvtier", "serve", "--port", "0", "--json", "--model", str(folder), "--threads", "1"]
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server with the model `tiny`, which answers with one sentence."""
    folder = tmp_path_factory.mktemp("scripted") / "tiny"
    run_python(_MAKE_SCRIPTED, str(folder))
    with _serve(folder) as address:
        yield address


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with random weights."""
    folder = tmp_path_factory.mktemp("random") / "tiny"
    run_python(_MAKE_RANDOM, str(folder))
    return folder


@pytest.fixture(scope="session")
def random_server(random_model: Path) -> Iterator[str]:
    with _serve(random_model) as address:
        yield address


@pytest.fixture(scope="session")
def transformers_scores(random_model: Path) -> Callable[[Sequence[tuple[list[int], list[int]]]], list[float]]:
    """Return a function that uses transformers and `random_model` to compute the log-likelihoods of continuations."""
    script = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
scores = []
for context, continuation in json.loads(sys.argv[2]):
    tokens, start = torch.tensor([context + continuation]), len(context)
    with torch.no_grad():
        logprobs = model(tokens).logits[0].log_softmax(-1)
    picked = [logprobs[at - 1, tokens[0, at]].item() for at in range(start, tokens.shape[1])]
    scores.append(sum(picked))
print(json.dumps(scores))
"""

    def score(pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        found: list[float] = json.loads(run_python(script, str(random_model), json.dumps(pairs)))
        return found

    return score
