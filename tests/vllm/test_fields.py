"""The tables of request fields have every field of the installed vLLM."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from kvtier.server.agent_fields import MESSAGES_FIELDS, RESPONSES_FIELDS
from kvtier.server.fields import FIELDS

TABLES = {
    "ChatCompletionRequest": {name for name, field in FIELDS.items() if "c" in field.places},
    "CompletionRequest": {name for name, field in FIELDS.items() if "t" in field.places},
    "ResponsesRequest": {*RESPONSES_FIELDS},
    "AnthropicMessagesRequest": {*MESSAGES_FIELDS},
    "AnthropicCountTokensRequest": {*MESSAGES_FIELDS},
}


def fields_of_vllm() -> dict[str, set[str]]:
    """Return the public fields of vLLM's requests. The sources are parsed, because importing them takes seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    found = {}
    for path in (Path(spec.origin).parent / "entrypoints").rglob("protocol.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name in TABLES:
                assigned = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                names = {target.id for target in assigned if isinstance(target, ast.Name)}
                found[node.name] = {name for name in names if not name.startswith("_")}
    return found


@pytest.mark.parametrize("request_name", TABLES)
def test_table_has_every_field_of_vllm(request_name):
    fields = fields_of_vllm()[request_name]
    assert len(fields) >= 5
    assert fields <= TABLES[request_name]
