"""Structured answers fit their schema, even if the model prefers other tokens."""

from __future__ import annotations

import json
import shutil

import httpx
import pytest
from pydantic import BaseModel, Field

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


class Animal(BaseModel):
    """SCHEMA as a pydantic model, to validate answers."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)
    kind: str = Field(pattern="^(cat|dog)$")
    tags: list[bool] = Field(max_length=2)


def ask(server, **options):
    return server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "An animal, please."}],
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
        max_tokens=400,
        **options,
    )


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.5, "seed": 1, "n": 4}, {"top_p": 0.5, "seed": 2}]
)
def test_structured_answer_of_random_model_fits_the_schema(server, options):
    for choice in ask(server, **options).choices:
        assert choice.finish_reason == "stop"
        Animal.model_validate_json(choice.message.content, strict=True)


def test_stream_with_schema_does_not_change_other_requests(server):
    plain = {"model": server.model, "prompt": "zebra", "temperature": 0, "max_tokens": 60}
    alone = server.client().completions.create(**plain).choices[0].text
    stream = ask(server, stream=True, seed=5)
    concurrent = server.client().completions.create(**plain).choices[0].text
    Animal.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in stream), strict=True)
    assert concurrent == alone


def test_json_object_format_returns_an_object(server):
    answer = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "JSON, please."}],
        response_format={"type": "json_object"},
        max_tokens=50,
        temperature=0,
    )
    text = answer.choices[0].message.content
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("schema", "more", "param"),
    [
        ({"type": "nonsense"}, {}, "response_format.json_schema.schema"),
        ({"type": "string", "pattern": "("}, {}, "response_format.json_schema.schema"),
        (SCHEMA, {"ignore_eos": True}, "ignore_eos"),
        (SCHEMA, {"min_tokens": 3}, "min_tokens"),
    ],
)
def test_invalid_schema_or_conflicting_option_is_400(server, schema, more, param):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": server.model, "prompt": "x", "max_tokens": 5, "response_format": form, **more}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def one_of_many(count):
    """Return a schema with `count` alternatives. llguidance can track at most 2,000 alternatives at once."""
    forms = [
        {"type": "object", "properties": {f"xylophone{i}": {"type": "null"}}, "additionalProperties": False}
        for i in range(count)
    ]
    inner = {"type": "object", "properties": {"xylophone": {"anyOf": forms}}, "required": ["xylophone"]}
    return {**inner, "additionalProperties": False}


def test_too_complex_schema_fails_only_its_own_request(server):
    plain = {"model": server.model, "prompt": "zebra", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": one_of_many(3000)}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=plain, timeout=60) as concurrent:
        lines = concurrent.iter_lines()
        next(lines)
        answer = server.post(
            "/v1/completions", {"model": server.model, "prompt": "x", "max_tokens": 50, "response_format": form}
        )
        events = [line for line in lines if line]
    assert answer.status_code == 500, answer.text
    assert "no token fits the schema" in answer.json()["error"]["message"]
    assert events[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in events)
    assert "no token fits the schema" in server.log
    for text in (answer.text, server.log):
        assert "xylophone" not in text


def test_schema_with_unsupported_tokenizer_is_500(start, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "odd")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "decoder": {"type": "Fuse"}}))
    server = start("--model", str(folder))
    body = {"model": server.model, "prompt": "x", "max_tokens": 3}
    answer = server.post("/v1/completions", {**body, "response_format": {"type": "json_object"}})
    assert answer.status_code == 500, answer.text
    assert (
        "does not support structured answers: ValueError: can't determine decoder" in answer.json()["error"]["message"]
    )
    assert server.post("/v1/completions", body).status_code == 200
