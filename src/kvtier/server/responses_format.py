"""Answers in the format of OpenAI's Responses API, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.engine.params import FinishReason, Output
from kvtier.server.answers import AnswerSyntax
from kvtier.server.blocks import AnswerBlocks, Block, BlockChange, server_event
from kvtier.server.completion_format import Usage, to_json, utf8_bytes
from kvtier.server.errors import ApiError
from kvtier.server.responses_api import ResponsesRequest

_PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc"}


class ResponsesFormat:
    """Formats the only answer to a request. Implements `AnswerFormat`."""

    def __init__(self, id: str, created: int, request: ResponsesRequest, syntax: AnswerSyntax) -> None:
        self._name = id.removeprefix("resp_")
        self._answer = AnswerBlocks(syntax, f"call_{self._name}_")
        self._head = {"id": id, "object": "response", "created_at": created, "model": request.model}
        self._settings = _settings(request)
        self._num_events = 0

    def add(self, index: int, outputs: Sequence[Output]) -> int:  # noqa: ARG002
        self._answer.feed(outputs)
        return sum(utf8_bytes(output.text) for output in outputs)

    def whole(self, num_choices: int, usage: Usage) -> bytes:  # noqa: ARG002
        return to_json(self._response(self._status, usage))

    def opening(self, index: int) -> bytes:  # noqa: ARG002
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, {"response": response}) for kind in kinds)

    def piece(self, index: int, outputs: Sequence[Output]) -> bytes:  # noqa: ARG002
        return b"".join(map(self._change, self._answer.feed(outputs)))

    def closing(self, usage: Usage) -> bytes:
        return self._event(f"response.{self._status}", {"response": self._response(self._status, usage)})

    def failure(self, error: ApiError) -> bytes:
        reason = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", {"response": {**self._response("failed"), "error": reason}})

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        output = [] if status == "in_progress" else [self._item(block) for block in self._answer.blocks]
        body = {"status": status, "error": None, "incomplete_details": details, "output": output, **self._settings}
        return {**self._head, **body, "usage": None if usage is None else self._usage_body(usage)}

    def _usage_body(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.new_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.new_tokens,
        }

    def _change(self, change: BlockChange) -> bytes:
        block = change.block
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        part = {**place, "content_index": 0}
        match change.action:
            case "open":
                return self._open(block, part)
            case "close":
                return self._close(block, place, part)
        if block.kind == "call":
            return self._event("response.function_call_arguments.delta", {**place, "delta": change.text})
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", {**part, "delta": change.text})
        return self._event("response.output_text.delta", {**part, "delta": change.text, "logprobs": []})

    def _open(self, block: Block, part: dict[str, Any]) -> bytes:
        item = self._item(block, "in_progress")
        data = self._event("response.output_item.added", {"output_index": block.index, "item": item})
        if block.kind == "call":
            return data
        return data + self._event("response.content_part.added", {**part, "part": _part(block)})

    def _close(self, block: Block, place: dict[str, Any], part: dict[str, Any]) -> bytes:
        done = {"output_index": block.index, "item": self._item(block)}
        if block.kind == "call":
            body = {**place, "name": block.name, "arguments": block.text}
            data = self._event("response.function_call_arguments.done", body)
            return data + self._event("response.output_item.done", done)
        kind = "reasoning_text" if block.kind == "reasoning" else "output_text"
        more: dict[str, Any] = {} if block.kind == "reasoning" else {"logprobs": []}
        data = self._event(f"response.{kind}.done", {**part, "text": block.text, **more})
        data += self._event("response.content_part.done", {**part, "part": _part(block)})
        return data + self._event("response.output_item.done", done)

    def _item(self, block: Block, status: str = "") -> dict[str, Any]:
        """Return the item of a block. By default, the last item has the answer's status, and others are completed."""
        is_last = block.index == len(self._answer.blocks) - 1
        item = {"id": self._item_id(block), "status": status or (self._status if is_last else "completed")}
        content = [] if status == "in_progress" else [_part(block)]
        match block.kind:
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case "content":
                return {**item, "type": "message", "role": "assistant", "content": content}
        call = {"type": "function_call", "call_id": block.id, "name": block.name}
        return {**item, **call, "arguments": "" if status == "in_progress" else block.text}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._name}_{block.index}"

    def _event(self, kind: str, body: dict[str, Any]) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return server_event(kind, {"sequence_number": number, **body})


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _settings(request: ResponsesRequest) -> dict[str, Any]:
    """Return the settings in a response: fields of the request, and constants for unsupported features."""
    tools = [
        tool.model_dump(include={"type", "name", "description", "parameters", "strict"}) for tool in request.functions
    ]
    choice = request.tool_choice
    format = request.text.format if request.text is not None else None
    shown = {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning is not None else None, "summary": None},
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": shown},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }
