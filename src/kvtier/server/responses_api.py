"""Requests of OpenAI's Responses API, and their translation into chat requests. Responses are not stored.

This module is also imported by worker processes (prepare.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from kvtier.server.agent_fields import RESPONSES_FIELDS
from kvtier.server.field_types import (
    AnyObject,
    Biases,
    MinP,
    ModelName,
    Name,
    Penalty,
    PositiveCount,
    Priority,
    RepetitionPenalty,
    RequestId,
    Seed,
    SessionKey,
    ShortText,
    StopText,
    StopTexts,
    StopTokens,
    Strict,
    Temperature,
    TemplateVariables,
    Text,
    ToolName,
    TopK,
    TopP,
    few,
)
from kvtier.server.messages_api import Loose
from kvtier.server.protocol import ChatRequest, StructuredOutputs

_MAX_ITEMS = 4096  # maximum number of items in a request, and of parts in an item
_SAME_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "structured_outputs",
    "session_id",
    "prompt_cache_key",
    "request_id",
    "stream",
    "parallel_tool_calls",
    "cache_salt",
    "priority",
)
"""Fields that chat requests have under the same name."""
_LOGPROBS = "message.output_text.logprobs"
# Field of the chat request -> the field of this API from which it is translated. The endpoint uses this map to rename
# the fields in errors of the chat request.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "response_format.json_schema.schema": "text.format.schema",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
    }
)


class ContentPart(Loose):
    """A part of a message or of a function's result. Only text is supported."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text = ""
    refusal: Text = ""


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Parts = Annotated[
    list[ContentPart],
    Field(max_length=_MAX_ITEMS, fail_fast=True),
    few(_MAX_ITEMS),
    BeforeValidator(_as_parts, json_schema_input_type=Text | list[ContentPart]),
]


def _joined(parts: Sequence[ContentPart]) -> str:
    return "\n".join(part.text or part.refusal for part in parts)


class MessageItem(Loose):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Append the message, or join it with the last message.

        Chat templates expect one system message at the start. System and developer messages at the start are therefore
        joined into one message, after the instructions. Later system messages stay where they are.
        """
        role, text = "system" if self.role == "developer" else self.role, _joined(self.content)
        last = messages[-1] if messages else {}
        if role == "assistant" and last.get("role") == role and not last["content"] and not last.get("tool_calls"):
            last["content"] = text  # `last` has no text: normally it comes from a ReasoningItem
        elif role == "system" and len(messages) == 1 and last["role"] == role:
            last["content"] += "\n\n" + text
        else:
            messages.append({"role": role, "content": text})


class FunctionCallItem(Loose):
    """A function call in an earlier response."""

    type: Literal["function_call"]
    call_id: ShortText
    name: ToolName
    arguments: Text

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Add the call to the last message if the assistant wrote that message, otherwise to a new message."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)


class FunctionOutputItem(Loose):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: ShortText
    output: _Parts

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)})


class ReasoningPart(Loose):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


_ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=_MAX_ITEMS, fail_fast=True), few(_MAX_ITEMS)]


class ReasoningItem(Loose):
    """Reasoning of an earlier response. Encrypted reasoning, which comes from other servers, is skipped."""

    type: Literal["reasoning"]
    summary: _ReasoningParts | None = None
    content: _ReasoningParts | None = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        text = "\n".join(part.text for part in self.content or self.summary or ())
        if text:
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})


InputItem = Annotated[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem, Field(discriminator="type")]


def _as_items(value: Any) -> Any:
    """Convert a text to a list of one item, and add the type that clients leave out of messages."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or len(value) > _MAX_ITEMS:
        return value
    return [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value]


class ResponseTool(Loose):
    """A tool. It is used if its type is `function`. Other tools, which OpenAI runs or defines, are skipped."""

    type: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    name: ToolName | None = None
    description: Text | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type == "function" and not self.name:
            raise ValueError("a function needs a name")
        return self


class NamedResponseTool(Strict):
    """The function that the model must call."""

    type: Literal["function"]
    name: Name


class TextFormat(Loose):
    """Any text, any JSON object, or JSON that follows a schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    schema_: AnyObject | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError('schema is required if type is "json_schema", and not allowed otherwise')
        return self


class TextConfig(Loose):
    format: TextFormat | None = None


class ReasoningConfig(Loose):
    effort: ShortText | None = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    endpoint: ClassVar = "responses"
    id_prefix: ClassVar = "resp_"
    fields: ClassVar = RESPONSES_FIELDS
    names: ClassVar = NAMES

    model: ModelName
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True),
        few(_MAX_ITEMS),
        BeforeValidator(_as_items, json_schema_input_type=Text | list[InputItem]),
    ]
    instructions: Text | None = None
    max_output_tokens: PositiveCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    session_id: Name | None = None
    prompt_cache_key: SessionKey | None = None
    request_id: RequestId | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True), few(128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[ShortText], Field(max_length=64, fail_fast=True), few(64)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None

    @model_validator(mode="after")
    def _has_no_logprobs(self) -> Self:
        if _LOGPROBS in (self.include or ()):
            raise ValueError(f"include: {_LOGPROBS} is not supported; use /v1/chat/completions")
        return self

    @property
    def functions(self) -> list[ResponseTool]:
        return [tool for tool in self.tools or () if tool.type == "function"]

    @property
    def skipped(self) -> list[str]:
        """Names of the skipped tools. A name is `tools.`, followed by the type of the tool."""
        return [f"tools.{tool.type}" for tool in self.tools or () if tool.type != "function"]

    def without_prompt(self) -> Self:
        """Return the request without its input. The response repeats some of the other fields."""
        return self.model_copy(update={"input": []})

    def to_chat(self) -> ChatRequest:
        """Return the chat request. A ValidationError names fields of the chat request, see NAMES."""
        fields = {name: getattr(self, name) for name in _SAME_FIELDS}
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            item.add_to(messages)
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort == "none":
            variables.setdefault("enable_thinking", False)
        choice: Any = self.tool_choice
        if isinstance(choice, NamedResponseTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        translated = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": _chat_tools(self.functions),
            "tool_choice": choice,
            "response_format": _chat_format(self.text),
            "chat_template_kwargs": variables or None,
        }
        return ChatRequest(**fields, **translated)


def _chat_tools(tools: Sequence[ResponseTool]) -> list[Any] | None:
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
        for tool in tools
    ]
    return [{"type": "function", "function": function} for function in functions] or None


def _chat_format(text: TextConfig | None) -> Any:
    if text is None or text.format is None:
        return None
    if text.format.type == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": text.format.schema_}}
    return {"type": text.format.type}
