"""Requests of Anthropic's Messages API, and their translation into chat requests.

A request becomes a ChatRequest, so admission, templates, grammars and parsers are the same as for chat completions.
This module is also imported by worker processes (prepare.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from kvtier.server.agent_fields import MESSAGES_FIELDS
from kvtier.server.field_types import (
    AnyObject,
    ModelName,
    Name,
    PositiveCount,
    Priority,
    Seed,
    ShortText,
    StopTexts,
    Strict,
    Temperature,
    TemplateVariables,
    Text,
    ToolName,
    TopK,
    TopP,
    few,
)
from kvtier.server.protocol import ChatRequest

_MAX_BLOCKS = 4096  # maximum number of content blocks in a message
# Field of the chat request -> the field of this API that it comes from. Error responses name the field of this API.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
    }
)


class Loose(Strict):
    """Base model of the parts of a request. Unknown fields, such as cache_control, have no effect."""

    model_config = ConfigDict(extra="ignore")


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Loose):
    type: Literal["text"]
    text: Text


_Texts = Annotated[
    list[TextBlock],
    Field(max_length=_MAX_BLOCKS, fail_fast=True),
    few(_MAX_BLOCKS),
    BeforeValidator(_as_blocks, json_schema_input_type=Text | list[TextBlock]),
]


class ThinkingBlock(Loose):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Loose):
    """Encrypted reasoning of another server. It is skipped."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Loose):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: ShortText
    name: ToolName
    input: AnyObject


class ToolResultBlock(Loose):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: _Texts = Field(default_factory=list)
    is_error: bool = False


InputBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
_Blocks = Annotated[
    list[InputBlock],
    Field(max_length=_MAX_BLOCKS, fail_fast=True),
    few(_MAX_BLOCKS),
    BeforeValidator(_as_blocks, json_schema_input_type=Text | list[InputBlock]),
]


class Turn(Loose):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: _Blocks

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Self:
        is_assistant = self.role == "assistant"
        wrong: Any = ToolResultBlock if is_assistant else (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)
        for index, block in enumerate(self.content):
            if isinstance(block, wrong):
                raise ValueError(f"content.{index}: a message of the role {self.role} cannot have {block.type} blocks")
        return self

    def chat_messages(self) -> list[dict[str, Any]]:
        """Return the turn as messages of a chat request. Each tool result becomes a separate message."""
        if self.role == "assistant":
            return [self._assistant()]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                text = _joined(block.content)
                text = f"Error: {text}" if block.is_error else text
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif isinstance(block, TextBlock):
                if messages and messages[-1]["role"] == self.role:
                    messages[-1]["content"] += "\n" + block.text
                else:
                    messages.append({"role": self.role, "content": block.text})
        return messages or [{"role": self.role, "content": ""}]

    def _assistant(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = _joined([block for block in self.content if isinstance(block, TextBlock)])
        thinking = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        if thinking:
            message["reasoning_content"] = "\n".join(thinking)
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        return message


def _joined(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


class AgentTool(Loose):
    """A tool. It is used if its type is `custom` or None. Other tools, which Anthropic defines or runs, are skipped."""

    type: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: AnyObject | None = None

    @property
    def is_skipped(self) -> bool:
        return self.type not in (None, "custom")

    @model_validator(mode="after")
    def _has_schema(self) -> AgentTool:
        if not self.is_skipped and self.input_schema is None:
            raise ValueError("a tool needs input_schema")
        return self


class AgentToolChoice(Loose):
    """How the model uses tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> AgentToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('name is required if type is "tool", and not allowed otherwise')
        return self


class Thinking(Loose):
    type: Literal["enabled", "disabled", "adaptive"]


class SchemaFormat(Loose):
    """Answer format: JSON that follows a schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: AnyObject = Field(alias="schema")


class OutputConfig(Loose):
    format: SchemaFormat | None = None


class CountTokensRequest(Strict):
    """POST /v1/messages/count_tokens."""

    fields: ClassVar = MESSAGES_FIELDS
    names: ClassVar = NAMES

    model: ModelName
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096, fail_fast=True), few(4096)]
    system: _Texts | None = None
    tools: Annotated[list[AgentTool], Field(max_length=128, fail_fast=True), few(128)] | None = None
    tool_choice: AgentToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _has_text_to_continue(self) -> Self:
        message = self.messages[-1].chat_messages()[-1]
        if message["role"] == "assistant" and not message.get("tool_calls") and not message["content"].strip():
            raise ValueError("messages: the final message is the assistant's, but it has no text to continue")
        return self

    @property
    def skipped(self) -> list[str]:
        """Names of the skipped tools. A name is `tools.`, followed by the type of the tool."""
        return [f"tools.{tool.type}" for tool in self.tools or () if tool.is_skipped]

    def without_prompt(self) -> Self:
        return self.model_copy(update={"messages": [], "system": None, "tools": None})

    def to_chat(self) -> ChatRequest:
        """Return the chat request. A ValidationError names fields of the chat request, which `names` translates."""
        return ChatRequest(**self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        system = [{"role": "system", "content": _joined(self.system)}] if self.system else []
        messages = [message for turn in self.messages for message in turn.chat_messages()]
        is_continued = self.messages[-1].role == "assistant" and not messages[-1].get("tool_calls")
        is_thinking = self.thinking is not None and self.thinking.type != "disabled"
        fields = {
            "model": self.model,
            "messages": system + messages,
            "tools": _chat_tools(self.tools),
            "chat_template_kwargs": {"enable_thinking": is_thinking, **(self.chat_template_kwargs or {})},
            "continue_final_message": is_continued or None,
            **_chat_choice(self.tool_choice),
        }
        format = self.output_format or (self.output_config.format if self.output_config is not None else None)
        if format is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": format.schema_}}
        return fields


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    endpoint: ClassVar = "messages"
    id_prefix: ClassVar = "msg_"

    max_tokens: PositiveCount
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    seed: Seed | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None

    def _chat_fields(self) -> dict[str, Any]:
        same = ("temperature", "top_p", "top_k", "stream", "seed", "cache_salt", "priority")
        fields = {name: getattr(self, name) for name in same}
        limits = {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**CountTokensRequest._chat_fields(self), **fields, **limits}


def _chat_tools(tools: Sequence[AgentTool] | None) -> list[dict[str, Any]] | None:
    kept = [tool for tool in tools or () if not tool.is_skipped]
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in kept
    ] or None


def _chat_choice(choice: AgentToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    names = {"auto": "auto", "none": "none", "any": "required"}
    value: Any = names.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": value, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}
