"""A server with the default model answers correctly, follows a schema and caches prompts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine_helpers import needs_smollm2
from server_support import ServerProcess

pytestmark = needs_smollm2
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("smollm2")
    options = ("--blocks", "128", "--host-blocks", "64", "--disk", str(folder / "kv"), "--disk-bytes", "512MiB")
    process = ServerProcess(folder / "log", "--threads", "1", *options)
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log, process.log


def test_smollm2_server_answers_question_correctly(smollm2):
    create = smollm2.client().chat.completions.create
    answer = create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of France is Paris."
    again = create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=12)
    assert again.usage.prompt_tokens_details.cached_tokens >= 32


def test_example_on_operating_page_runs_on_smollm2(smollm2):
    guide = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()
    example = re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1].replace("http://127.0.0.1:8000", smollm2.url)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"The capital of France is Paris. \d+\n", done.stdout)


def test_smollm2_server_follows_a_schema(smollm2):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {
            "capital": {"enum": ["Paris", "Rome", "Berlin"]},
            "country": {"type": "string", "maxLength": 20},
        },
        "required": ["capital", "country"],
        "additionalProperties": False,
    }
    answer = smollm2.client().chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content)["capital"] == "Paris"
