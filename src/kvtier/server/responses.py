"""Answers in OpenAI's form, whole or as a stream of events."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier.engine.output import FinishReason, Output
from kvtier.engine.params import Logprobs
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
    """One answer, so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    reason: FinishReason | None = None

    def add(self, output: Output) -> None:
        """What a step added."""
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.reason = output.finish_reason


class Form(Protocol):
    """How one endpoint tells what was generated."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""

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

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """A chat.completion."""
        told = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": self._report(choice.token_ids, choice.logprobs),
                "finish_reason": _reason(choice.reason),
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._frame("chat.completion"), "choices": told, "usage": usage.body}

    def opening(self, index: int) -> bytes:
        """The role, with which OpenAI's streams begin."""
        return self._event(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, outputs: Iterable[Output]) -> bytes:
        """What was added to a choice; the reason only with its last token."""
        merged = Choice()
        for output in outputs:
            merged.add(output)
        text = "".join(merged.text)
        report = self._report(merged.token_ids, merged.logprobs)
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

    def _report(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._token(token, each.chosen),
                "top_logprobs": [self._token(other, value) for other, value in each.top],
            }
            for token, each in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

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
        self._offsets: dict[int, _Offset] = {}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """A text_completion."""
        told = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._frame, "choices": told, "usage": usage.body}

    def opening(self, index: int) -> bytes:  # noqa: ARG002
        """Nothing comes before the text."""
        return b""

    def piece(self, index: int, outputs: Iterable[Output]) -> bytes:
        """What was added to a choice."""
        merged = Choice()
        for output in outputs:
            merged.add(output)
        if self._logprobs:
            return b"data: " + to_json({**self._frame, "choices": [self._choice(index, merged)]}) + b"\n\n"
        text = "".join(merged.text)
        if not text and merged.reason is None:
            return b""
        return self._head + b'%d,"text":%b%b' % (index, _quoted(text), _TAILS[_reason(merged.reason)])

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return b"data: " + to_json({**self._frame, "choices": [], "usage": usage.body}) + b"\n\n"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        report = self._report(index, choice) if self._logprobs else None
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": report,
            "finish_reason": _reason(choice.reason),
        }

    def _report(self, index: int, choice: Choice) -> dict[str, Any]:
        """The legacy form: four lists. text_offset is the position of each token's first character in the text."""
        offset = self._offsets.setdefault(index, _Offset())
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
