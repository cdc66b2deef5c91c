"""The grammar of a request's answer: from response_format, structured_outputs, guided_*, or a forced tool call."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from kvtier.engine import schemas
from kvtier.engine.schemas import Grammar
from kvtier.errors import ArgumentError
from kvtier.server.chat_messages import NamedToolChoice
from kvtier.server.errors import ApiError
from kvtier.server.protocol import ChatRequest, JsonSchemaFormat, PlainFormat, Sampling, StructuredOutputs
from kvtier.server.tool_schemas import arguments_schema, calls_schema

_ANY_OBJECT = {"type": "object"}


class AnswerGrammar(NamedTuple):
    """A grammar, and its place in the request."""

    grammar: Grammar
    field: str
    """Name of the request field, for error messages."""
    param: str
    """Path of the grammar in the request body, for `ApiError.param`."""

    def error(self, error: ApiError) -> ApiError:
        """Return a copy of `error` whose message begins with the name of the request field."""
        return ApiError(error.status, f"{self.field}: {error.message}", self.param, error.code)


def answer_grammar(body: Sampling) -> AnswerGrammar | None:
    """Return the grammar of the answer, or None if any text is allowed. The grammar is checked, but not compiled."""
    found = _sources(body)
    if not found:
        return None
    if len(found) > 1:
        (first_field, first, _, _), (second_field, second, _, _) = found[:2]
        if first_field != second_field:
            first, second = first_field, second_field
        raise ApiError(400, f"{second} cannot be combined with {first}: an answer has one grammar", second)
    ((field, param, kind, value),) = found
    if not schemas.is_available():
        raise ApiError(400, f"{field}: this server lacks llguidance and supports only text", field, "unavailable")
    for other in ("min_tokens", "ignore_eos"):
        if getattr(body, other):
            raise ApiError(400, f"{other} cannot be combined with {field}: the grammar ends the answer", other)
    try:
        grammar = _grammar(kind, value)
        size, most = len(grammar.text.encode(errors="surrogatepass")), schemas.MAX_SCHEMA_BYTES
        if size > most:
            raise ArgumentError(f"the grammar has {size} bytes; the limit is {most}")
        if kind == "json":
            schemas.check_shape(json.loads(grammar.text) if isinstance(value, str) else value)
    except ArgumentError as error:
        raise ApiError(400, f"{field}: {error}", param) from error
    return AnswerGrammar(grammar, field, param)


def _sources(body: Sampling) -> list[tuple[str, str, str, Any]]:
    """Return `field` and `param` (see AnswerGrammar), kind and value of each grammar in a request."""
    found: list[tuple[str, str, str, Any]] = []
    match body.response_format:
        case PlainFormat(type="json_object"):
            found.append(("response_format", "response_format", "json", _ANY_OBJECT))
        case JsonSchemaFormat(json_schema=schema):
            found.append(("response_format", "response_format.json_schema.schema", "json", schema.schema_))
    if isinstance(body, ChatRequest) and (forced := body.forced_tools):
        if isinstance(body.tool_choice, NamedToolChoice):
            calls = arguments_schema(forced[0].parameters)
        else:
            calls = calls_schema([(tool.name, tool.parameters) for tool in forced], max_calls=body.max_calls)
        found.insert(0, ("tools", "tools", "json", calls))
    if body.structured_outputs is not None:
        name = "structured_outputs"
        found += [(name, f"{name}.{kind}", kind, value) for kind, value in _parts(body.structured_outputs)]
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found.append((f"guided_{kind}", f"guided_{kind}", kind, value))
    return found


def _parts(outputs: StructuredOutputs) -> list[tuple[str, Any]]:
    named = {
        "json": outputs.json_,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "grammar": outputs.grammar,
    }
    parts = [(kind, value) for kind, value in named.items() if value is not None]
    return [*parts, ("json", _ANY_OBJECT)] if outputs.json_object else parts


def _grammar(kind: str, value: Any) -> Grammar:
    """Return the grammar for a value of a field. Raises ArgumentError for a value that is not a grammar."""
    if kind == "regex":
        return Grammar("regex", value)
    if kind == "choice":
        return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value))
    if kind == "grammar":
        return Grammar("lark", schemas.to_lark(value))
    if isinstance(value, dict):
        return Grammar("json", json.dumps(value))
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the schema is not JSON: {type(error).__name__}") from error
    if not isinstance(schema, dict):
        raise ArgumentError("the schema is not a JSON object")
    return Grammar("json", value)
