"""Responses in OpenAI's format, whole or as a stream of events."""

from __future__ import annotations

import codecs
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.engine.params import FinishReason, Output
from kvtier.engine.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# End of an event that contains only text.
_TAILS = {
    reason: b',"logprobs":null,"finish_reason":%b}]}\n\n' % _ENCODER.encode(reason).encode()
    for reason in (None, "stop", "length")
}


def usage_body(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the `usage` object of a response."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _merge(outputs: Sequence[Output]) -> Output:
    """Join consecutive outputs of one answer."""
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprobs for output in outputs for logprobs in output.logprobs),
    )


@dataclass(slots=True)
class _Answer:
    """State of one answer: its parts if it is not streamed, and the position in its text.

    Log-probabilities are rendered as they arrive. Rendering those of 16 answers with 2,000 tokens and 20 alternatives
    in one piece blocked the event loop for 2 s (x86-64, 2026-11-16).
    """

    text: list[str] = field(default_factory=list)
    lists: dict[str, list[bytes]] = field(default_factory=dict)
    """JSON of the lists of log-probabilities by name, in pieces."""
    reason: FinishReason | None = None
    length: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF8("replace"))

    def add(self, output: Output, lists: Mapping[str, Sequence[Any]]) -> int:
        """Append an output; returns the number of bytes."""
        self.text.append(output.text)
        self.reason = output.finish_reason
        num_bytes = len(output.text)
        for name, values in lists.items():
            pieces, rendered = self.lists.setdefault(name, []), to_json(values)[1:-1]
            if rendered:
                pieces.append(rendered)
            num_bytes += len(rendered)
        return num_bytes

    def logprobs(self, tail: bytes = b"") -> bytes:
        """Return the JSON of the log-probabilities, null if there are none; `tail` follows the lists."""
        if not self.lists:
            return b"null"
        lists = (b'"%b":[%b]' % (name.encode(), b",".join(pieces)) for name, pieces in self.lists.items())
        return b"{%b%b}" % (b",".join(lists), tail)

    def advance(self, data: bytes) -> int:
        """Move the position behind the bytes of a token; returns the position before it."""
        before = self.length
        self.length += len(self.decoder.decode(data))
        return before


class ChatFormat:
    """Responses of type chat.completion and chat.completion.chunk."""

    endpoint, prefix, prompt_field = "chat", "chatcmpl", "messages"

    def __init__(self, id: str, model: str, created: int, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._id, self._model, self._created = id, model, created
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._head = _event_head(self._frame("chat.completion.chunk"))
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)

    def add(self, index: int, outputs: Sequence[Output]) -> int:
        """Append outputs to a choice of a response that is not streamed; returns the number of bytes."""
        output = _merge(outputs)
        return self._answers[index].add(output, {"content": self._content(output)} if self._logprobs else {})

    def whole(self, num_choices: int, usage: dict[str, Any]) -> bytes:
        """Return the response that is not streamed."""
        choices = []
        for index in range(num_choices):
            answer = self._answers[index]
            message = {"role": "assistant", "content": "".join(answer.text), "refusal": None}
            logprobs = answer.logprobs(b',"refusal":null')
            choices.append(_choice_json({"index": index, "message": message}, logprobs, answer.reason))
        return _whole_json(self._frame("chat.completion"), choices, usage)

    def opening(self, index: int) -> bytes:
        """Return the first event of a choice: the role."""
        return self._event(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, outputs: Sequence[Output]) -> bytes:
        """Return an event with new outputs of a choice; empty if they have no text yet."""
        output = _merge(outputs)
        text, reason = output.text, _reason(output.finish_reason)
        report = {"content": self._content(output), "refusal": None} if self._logprobs else None
        if not text and reason is None and report is None:
            return b""  # part of a character, or possibly the start of a stop text
        if report is None and text:
            return self._head + b'%d,"delta":{"content":%b}%b' % (index, to_json(text), _TAILS[reason])
        return self._event(index, {"content": text} if text or report else {}, report, reason)

    def closing(self, usage: dict[str, Any]) -> bytes:
        """Return the event with the usage."""
        return event({**self._frame("chat.completion.chunk"), "choices": [], "usage": usage})

    def _event(self, index: int, delta: dict[str, str], report: dict[str, Any] | None, reason: str | None) -> bytes:
        rest = {"delta": delta, "logprobs": report, "finish_reason": reason}
        return self._head + str(index).encode() + b"," + to_json(rest)[1:] + b"]}\n\n"

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _content(self, output: Output) -> list[dict[str, Any]]:
        return [
            {
                **self._token(token, logprobs.chosen),
                "top_logprobs": [self._token(other, value) for other, value in logprobs.top],
            }
            for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = _text(data)
        return {"token": _escaped(data) if text is None else text, "logprob": _finite(logprob), "bytes": list(data)}


class CompletionFormat:
    """Responses of type text_completion, with the methods of ChatFormat."""

    endpoint, prefix, prompt_field = "completion", "cmpl", "prompt"

    def __init__(self, id: str, model: str, created: int, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._frame = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._head = _event_head(self._frame)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)

    def add(self, index: int, outputs: Sequence[Output]) -> int:
        output = _merge(outputs)
        return self._answers[index].add(output, self._lists(index, output) if self._logprobs else {})

    def whole(self, num_choices: int, usage: dict[str, Any]) -> bytes:
        choices = []
        for index in range(num_choices):
            answer = self._answers[index]
            head = {"index": index, "text": "".join(answer.text)}
            choices.append(_choice_json(head, answer.logprobs(), answer.reason))
        return _whole_json(self._frame, choices, usage)

    def opening(self, index: int) -> bytes:  # noqa: ARG002
        return b""

    def piece(self, index: int, outputs: Sequence[Output]) -> bytes:
        output = _merge(outputs)
        reason = _reason(output.finish_reason)
        if self._logprobs:
            rest = {"text": output.text, "logprobs": self._lists(index, output), "finish_reason": reason}
            return self._head + str(index).encode() + b"," + to_json(rest)[1:] + b"]}\n\n"
        if not output.text and reason is None:
            return b""
        return self._head + b'%d,"text":%b%b' % (index, to_json(output.text), _TAILS[reason])

    def closing(self, usage: dict[str, Any]) -> bytes:
        return event({**self._frame, "choices": [], "usage": usage})

    def _lists(self, index: int, output: Output) -> dict[str, list[Any]]:
        """Return the four legacy lists. text_offset is the position of each token's first character in the text."""
        answer = self._answers[index]
        special, bytes_of = self._tokenizer.special_ids, self._tokenizer.token_bytes
        return {
            "tokens": [self._name(token) for token in output.token_ids],
            "token_logprobs": [_finite(logprobs.chosen) for logprobs in output.logprobs],
            "top_logprobs": [self._top(logprobs.top) for logprobs in output.logprobs],
            "text_offset": [answer.advance(b"" if token in special else bytes_of(token)) for token in output.token_ids],
        }

    def _top(self, top: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by token text. A second token with the same text is named by its id."""
        values: dict[str, float] = {}
        for token, value in top:
            name = self._name(token)
            values[f"token_id:{token}" if name in values else name] = _finite(value)
        return values

    def _name(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        text = _text(data)
        return f"bytes:{_escaped(data)}" if text is None else text


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"


def to_json(value: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    return _ENCODER.encode(value).encode()


def _event_head(frame: dict[str, Any]) -> bytes:
    """Return the constant part of a stream's events, up to the index of the choice."""
    return b"data: " + to_json(frame)[:-1] + b',"choices":[{"index":'


def _choice_json(head: dict[str, Any], logprobs: bytes, reason: FinishReason | None) -> bytes:
    tail = b',"finish_reason":%b}' % to_json(_reason(reason))
    return b'%b,"logprobs":%b%b' % (to_json(head)[:-1], logprobs, tail)


def _whole_json(frame: dict[str, Any], choices: Sequence[bytes], usage: dict[str, Any]) -> bytes:
    return b'%b,"choices":[%b],"usage":%b}' % (to_json(frame)[:-1], b",".join(choices), to_json(usage))


def _text(data: bytes) -> str | None:
    """Return the text of a token; None if it is not made of whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _escaped(data: bytes) -> str:
    r"""Return bytes as OpenAI writes tokens that are not text: \xe2\x80."""
    return "".join(f"\\x{byte:02x}" for byte in data)


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else "length" if reason is FinishReason.LENGTH else "stop"


def _finite(value: float) -> float:
    """Replace minus infinity, which JSON cannot represent."""
    return max(value, -9999.0)
