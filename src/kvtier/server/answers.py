"""Parse the text of chat answers into content, reasoning and tool calls, while the text arrives.

`AnswerParser` is a state machine over the text of one answer:

    START --<think>--> REASONING --</think>--> START
    START, TAIL --{--> CALL                 calls without tags (Llama 3), at the start of the content or after a call
    START --any other text--> CONTENT --<tool_call>--> CALL --end of the object--> TAIL --</tool_call>--> START
    CALL --not a call--> CONTENT            the text that looked like a call becomes content
    LIST --{--> CALL --end of the object--> LIST        tool_choice "required": the grammar allows only a list of calls
    ARGUMENTS                               tool_choice names a function: the grammar allows only its arguments

The parser holds back text that may be the start of a tag, and white space that may precede a tag. The result therefore
does not depend on how the text is split into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")  # Hermes and Qwen write "arguments", Llama 3 writes "parameters"
_MAX_NAME = 256  # limit in characters for each key and value of a call, except for its arguments
CallForm = Literal["none", "tagged", "bare", "list", "arguments"]
"""none: no calls. tagged: in <tool_call> tags. bare: without tags. list, arguments: see LIST and ARGUMENTS above."""


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How a model writes reasoning and tool calls in the answer to one request."""

    calls: CallForm = "none"
    tools: tuple[str, ...] = ()
    """Names of the tools. With the form "arguments", this is only the name of the function to call."""
    max_calls: int | None = None
    """Limit on tool calls in the answer; None for no limit. Further calls are dropped."""
    has_reasoning: bool = False
    starts_in_reasoning: bool = False
    """True if the prompt ends with the tag that opens the reasoning."""

    @property
    def is_plain(self) -> bool:
        """True if the whole text is content."""
        return self.calls == "none" and not self.has_reasoning


def syntax_of_template(template: str) -> tuple[CallForm, bool]:
    """Return the form of tool calls in a chat template, and whether the template supports reasoning."""
    is_bare = _CALL not in template and ("<|python_tag|>" in template or '"parameters"' in template)
    return "bare" if is_bare else "tagged", _END_THINK in template


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New part of a tool call."""

    index: int
    id: str | None
    """`id` and `name` are None in all parts of a call except the first."""
    name: str | None
    arguments: str
    """Next characters of the arguments, which are JSON."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New part of the content or of the reasoning."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New parts of an answer, in the order of the text."""

    parts: tuple[TextDelta | CallDelta, ...] = ()

    @property
    def content(self) -> str:
        return self._text("content")

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def calls(self) -> tuple[CallDelta, ...]:
        return tuple(part for part in self.parts if isinstance(part, CallDelta))

    def __add__(self, other: AnswerDelta) -> AnswerDelta:
        return AnswerDelta(self.parts + other.parts)

    def _text(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextDelta) and part.kind == kind)


def content_delta(text: str) -> AnswerDelta:
    return AnswerDelta((TextDelta("content", text),))


class _CallScanner:
    """Scans an object such as {"name": "f", "arguments": {...}} one character at a time.

    Once the name is known, the caller can take the arguments while they arrive.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []
        """Characters of the arguments that the caller has not taken yet."""
        self.status: Literal["open", "done", "failed"] = "open"
        self._expect: Callable[[str], None] = self._object
        self._key = ""
        self._token: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = self._has_arguments = False

    def feed(self, char: str) -> None:
        self._expect(char)

    def _object(self, char: str) -> None:
        if char == "{":
            self._expect = self._key_or_end
        elif char not in _SPACE:
            self.status = "failed"

    def _key_or_end(self, char: str) -> None:
        if char == '"':
            self._key = ""
            self._start_value(char, self._in_key)
        elif char == "}":
            self._end()
        elif char not in _SPACE + ",":
            self.status = "failed"

    def _in_key(self, char: str) -> None:
        if self._is_value_complete(char):
            key = self._decode()
            self._key = key if isinstance(key, str) else ""
            self._expect = self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._expect = self._before_value
        elif char not in _SPACE:
            self.status = "failed"

    def _before_value(self, char: str) -> None:
        if char in _SPACE:
            return
        is_arguments = self._key in _ARGUMENTS and not self._has_arguments
        if is_arguments and char == "{":
            self._has_arguments = True
            self._start_value(char, self._in_arguments)
            self.arguments.append(char)
        else:
            self._start_value(char, self._in_value)

    def _in_arguments(self, char: str) -> None:
        self.arguments.append(char)
        if self._is_value_complete(char, keep=False):
            self._expect = self._key_or_end

    def _in_value(self, char: str) -> None:
        is_scalar = not self._in_string and not self._depth
        if is_scalar and char in _SPACE + ",}":
            self._end_value()
            self._key_or_end(char)
        elif not is_scalar and self._is_value_complete(char):
            self._end_value()
        elif is_scalar:
            self._keep(char)

    def _start_value(self, char: str, expect: Callable[[str], None]) -> None:
        self._token, self._is_escaped = [char], False
        self._in_string, self._depth = char == '"', int(char in "{[")
        self._expect = expect

    def _is_value_complete(self, char: str, *, keep: bool = True) -> bool:
        """Process the next character of a value. Returns True if it ends the outermost string, object or list."""
        if keep:
            self._keep(char)
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return not self._in_string and not self._depth

    def _keep(self, char: str) -> None:
        self._token.append(char)
        # Only arguments may be long. `_token` contains them if the model writes them as a string.
        if len(self._token) > _MAX_NAME and self._key not in _ARGUMENTS:
            self.status = "failed"

    def _end_value(self) -> None:
        value, self._expect = self._decode(), self._key_or_end
        if self._key == "name" and self.name is None:
            self.name = value if isinstance(value, str) and value else None
            if self.name is None:
                self.status = "failed"
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            if isinstance(value, str):  # some models write the arguments as a string that contains JSON
                self.arguments.append(value)
            elif value is None:
                self.arguments.append("{}")
            else:
                self.status = "failed"

    def _decode(self) -> object:
        try:
            return json.loads("".join(self._token))
        except ValueError:
            self.status = "failed"
            return None

    def _end(self) -> None:
        if self.name is None:
            self.status = "failed"
            return
        if not self._has_arguments:
            self.arguments.append("{}")
        self.status = "done"


class AnswerParser:
    """Splits the text of one answer into content, reasoning and tool calls."""

    def __init__(self, syntax: AnswerSyntax, id_prefix: str) -> None:
        """The id of a tool call is `id_prefix`, followed by the number of the call."""
        self._syntax = syntax
        self._id_prefix = id_prefix
        self._text = ""
        """Text that is not processed yet."""
        self._state: Callable[[], bool] = self._start
        if syntax.calls in ("list", "arguments"):
            self._state = self._list if syntax.calls == "list" else self._named_arguments
        elif syntax.starts_in_reasoning:
            self._state = self._reasoning
        self._may_be_reasoning = syntax.has_reasoning
        self._may_be_bare = syntax.calls == "bare"
        self._drops_space = syntax.starts_in_reasoning  # True to drop white space at the start of the next text
        self._scanner = _CallScanner()
        self._raw = ""
        """Text of a call whose name is not known yet. The text becomes content if it turns out not to be a call."""
        self._is_open_call = False  # True once `_parts` has received the first part of the current call
        self.num_calls = 0
        self._arguments: list[str] = []
        """Pieces of the arguments, used only with the form "arguments"."""
        self._parts: list[TextDelta | CallDelta] = []

    @property
    def ends_with_calls(self) -> bool:
        """True if the answer has a tool call and the last call is complete. A stop text can cut off the last call."""
        if self._syntax.calls == "arguments":
            return _is_json("".join(self._arguments))
        return self.num_calls > 0 and not self._is_open_call

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning."""
        return self._state == self._reasoning

    def feed(self, text: str) -> AnswerDelta:
        """Process the next text of the answer. Return the parts that later text cannot change."""
        self._text += text
        while self._text and self._state():
            pass
        return self._take()

    def finish(self) -> AnswerDelta:
        """End the answer, and return the parts of the text that was held back."""
        rest, self._text = self._text, ""
        if self._state == self._reasoning:
            self._add("reasoning", rest)
        elif self._state in (self._start, self._content):
            self._add("content", "" if self._drops_space and not rest.strip(_SPACE) else rest)
        elif self._state == self._call and not self._is_open_call and self._syntax.calls != "list":
            self._add("content", self._raw)
        return self._take()

    def _take(self) -> AnswerDelta:
        delta, self._parts = AnswerDelta(tuple(self._parts)), []
        return delta

    def _add(self, kind: Literal["content", "reasoning"], text: str) -> None:
        if text:
            self._parts.append(TextDelta(kind, text))

    # A state method returns True if the next state can process the rest of the text, False if more text is needed.

    def _start(self) -> bool:
        text = self._text.lstrip(_SPACE)
        if not text or (self._may_be_reasoning and _THINK.startswith(text)):
            return False
        if self._may_be_reasoning and text.startswith(_THINK):
            self._go(text[len(_THINK) :], self._reasoning, drops_space=True)
        elif self._may_be_bare and text[0] == "{":
            self._go(text, self._call)
        else:
            self._go(text if self._drops_space else self._text, self._content)
        self._may_be_reasoning = False
        return True

    def _reasoning(self) -> bool:
        if self._drops_space:
            self._text = self._text.lstrip(_SPACE)
            self._drops_space = not self._text
        before, tag, after = self._text.partition(_END_THINK)
        if tag:
            self._add("reasoning", before.rstrip(_SPACE))
            self._may_be_reasoning = False
            self._go(after, self._start, drops_space=True)
            return True
        size = _certain(self._text, _END_THINK)
        self._add("reasoning", self._text[:size])
        self._text = self._text[size:]
        return False

    def _content(self) -> bool:
        self._may_be_bare = False
        if self._syntax.calls != "tagged":
            size = len(self._text)
        else:
            before, tag, after = self._text.partition(_CALL)
            if tag:
                text = before.rstrip(_SPACE)
                self._add("content", text)
                self._raw = before[len(text) :] + tag
                self._go(after, self._call)
                return True
            size = _certain(self._text, _CALL)
        self._add("content", self._text[:size])
        self._text = self._text[size:]
        return False

    def _call(self) -> bool:
        scanner = self._scanner
        for position, char in enumerate(self._text):
            scanner.feed(char)
            if scanner.status != "open" or (scanner.name is not None and not self._is_open_call):
                self._raw += "" if self._is_open_call else self._text[: position + 1]
                self._text = self._text[position + 1 :]
                break
        else:
            self._raw += "" if self._is_open_call else self._text
            self._text = ""
        is_known = self._syntax.calls == "tagged" or scanner.name in self._syntax.tools
        if scanner.name is not None and (is_known or self._is_open_call):
            self._emit(scanner)
        elif scanner.status == "failed" or scanner.name is not None:
            self._may_be_bare = False
            self._go(self._raw + self._text, self._failed_call)
            return True
        if scanner.status != "open":
            self._end_call()
        return bool(self._text)

    def _failed_call(self) -> bool:
        """Pass on text that looked like a call, including its tag, as content."""
        size = len(self._raw)
        self._add("content", self._text[:size])
        self._reset_call()
        self._go(self._text[size:], self._content)
        return True

    def _emit(self, scanner: _CallScanner) -> None:
        arguments, scanner.arguments = "".join(scanner.arguments), []
        if self._is_open_call:
            if arguments:
                self._add_call(None, None, arguments)
            return
        self._is_open_call = True
        self.num_calls += 1
        self._add_call(f"{self._id_prefix}{self.num_calls - 1}", scanner.name, arguments)

    def _add_call(self, id: str | None, name: str | None, arguments: str) -> None:
        if self._syntax.max_calls is None or self.num_calls <= self._syntax.max_calls:
            self._parts.append(CallDelta(self.num_calls - 1, id, name, arguments))

    def _end_call(self) -> None:
        self._reset_call()
        self._state = self._list if self._syntax.calls == "list" else self._tail

    def _reset_call(self) -> None:
        self._scanner, self._raw, self._is_open_call = _CallScanner(), "", False

    def _tail(self) -> bool:
        """Skip the text up to the next tag. If the model writes calls without tags, skip separators instead."""
        if self._syntax.calls == "bare":
            self._may_be_bare = True
            self._go(self._text.lstrip(_SPACE + ";,"), self._tail)
            if self._text:
                self._go(self._text, self._start, drops_space=True)
            return bool(self._text)
        at, end = self._text.find(_CALL), self._text.find(_END_CALL)
        if at >= 0 and not 0 <= end < at:
            self._go(self._text[at:], self._start, drops_space=True)
        elif end >= 0:
            self._go(self._text[end + len(_END_CALL) :], self._start, drops_space=True)
        else:
            keep = max(_num_held(self._text, _CALL), _num_held(self._text, _END_CALL))
            self._text = self._text[len(self._text) - keep :]
            return False
        return True

    def _list(self) -> bool:
        at = self._text.find("{")
        if at < 0:
            self._text = ""
            return False
        self._go(self._text[at:], self._call)
        return True

    def _named_arguments(self) -> bool:
        is_first = not self._is_open_call
        self._is_open_call, self.num_calls = True, 1
        id, name = (f"{self._id_prefix}0", self._syntax.tools[0]) if is_first else (None, None)
        self._add_call(id, name, self._text)
        self._arguments.append(self._text)
        self._text = ""
        return False

    def _go(self, text: str, state: Callable[[], bool], *, drops_space: bool = False) -> None:
        self._text, self._state, self._drops_space = text, state, drops_space


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _num_held(text: str, tag: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the tag."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)


def _certain(text: str, tag: str) -> int:
    """Return the number of leading characters that cannot belong to a tag or to the white space before a tag."""
    return len(text[: len(text) - _num_held(text, tag)].rstrip(_SPACE))
