"""Bodies of /tokenize, /detokenize, /v1/sessions/close and the control API."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kvtier.server.chat_messages import Messages, Tool, check_end
from kvtier.server.field_types import Name, OnePrompt, PositiveCount, Strict, TemplateVariables, Text, TokenList, few
from kvtier.server.protocol import ChatRequest


class _PromptOrMessages(Strict):
    prompt: OnePrompt | None = None
    messages: Messages | None = None
    parse_special: bool | None = None
    """The default is true for a prompt and false for messages, as in the completion endpoints."""
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True), few(128)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt and messages: set exactly one of them")
        if self.messages is not None:
            check_end(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self

    def to_chat(self) -> ChatRequest:
        """Return the messages and template options as a chat request. Only for a body with `messages`."""
        return ChatRequest(
            model="-",
            messages=self.messages or [],
            parse_special=bool(self.parse_special),
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class TokenizeRequest(_PromptOrMessages):
    """POST /tokenize: a text or a conversation."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt: Text | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    tokens: TokenList


class PromptBody(_PromptOrMessages):
    """A prompt for the control API, and the tenant and salt under which its blocks are cached."""

    cache_salt: Name | None = None
    tenant: Name | None = None


class PinBody(PromptBody):  # POST /control/pin
    name: Name


class NameBody(Strict):  # POST /control/unpin
    name: Name


class SessionBody(Strict):  # POST /v1/sessions/close
    session_id: Name


class ResetBody(Strict):  # POST /control/reset
    clear_stores: bool = False


class ResizeBody(Strict):  # POST /control/resize
    tier: Literal["device", "host"]
    num_blocks: PositiveCount
