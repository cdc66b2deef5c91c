"""Answers in OpenAI's form, whole or as a stream of events."""

from __future__ import annotations

import codecs
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier.engine.params import FinishReason, Logprobs, Output
from kvtier.engine.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# How an event of nothing but text ends.
_TAILS = {
    reason: b',"logprobs":null,"finish_reason":%b}]}\n\n' % _ENCODER.encode(reason).encode()
    for reason in (None, "stop", "length")
}


@dataclass(slots=True)
class Usage:
    """Tokens of a request, over its prompts and answers."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Choice:
    """What one step, or several, added to an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    reason: FinishReason | None = None

    @classmethod
    def merge(cls, outputs: Iterable[Output]) -> Choice:
        """Join consecutive outputs of one answer."""
        made, texts = cls(), []
        for output in outputs:
            texts.append(output.text)
            made.token_ids += output.token_ids
            made.logprobs += output.logprobs
            made.reason = output.finish_reason
        made.text = "".join(texts)
        return made


@dataclass(slots=True)
class _Collected:
    """One answer of a response that is not streamed.

    Log-probabilities are rendered as they arrive. Rendering those of 16 answers with 2,000 tokens and 20 alternatives
    in one piece blocked the event loop for 2 s (x86-64, 2026-11-16).
    """

    text: list[str] = field(default_factory=list)
    lists: dict[str, list[bytes]] = field(default_factory=dict)
    """JSON of the lists of log-probabilities by name, in pieces."""
    reason: FinishReason | None = None

    def add(self, choice: Choice, lists: Mapping[str, Sequence[Any]]) -> int:
        """Append; returns the number of bytes."""
        self.text.append(choice.text)
        self.reason = choice.reason
        num_bytes = len(choice.text)
        for name, values in lists.items():
            pieces, rendered = self.lists.setdefault(name, []), to_json(values)[1:-1]
            if rendered:
                pieces.append(rendered)
            num_bytes += len(rendered)
        return num_bytes

    def logprobs(self, tail: bytes = b"") -> bytes:
        """JSON of the log-probabilities, null without them; `tail` follows the lists."""
        if not self.lists:
            return b"null"
        lists = (b'"%b":[%b]' % (name.encode(), b",".join(pieces)) for name, pieces in self.lists.items())
        return b"{%b%b}" % (b",".join(lists), tail)


class Form(Protocol):
    """Format of one endpoint's responses: `add` and `whole`, or a stream of `opening`, `piece` and `closing`."""

    def add(self, index: int, outputs: Iterable[Output]) -> int:
        """Collect what was added to a choice of a response that is not streamed; returns the number of bytes."""

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        """Render the response that is not streamed."""

    def opening(self, index: int) -> bytes:
        """The first event of a choice; may be empty."""

    def piece(self, index: int, outputs: Iterable[Output]) -> bytes:
        """One event with what was added to a choice."""

    def closing(self, usage: Usage) -> bytes:
        """The event with the usage."""


class ChatForm:
    """chat.completion and chat.completion.chunk."""

    endpoint, kind = "chat", "chatcmpl"

    def __init__(self, id: str, model: str, created: int, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._id, self._model, self._created = id, model, created
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._head = _head(self._frame("chat.completion.chunk"))
        self._collected: defaultdict[int, _Collected] = defaultdict(_Collected)

    def add(self, index: int, outputs: Iterable[Output]) -> int:
        """Collect a part of an answer."""
        choice = Choice.merge(outputs)
        return self._collected[index].add(choice, {"content": self._content(choice)} if self._logprobs else {})

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        """Render a chat.completion."""
        choices = []
        for index in range(num_choices):
            found = self._collected[index]
            message = {"role": "assistant", "content": "".join(found.text), "refusal": None}
            logprobs = found.logprobs(b',"refusal":null')
            choices.append(_choice_json({"index": index, "message": message}, logprobs, found.reason))
        return _whole_json(self._frame("chat.completion"), choices, usage)

    def opening(self, index: int) -> bytes:
        """The role, with which OpenAI's streams begin."""
        return self._event(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, outputs: Iterable[Output]) -> bytes:
        """What was added to a choice; the reason only with its last token."""
        merged = Choice.merge(outputs)
        text = merged.text
        report = {"content": self._content(merged), "refusal": None} if self._logprobs else None
        if not text and merged.reason is None and report is None:
            return b""  # half a character, or what may become a stop text
        if report is None and text:
            return self._head + b'%d,"delta":{"content":%b}%b' % (index, _quoted(text), _TAILS[_reason(merged.reason)])
        return self._event(index, {"content": text} if text or report else {}, report, _reason(merged.reason))

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return (
            b"data: " + to_json({**self._frame("chat.completion.chunk"), "choices": [], "usage": usage.body}) + b"\n\n"
        )

    def _event(self, index: int, delta: dict[str, str], report: dict[str, Any] | None, reason: str | None) -> bytes:
        rest = {"delta": delta, "logprobs": report, "finish_reason": reason}
        return self._head + str(index).encode() + b"," + to_json(rest)[1:] + b"]}\n\n"

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _content(self, choice: Choice) -> list[dict[str, Any]]:
        return [
            {
                **self._token(token, each.chosen),
                "top_logprobs": [self._token(other, value) for other, value in each.top],
            }
            for token, each in zip(choice.token_ids, choice.logprobs, strict=True)
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = _text(data)
        return {"token": _escaped(data) if text is None else text, "logprob": _finite(logprob), "bytes": list(data)}


class CompletionForm:
    """text_completion, whole and in pieces."""

    endpoint, kind = "completion", "cmpl"

    def __init__(self, id: str, model: str, created: int, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._frame = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._head = _head(self._frame)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._offsets: defaultdict[int, _Offset] = defaultdict(_Offset)
        self._collected: defaultdict[int, _Collected] = defaultdict(_Collected)

    def add(self, index: int, outputs: Iterable[Output]) -> int:
        """Collect a part of an answer."""
        choice = Choice.merge(outputs)
        return self._collected[index].add(choice, self._lists(index, choice) if self._logprobs else {})

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        """Render a text_completion."""
        choices = []
        for index in range(num_choices):
            found = self._collected[index]
            choices.append(_choice_json({"index": index, "text": "".join(found.text)}, found.logprobs(), found.reason))
        return _whole_json(self._frame, choices, usage)

    def opening(self, index: int) -> bytes:  # noqa: ARG002
        """Nothing comes before the text."""
        return b""

    def piece(self, index: int, outputs: Iterable[Output]) -> bytes:
        """What was added to a choice."""
        merged = Choice.merge(outputs)
        if self._logprobs:
            report = self._lists(index, merged)
            rest = {"text": merged.text, "logprobs": report, "finish_reason": _reason(merged.reason)}
            return self._head + str(index).encode() + b"," + to_json(rest)[1:] + b"]}\n\n"
        if not merged.text and merged.reason is None:
            return b""
        return self._head + b'%d,"text":%b%b' % (index, _quoted(merged.text), _TAILS[_reason(merged.reason)])

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return b"data: " + to_json({**self._frame, "choices": [], "usage": usage.body}) + b"\n\n"

    def _lists(self, index: int, choice: Choice) -> dict[str, list[Any]]:
        """The legacy form: four lists. text_offset is the position of each token's first character in the text."""
        offset = self._offsets[index]
        special, bytes_of = self._tokenizer.special_ids, self._tokenizer.token_bytes
        return {
            "tokens": [self._name(token) for token in choice.token_ids],
            "token_logprobs": [_finite(each.chosen) for each in choice.logprobs],
            "top_logprobs": [self._top(each.top) for each in choice.logprobs],
            "text_offset": [offset.advance(b"" if token in special else bytes_of(token)) for token in choice.token_ids],
        }

    def _top(self, top: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by the name of the token; two tokens of one name are told apart by their ids."""
        found: dict[str, float] = {}
        for token, value in top:
            name = self._name(token)
            found[f"token_id:{token}" if name in found else name] = _finite(value)
        return found

    def _name(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        text = _text(data)
        return f"bytes:{_escaped(data)}" if text is None else text


class _Offset:
    """Position in the text of one choice, across pieces of a stream."""

    def __init__(self) -> None:
        self._length = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, data: bytes) -> int:
        """Move behind the bytes of a token; returns the position before it."""
        before = self._length
        self._length += len(self._decoder.decode(data))
        return before


def error_event(body: dict[str, Any]) -> bytes:
    """An error after the stream has begun."""
    return b"data: " + to_json(body) + b"\n\n"


def to_json(value: Any) -> bytes:
    """As compact as it gets, in UTF-8."""
    return _ENCODER.encode(value).encode()


def _head(frame: dict[str, Any]) -> bytes:
    """What every event of a stream begins with, up to the index of its choice: written once."""
    return b"data: " + to_json(frame)[:-1] + b',"choices":[{"index":'


def _choice_json(head: dict[str, Any], logprobs: bytes, reason: FinishReason | None) -> bytes:
    tail = b',"finish_reason":%b}' % to_json(_reason(reason))
    return b'%b,"logprobs":%b%b' % (to_json(head)[:-1], logprobs, tail)


def _whole_json(frame: dict[str, Any], choices: Sequence[bytes], usage: Usage) -> bytes:
    return b'%b,"choices":[%b],"usage":%b}' % (to_json(frame)[:-1], b",".join(choices), to_json(usage.body))


def _quoted(text: str) -> bytes:
    return _ENCODER.encode(text).encode()


def _text(data: bytes) -> str | None:
    """Text of a token; None if it is not whole characters."""
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
    """Minus infinity, the logarithm of zero, has no JSON."""
    return max(value, -9999.0)
