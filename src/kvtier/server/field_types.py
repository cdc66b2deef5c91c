"""Types and base model of request bodies.

Validation takes linear time and reports few errors for any input. Sizes are checked before items, validation of a list
stops at the first invalid item, and lists of tokens are checked as a whole.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvtier.engine.params import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_BIASES,
    PENALTY,
    REPETITION_PENALTY,
    TEMPERATURE,
)
from kvtier.server.config import MAX_PRIORITY

Text = Annotated[str, StringConstraints(max_length=4 << 20)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ShortText = Annotated[str, StringConstraints(max_length=256)]
_MAX_TOKEN_ID = (1 << 31) - 1
TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
_INT64 = 1 << 63
MAX_FIELDS = 64  # limit for objects with known fields; the largest request has 57 fields
_MAX_PROMPTS = 128  # maximum number of prompts in a body; see also `Limits.answers`
# Nesting limit for arbitrary JSON, because serializing recurses once per level (pydantic fails at 255).
_MAX_DEPTH = 100


def check_depth(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value. Raises ValueError if it is nested too deep."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return value
    raise ValueError(f"objects and lists are nested deeper than {_MAX_DEPTH} levels")


AnyObject = Annotated[dict[str, Any], AfterValidator(check_depth)]
"""Arbitrary JSON of limited depth."""


def _bounded(value: Any, most: int = MAX_FIELDS) -> Any:
    """Check the size of a list or an object before any of its items is validated."""
    if isinstance(value, list | dict) and len(value) > most:
        raise PydanticCustomError("too_long", "{count} items; the limit is {most}", {"count": len(value), "most": most})
    return value


def few(most: int) -> BeforeValidator:
    """Return a validator that limits the size of a list or an object."""
    return BeforeValidator(lambda value: _bounded(value, most))


TemplateVariables = Annotated[dict[str, str | int | float | bool | None], Field(max_length=64), few(64)]
"""Variables for the chat template."""


def _token_ids(values: list[Any], where: str = "") -> list[int]:
    """Check the items of a list together, which takes 0.1 s for 1.4 million items.

    If pydantic checked each item and reported an error for each, the check would take 26 s (x86-64, 2026-11-16).
    """
    if not values:
        raise ValueError(f"{where}empty list of tokens; a request needs at least one token")
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > _MAX_TOKEN_ID:
        valid = (type(value) is int and 0 <= value <= _MAX_TOKEN_ID for value in values)
        at = next(index for index, is_valid in enumerate(valid) if not is_valid)
        raise ValueError(f"{where}item {at} must be a token id: an integer in [0, {_MAX_TOKEN_ID}]")
    return values


def _allowed_ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("expected a list of token ids")
    return _token_ids(_bounded(value, MAX_ALLOWED_TOKENS))


def _one_prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _token_ids(value)
    raise ValueError("expected a text or a list of token ids")


def _prompts(value: Any) -> str | list[int] | list[str] | list[list[int]]:
    """Check one or several prompts. The first item of a list determines which type all items must have."""
    if not isinstance(value, list) or not value or type(value[0]) is int:
        return _one_prompt(value)
    if len(value) > _MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts; the limit is {_MAX_PROMPTS}")
    if isinstance(value[0], str):
        if not all(isinstance(prompt, str) for prompt in value):
            raise ValueError("all prompts must be texts if the first one is a text")
        return value
    if not all(isinstance(prompt, list) for prompt in value):
        raise ValueError("expected a text, a list of texts, a list of token ids, or a list of lists of token ids")
    return [_token_ids(prompt, f"prompt {index}: ") for index, prompt in enumerate(value)]


def _token_list(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("expected a list of token ids")
    return _token_ids(value)


_Tokens = Annotated[list[TokenId], Field(min_length=1)]
OnePrompt = Annotated[str | list[int], PlainValidator(_one_prompt, json_schema_input_type=Text | _Tokens)]
Prompts = Annotated[
    str | list[int] | list[str] | list[list[int]],
    PlainValidator(
        _prompts,
        json_schema_input_type=Text
        | _Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[list[_Tokens], Field(min_length=1, max_length=_MAX_PROMPTS)],
    ),
]


TokenList = Annotated[list[int], PlainValidator(_token_list, json_schema_input_type=_Tokens)]


class Strict(BaseModel):
    """Base model that converts no types and rejects unknown fields, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    _few_fields = model_validator(mode="before")(lambda value: _bounded(value))


def _biases(values: dict[str, float]) -> dict[str, float]:
    low, high = LOGIT_BIAS
    for name, value in values.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= _MAX_TOKEN_ID):
            raise ValueError(f"every key must be a token id: an integer in [0, {_MAX_TOKEN_ID}]")
        if not low <= value <= high:
            raise ValueError(f"the bias of token {name} must be in [{low:g}, {high:g}]")
    return values


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Temperature = Annotated[float, Field(ge=TEMPERATURE[0], le=TEMPERATURE[1])]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]
Penalty = Annotated[float, Field(ge=PENALTY[0], le=PENALTY[1])]
RepetitionPenalty = Annotated[float, Field(ge=REPETITION_PENALTY[0], le=REPETITION_PENALTY[1])]
Seed = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
PositiveCount = Annotated[int, Field(ge=1, lt=1 << 31)]
StopTexts = Annotated[list[StopText], Field(max_length=16, fail_fast=True), few(16)]
StopTokens = Annotated[list[TokenId], Field(max_length=64, fail_fast=True), few(64)]
BadWords = Annotated[list[StopText], Field(max_length=64, fail_fast=True), few(64)]
Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASES), few(MAX_BIASES), AfterValidator(_biases)]
AllowedTokens = Annotated[
    list[int],
    Field(min_length=1, max_length=MAX_ALLOWED_TOKENS),
    PlainValidator(_allowed_ids, json_schema_input_type=list[TokenId]),
]
Choices = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]],
    Field(min_length=1, max_length=1024, fail_fast=True),
    few(1024),
]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
RequestId = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,128}$")]
SessionKey = Annotated[str, StringConstraints(max_length=512)]
