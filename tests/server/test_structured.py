"""Answers after a schema are what the schema says, whatever the model would rather write."""

from __future__ import annotations

import json

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
    """The same, for somebody who checks."""

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
def test_random_models_write_what_the_schema_says(server, options):
    for choice in ask(server, **options).choices:
        assert choice.finish_reason == "stop"
        Animal.model_validate_json(choice.message.content, strict=True)


def test_streams_and_neighbours_without_a_schema_are_not_disturbed(server):
    plain = {"model": server.model, "prompt": "zebra", "temperature": 0, "max_tokens": 60}
    alone = server.client().completions.create(**plain).choices[0].text
    stream = ask(server, stream=True, seed=5)
    beside = server.client().completions.create(**plain).choices[0].text
    Animal.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in stream), strict=True)
    assert beside == alone


def test_an_object_is_asked_for(server):
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
def test_what_cannot_be_followed_is_refused(server, schema, more, param):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": server.model, "prompt": "x", "max_tokens": 5, "response_format": form, **more}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
