"""Answers in the format of Anthropic's Messages API, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvtier.engine.params import FinishReason, Output
from kvtier.server.answers import AnswerSyntax
from kvtier.server.blocks import AnswerBlocks, Block, BlockChange, server_event
from kvtier.server.completion_format import Usage, to_json, utf8_bytes
from kvtier.server.errors import ApiError

_TYPES = {"reasoning": "thinking", "content": "text", "call": "tool_use"}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesFormat:
    """Formats the single answer to a request. Implements `AnswerFormat`."""

    def __init__(self, id: str, model: str, syntax: AnswerSyntax) -> None:
        self._message = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._answer = AnswerBlocks(syntax, f"toolu_{id.removeprefix('msg_')}_")
        self._last: Output | None = None

    def add(self, index: int, outputs: Sequence[Output]) -> int:  # noqa: ARG002
        self._last = outputs[-1]
        self._answer.feed(outputs)
        return sum(utf8_bytes(output.text) for output in outputs)

    def whole(self, num_choices: int, usage: Usage) -> bytes:  # noqa: ARG002
        content = [_content(block) for block in self._answer.blocks]
        return to_json({**self._message, "content": content, **self._end(), "usage": _usage_body(usage)})

    def opening(self, index: int) -> bytes:  # noqa: ARG002
        return b""

    def piece(self, index: int, outputs: Sequence[Output]) -> bytes:  # noqa: ARG002
        data = b""
        if self._last is None:
            usage = _usage_body(Usage(outputs[0].num_prompt_tokens, outputs[0].num_cached_tokens, 0))
            message: dict[str, Any] = {
                **self._message,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage,
            }
            data = server_event("message_start", {"message": message})
        self._last = outputs[-1]
        return data + b"".join(map(_event, self._answer.feed(outputs)))

    def closing(self, usage: Usage) -> bytes:
        delta = server_event("message_delta", {"delta": self._end(), "usage": _usage_body(usage)})
        return delta + server_event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        body = error.anthropic_body
        return server_event("error", {"error": body["error"]})

    def _end(self) -> dict[str, Any]:
        stop_text = self._last.stop_text if self._last is not None else ""
        if self._answer.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif self._answer.ends_with_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if stop_text else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_text if reason == "stop_sequence" else None}


def _usage_body(usage: Usage) -> dict[str, int]:
    """Return the usage. As in Anthropic's API, `input_tokens` excludes the cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.new_tokens,
    }


def _start(block: Block) -> dict[str, Any]:
    """Return a block without its text."""
    head = {"type": _TYPES[block.kind]}
    match block.kind:
        case "reasoning":
            return {**head, "thinking": "", "signature": ""}
        case "content":
            return {**head, "text": ""}
    return {**head, "id": block.id, "name": block.name, "input": {}}


def _content(block: Block) -> dict[str, Any]:
    key = {"reasoning": "thinking", "content": "text", "call": "input"}[block.kind]
    return {**_start(block), key: _arguments(block.text) if block.kind == "call" else block.text}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call. If `text` is not a JSON object, wrap it as Anthropic recommends."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _event(change: BlockChange) -> bytes:
    index = change.block.index
    match change.action:
        case "open":
            return server_event("content_block_start", {"index": index, "content_block": _start(change.block)})
        case "close":
            return server_event("content_block_stop", {"index": index})
    kind, key = _DELTAS[change.block.kind]
    return server_event("content_block_delta", {"index": index, "delta": {"type": kind, key: change.text}})
