"""Messages and tools of chat requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from kvtier.server.field_types import AnyObject, Name, ShortText, Strict, Text, ToolName, check_depth, few


class TextPart(Strict):
    """A part of a message's content. Unknown fields, such as cache_control, have no effect."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: Text


class RefusalPart(Strict):
    """A refusal in an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
"""A part of a message's content. Only texts and refusals are supported."""


def _named(call: dict[str, Any]) -> dict[str, Any]:
    """Check the parts of a tool call that chat templates use."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("function.name of a tool call must be a string")
    if not isinstance(function.get("arguments"), str | dict | None):
        raise ValueError("function.arguments must be a JSON object, or a string that contains one")
    return call


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object. Clients send JSON text; chat templates expect an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
        check_depth({"arguments": arguments})
    except (ValueError, RecursionError):  # invalid or too deep JSON: the template gets the text
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class Message(Strict):
    """One turn of a conversation. Ignores unknown fields, such as those that other servers add to answers."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(max_length=4096, fail_fast=True), few(4096)] | None = None
    name: ShortText | None = None
    reasoning_content: Text | None = None
    """Reasoning of an earlier answer. Some chat templates put it into the prompt while a tool loop runs."""
    tool_calls: (
        Annotated[list[Annotated[AnyObject, AfterValidator(_named)]], Field(max_length=128, fail_fast=True), few(128)]
        | None
    ) = None
    tool_call_id: ShortText | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content or tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates, with its content joined to one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        tool_calls = [_template_call(call) for call in self.tool_calls or ()]
        optional = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": tool_calls,
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": content, **{key: value for key, value in optional.items() if value}}


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True), few(4096)]


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool definition, which is passed to the chat template."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: AnyObject | None = Field(None, exclude=True)
    """Accepted without effect, because every prefix is cached."""


class NamedFunction(Strict):
    name: Name


class NamedToolChoice(Strict):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


def check_end(messages: Sequence[Message], add_prompt: bool | None, is_continued: bool | None) -> None:
    """Raise ValueError if continue_final_message contradicts add_generation_prompt or the last message."""
    if not is_continued:
        return
    if add_prompt:
        raise ValueError("continue_final_message cannot be combined with add_generation_prompt: true")
    last = messages[-1].for_template()
    if last["role"] != "assistant" or not last["content"].strip():
        raise ValueError("continue_final_message: the final message must have the role assistant and must not be empty")
