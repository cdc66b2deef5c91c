"""Completions in OpenAI's format, whole or as a stream of events. `AnswerFormat` is the interface of all formats."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from kvtier.engine.params import FinishReason, Output
from kvtier.engine.tokenizer import Tokenizer
from kvtier.server.answers import AnswerDelta, AnswerParser, AnswerSyntax, CallDelta, content_delta
from kvtier.server.errors import ApiError
from kvtier.server.prompt_report import PromptReport, ScoredToken

DONE = b"data: [DONE]\n\n"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_ENCODER = msgspec.json.Encoder()
# Last bytes of an event that contains only text, by finish reason.
_TAILS = {
    reason: b',"logprobs":null,"finish_reason":%b}]}\n\n' % _ENCODER.encode(reason)
    for reason in (None, "stop", "length")
}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Usage(NamedTuple):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int

    def body(self) -> dict[str, Any]:
        """Return the usage in OpenAI's format."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class AnswerFormat(Protocol):
    """Formats the answers to one request. `index` is the number of an answer, which OpenAI calls a choice."""

    def add(self, index: int, outputs: Sequence[Output]) -> int:
        """Append outputs to a choice of an unstreamed response. Return the approximate number of bytes added."""

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        """Return the complete response of a request that is not streamed."""

    def opening(self, index: int) -> bytes:
        """Return the events that precede the first output of a choice."""

    def piece(self, index: int, outputs: Sequence[Output]) -> bytes:
        """Return the events for new outputs of a choice; empty if there is nothing to send yet."""

    def closing(self, usage: Usage) -> bytes:
        """Return the events that end the stream."""

    def failure(self, error: ApiError) -> bytes:
        """Return the events that end the stream after an error."""


def merge(outputs: Sequence[Output]) -> Output:
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprobs for output in outputs for logprobs in output.logprobs),
        prompt_logprobs=tuple(score for output in outputs for score in output.prompt_logprobs),
    )


@dataclass(slots=True)
class _Answer:
    """State of one answer. If the answer is streamed, only `parser`, `length` and `decoder` are used.

    Log-probabilities are encoded as JSON when they arrive. If they were encoded at the end, 16 answers of 2,000 tokens
    with 20 alternatives per token would block the event loop for 2 s (x86-64, 2026-11-16).
    """

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    parser: AnswerParser | None = None
    lists: dict[str, list[bytes]] = field(default_factory=dict)
    """Pieces of each list of log-probabilities, by name of the list. Each piece is a JSON list without its brackets."""
    prompt: list[bytes] = field(default_factory=list)
    """Pieces of vLLM's `prompt_logprobs`. Each piece is a JSON list without its brackets."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    length: int = 0
    """Position in the text, in characters, for `text_offset`."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF8("replace"))

    def add(self, output: Output, delta: AnswerDelta, lists: Mapping[str, Sequence[Any]]) -> int:
        """Append an output and the parts of its text. Return the approximate number of bytes added."""
        self.text.append(delta.content)
        self.reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.id is not None:
                self.calls.append(_call_body(call))
            else:
                self.calls[call.index]["function"]["arguments"] += call.arguments
        self.finish_reason = output.finish_reason
        num_bytes = utf8_bytes(output.text)
        for name, values in lists.items():
            pieces, encoded = self.lists.setdefault(name, []), to_json(values)[1:-1]
            if encoded:
                pieces.append(encoded)
            num_bytes += len(encoded)
        return num_bytes

    def message(self) -> dict[str, Any]:
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message |= {"content": text or None, "tool_calls": self.calls}
        return message

    def logprobs(self, tail: bytes = b"") -> bytes:
        """Return the log-probabilities as a JSON object that ends with `tail`, or null if there are none."""
        if not self.lists:
            return b"null"
        lists = (b'"%b":[%b]' % (name.encode(), b",".join(pieces)) for name, pieces in self.lists.items())
        return b"{%b%b}" % (b",".join(lists), tail)

    def advance(self, data: bytes) -> int:
        """Advance the position past the bytes of a token, and return the position where the token starts."""
        before = self.length
        self.length += len(self.decoder.decode(data))
        return before


class CompletionFormat:
    """Formats the answers to one request as a chat completion or a text completion."""

    def __init__(
        self,
        id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        *,
        is_chat: bool,
        logprobs: bool,
        syntax: AnswerSyntax | None = None,
        prompt: PromptReport | None = None,
        include_usage: bool = False,
        names_ids: bool = False,
    ) -> None:
        """`syntax` is the form of reasoning and tool calls. If it is None, the whole text is content.

        `prompt` supplies the fields about the prompts. If it is None, the response has no such fields. `include_usage`
        adds an event with the usage to the end of a stream. With `names_ids`, log-probabilities name tokens by ids.
        """
        kind, chunk = ("chat.completion", "chat.completion.chunk") if is_chat else ("text_completion",) * 2
        self._frame = {"id": id, "object": kind, "created": created, "model": model}
        self._chunk = {**self._frame, "object": chunk}
        self._head = b"data: " + to_json(self._chunk)[:-1] + b',"choices":[{"index":'
        self._text_event = b'%d,"delta":{"content":%b}%b' if is_chat else b'%d,"text":%b%b'
        self._id = id
        self._syntax = syntax or AnswerSyntax()
        self._is_plain = self._syntax.is_plain
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._logprobs = logprobs
        self._prompt = prompt
        self._include_usage = include_usage
        self._names_ids = names_ids
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)

    def add(self, index: int, outputs: Sequence[Output]) -> int:
        output, prompt = self._with_prompt(index, merge(outputs))
        answer, num_bytes = self._answers[index], 0
        lists = self._lists(index, output, prompt) if self._logprobs else {}
        if self._prompt is not None:
            answer.token_ids += output.token_ids
            if prompt:
                answer.prompt.append(to_json(self._prompt.entries(prompt))[1:-1])
                num_bytes = len(answer.prompt[-1])
        return num_bytes + answer.add(output, self._parse(index, output), lists)

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        choices = []
        for index in range(num_choices):
            answer = self._answers[index]
            content = {"message": answer.message()} if self._is_chat else {"text": "".join(answer.text)}
            head = {"index": index, **content}
            logprobs = answer.logprobs(b',"refusal":null' if self._is_chat else b"")
            reason = to_json(_reason(answer, answer.parser))
            rest = b"" if self._is_chat else self._prompt_fields(index)
            if self._prompt is not None and self._prompt.token_ids:
                rest += b',"token_ids":' + to_json(answer.token_ids)
            choices.append(b'%b,"logprobs":%b,"finish_reason":%b%b}' % (to_json(head)[:-1], logprobs, reason, rest))
        frame = to_json(self._frame)[:-1]
        rest = self._prompt_fields(0) if self._is_chat else b""
        return b'%b,"choices":[%b],"usage":%b%b}' % (frame, b",".join(choices), to_json(usage.body()), rest)

    def opening(self, index: int) -> bytes:
        """Return the first event of a chat choice, with the role; empty for a text completion."""
        if not self._is_chat:
            return b""
        data = self._event(index, {"delta": {"role": "assistant", "content": ""}})
        return data.removesuffix(b"}\n\n") + self._prompt_fields(index) + b"}\n\n"

    def piece(self, index: int, outputs: Sequence[Output]) -> bytes:
        output, prompt = self._with_prompt(index, merge(outputs))
        if not self._is_plain:
            return self._parsed_piece(index, output)
        text, reason = output.text, _reason(output)
        ids = self._token_fields(index, output)
        if self._logprobs or ids:
            lists = self._lists(index, output, prompt) if self._logprobs else None
            if self._is_chat:
                logprobs = None if lists is None else {**lists, "refusal": None}
                return self._event(index, {"delta": {"content": text}}, logprobs, reason, ids)
            return self._event(index, {"text": text}, lists, reason, ids)
        if not text and reason is None:
            return b""  # the engine holds back an incomplete character or a possible stop text
        if not text and self._is_chat:
            return self._event(index, {"delta": {}}, None, reason)
        return self._head + self._text_event % (index, to_json(text), _TAILS[reason])

    def _parsed_piece(self, index: int, output: Output) -> bytes:
        delta, body = self._parse(index, output), dict[str, Any]()
        if delta.reasoning:
            body["reasoning_content"] = delta.reasoning
        if delta.content:
            body["content"] = delta.content
        if delta.calls:
            body["tool_calls"] = [{"index": call.index, **_call_body(call)} for call in delta.calls]
        reason = _reason(output, self._answers[index].parser)
        logprobs = {**self._lists(index, output), "refusal": None} if self._logprobs else None
        ids = self._token_fields(index, output)
        if not body and reason is None and logprobs is None and not ids:
            return b""
        return self._event(index, {"delta": body}, logprobs, reason, ids)

    def _parse(self, index: int, output: Output) -> AnswerDelta:
        """Parse the new text of a choice. Return the parts that later text cannot change."""
        if self._is_plain:
            return content_delta(output.text)
        answer = self._answers[index]
        if answer.parser is None:
            answer.parser = AnswerParser(self._syntax, f"call-{self._id}-{index}-")
        delta = answer.parser.feed(output.text)
        return delta if output.finish_reason is None else delta + answer.parser.finish()

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return event({**self._chunk, "choices": [], "usage": usage.body()}) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body) + DONE

    def _with_prompt(self, index: int, output: Output) -> tuple[Output, list[ScoredToken]]:
        """Put an echoed prompt before the first text. Return the new output and the prompt tokens to report with it."""
        if self._prompt is None:
            return output, []
        if text := self._prompt.text(index):
            output = replace(output, text=text + output.text)
        return output, self._prompt.tokens(index, output.prompt_logprobs)

    def _prompt_fields(self, index: int) -> bytes:
        """Return the fields about the prompt of a choice, each with a comma before it."""
        if self._prompt is None:
            return b""
        data = b""
        if self._prompt.num_top is not None and self._answers[index].prompt:
            data += b',"prompt_logprobs":[%b]' % b",".join(self._answers[index].prompt)
        if self._prompt.token_ids:
            data += b',"prompt_token_ids":' + to_json(list(self._prompt.prompt(index)))
        return data

    def _token_fields(self, index: int, output: Output) -> dict[str, Any]:
        """Return the fields with token ids for an event of a choice; empty if they were not requested."""
        if self._prompt is None or not self._prompt.token_ids:
            return {}
        fields: dict[str, Any] = {"token_ids": list(output.token_ids)}
        if not self._is_chat and (prompt := self._prompt.new_ids(index)) is not None:
            fields["prompt_token_ids"] = prompt
        return fields

    def _event(
        self,
        index: int,
        content: Mapping[str, Any],
        logprobs: Any = None,
        reason: str | None = None,
        more: Mapping[str, Any] = _NOTHING,
    ) -> bytes:
        rest = {**content, "logprobs": logprobs, "finish_reason": reason, **more}
        return self._head + str(index).encode() + b"," + to_json(rest)[1:] + b"]}\n\n"

    def _lists(self, index: int, output: Output, prompt: Sequence[ScoredToken] = ()) -> dict[str, list[Any]]:
        """Return the lists of log-probabilities by name. `text_offset` contains each token's position in the text."""
        if self._is_chat:
            return {"content": self._content(output)}
        answer = self._answers[index]
        special, bytes_of = self._tokenizer.special_ids, self._tokenizer.token_bytes
        if self._prompt is None or not self._prompt.echo:
            prompt = ()
        tokens = [*(each.token_id for each in prompt), *output.token_ids]
        logprobs = [*(each.score for each in prompt), *output.logprobs]
        count = self._prompt.num_echoed_top if self._prompt is not None else None
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [None if each is None else _finite(each.chosen) for each in logprobs],
            "top_logprobs": [None if each is None else self._top(each.top[:count]) for each in logprobs],
            "text_offset": [answer.advance(b"" if token in special else bytes_of(token)) for token in tokens],
        }

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
        name = f"token_id:{token}" if self._names_ids else _text(data)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(data)}

    def _top(self, top: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by token text. A second token with the same text is named by its id."""
        values: dict[str, float] = {}
        for token, value in top:
            name = self._name(token)
            values[f"token_id:{token}" if name in values else name] = _finite(value)
        return values

    def _name(self, token: int) -> str:
        if self._names_ids:
            return f"token_id:{token}"
        return _text(self._tokenizer.token_bytes(token), "bytes:")


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"


def with_usage(data: bytes, usage: Usage) -> bytes:
    """Return a copy of an event with the usage added."""
    return data.removesuffix(b"}\n\n") + b',"usage":' + to_json(usage.body()) + b"}\n\n"


def to_json(value: Any) -> bytes:
    return _ENCODER.encode(value)


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _text(data: bytes, prefix: str = "") -> str:
    r"""Return the text of a token. If the bytes are not valid UTF-8, return `prefix` and escapes such as \xe2\x80."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _reason(answer: Output | _Answer, parser: AnswerParser | None = None) -> str | None:
    reason = answer.finish_reason
    if reason is None or reason is FinishReason.LENGTH:
        return None if reason is None else "length"
    return "tool_calls" if parser is not None and parser.ends_with_calls else "stop"


def _call_body(call: CallDelta) -> dict[str, Any]:
    """Return the first or the next part of a tool call in OpenAI's format."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(value: float) -> float:
    """Return `value`, but at least -9999, because JSON cannot represent minus infinity."""
    return max(value, -9999.0)
