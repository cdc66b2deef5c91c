"""JSON schemas that force a model to call tools (tool_choice "required", or the name of a function)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# OpenAI defines a function without `parameters` as a function without arguments.
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of the arguments of one function."""
    return dict(parameters) if parameters else dict(_NO_ARGUMENTS)


def calls_schema(tools: Sequence[tuple[str, Mapping[str, Any] | None]], *, max_calls: int | None) -> dict[str, Any]:
    """Return the schema of a list of tool calls. `tools` contains the name and the parameters of each tool."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, (name, _) in enumerate(tools)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if max_calls is not None:
        schema["maxItems"] = max_calls
    definitions = {
        f"tool{number}": _moved(arguments_schema(parameters), f"#/$defs/tool{number}")
        for number, (_, parameters) in enumerate(tools)
    }
    return {**schema, "$defs": definitions}


def _moved(value: Any, to: str) -> Any:
    """Return a copy of a schema for use at the path `to` of another schema. In a reference, `to` replaces the #."""
    if isinstance(value, Mapping):
        return {
            key: to + item[1:] if key == "$ref" and isinstance(item, str) and item.startswith("#") else _moved(item, to)
            for key, item in value.items()
        }
    return [_moved(item, to) for item in value] if isinstance(value, list) else value
