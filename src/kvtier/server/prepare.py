"""Preparation: validates the body of a request and tokenizes its prompts.

Small bodies are prepared in the front end. Large bodies, which could block the front end for long, are prepared by the
same code in a worker process (worker.py). To keep workers small, this module imports no asyncio, fastapi or torch.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtier.engine import schemas
from kvtier.engine.schemas import Grammar
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ArgumentError, RangeError, StateError
from kvtier.server.answers import AnswerSyntax, syntax_of_template
from kvtier.server.chat_messages import Message, NamedToolChoice
from kvtier.server.errors import ApiError
from kvtier.server.field_types import MAX_FIELDS
from kvtier.server.fields import FIELDS, UnsupportedFieldError, split
from kvtier.server.grammars import AnswerGrammar, answer_grammar
from kvtier.server.messages_api import CountTokensRequest, MessagesRequest
from kvtier.server.prompt_bodies import DetokenizeRequest, PromptBody, TokenizeRequest
from kvtier.server.protocol import GRAMMAR_FIELDS, ChatRequest, CompletionRequest, Sampling
from kvtier.server.responses_api import ResponsesRequest

Body = TypeVar("Body", bound=BaseModel)
AgentRequest = MessagesRequest | ResponsesRequest
"""Requests of other APIs, which are translated into chat requests."""
_BILLING_LINE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
_REMOVED_BILLING_LINE = (
    "a billing line was removed from the start of the system text: it changes with every request, so the cached "
    "prefix would end there"
)
_KEPT_BILLING_LINE = (
    "the system text starts with a billing line that changes with every request, so the cached prefix ends there; "
    "start the server without --keep-billing-line"
)
_TAIL_TOKENS = 16  # enough for the end of a generation prompt, such as "<think>\n", even at one token per byte


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Body]):
    """A validated body. The prompts and the grammar, which may be large, are moved from `body` to the other fields."""

    body: Body
    prompts: Sequence[Sequence[int]] = ()
    grammar: AnswerGrammar | None = None
    syntax: AnswerSyntax = field(default_factory=AnswerSyntax)
    """Form of reasoning and tool calls in the answer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the answer must not contain."""
    ignored: tuple[str, ...] = ()
    """Names of fields and tools of the request that have no effect."""
    source: AgentRequest | None = None
    """The request that `body` was translated from, without its prompt."""
    notes: tuple[str, ...] = ()
    """Remarks about the prompt. They are part of the explanation of the request."""
    text: str = ""
    """Text of the tokens, for a request to detokenize."""
    token_texts: Sequence[str] = ()
    """Text of each token, if a request to tokenize asks for the texts."""


@dataclass(frozen=True, slots=True)
class PrepareConfig:
    """Model and limits for `Preparation`. They are pickled and sent to worker processes."""

    source: str
    """Name, folder or file of the model, for load_tokenizer."""
    names: tuple[str, ...]
    """Names of the model in requests."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_answers: int
    """Limit on n times the number of prompts in a request."""
    seconds: float
    """Time limit of one call in a worker process."""
    keeps_billing_line: bool = False
    """If False, a billing line at the start of a system text is removed."""


class Preparation:
    """Prepares bodies for one model. Raises ApiError for invalid bodies."""

    def __init__(self, config: PrepareConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._compiler: schemas.SchemaCompiler | None = None

    def prepare(self, model: type[BaseModel], data: bytes | bytearray, max_tokens: int) -> Prepared[Any]:
        """Validate a body and tokenize its prompts. Prompts for the engine must have fewer than `max_tokens` tokens."""
        body, ignored = _validate(model, data)
        if isinstance(body, TokenizeRequest | DetokenizeRequest) and body.model is not None:
            self._check_model(body.model)
        match body:
            case CompletionRequest() | ChatRequest():
                return replace(self._generation(body, max_tokens), ignored=ignored)
            case MessagesRequest() | ResponsesRequest():
                return self._translated(body, ignored, max_tokens)
            case CountTokensRequest():
                return Prepared(body, self._count(body, max_tokens))
            case TokenizeRequest():
                tokens = self._one(body, max_tokens, add_special=body.add_special_tokens)
                cleared = body.model_copy(update={"prompt": None, "messages": None, "tools": None})
                texts = self._token_texts(tokens) if body.return_token_strs else []
                return Prepared(cleared, [tokens], token_texts=texts)
            case DetokenizeRequest():
                self._check_known([body.tokens], "tokens")
                text = self._tokenizer.decode(body.tokens, skip_special=False)
                return Prepared(body.model_copy(update={"tokens": []}), text=text)
            case PromptBody():
                tokens = self._one(body, max_tokens)
                self._check_prompts([tokens], "prompt", max_tokens)
            case _:
                return Prepared(body)
        return Prepared(body.model_copy(update={"prompt": None, "messages": None, "tools": None}), [tokens])

    def _token_texts(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]

    def check_schema(self, schema: Grammar) -> None:
        """Compile a grammar. Raises ApiError if the grammar cannot be compiled."""
        try:
            self.load_compiler().check(schema)
        except ArgumentError as error:
            raise ApiError(400, f"the schema cannot be compiled: {error}") from error

    def load_compiler(self) -> schemas.SchemaCompiler:
        """Return the schema compiler. The first call takes seconds for a large vocabulary."""
        if self._compiler is None:
            config, tokenizer = self._config, self._tokenizer.to_json()
            try:
                self._compiler = schemas.SchemaCompiler(tokenizer, config.vocab_size, config.eos_token_ids)
            except (ArgumentError, ValueError) as error:  # llguidance rejects some tokenizers
                why = f"this model does not support structured answers: {type(error).__name__}: {error}"
                raise ApiError(500, why, code="engine_error") from error
        return self._compiler

    def _translated(self, body: AgentRequest, ignored: tuple[str, ...], max_tokens: int) -> Prepared[Any]:
        prepared = self._generation(_to_chat(body), max_tokens)
        ignored = tuple(sorted({*ignored, *body.skipped}))
        return replace(prepared, ignored=ignored, source=body.without_prompt())

    def _count(self, body: CountTokensRequest, max_tokens: int) -> list[list[int]]:
        chat = _to_chat(body)
        self._check(chat)
        messages, _ = self._without_billing_line(chat.messages)
        return [self._encode_request(chat, messages, max_tokens)]

    def _without_billing_line(self, messages: Sequence[Message]) -> tuple[Sequence[Message], tuple[str, ...]]:
        """Remove a billing line at the start, unless the config keeps it. Return the messages and 0 or 1 remarks."""
        first = messages[0].for_template()
        line = _BILLING_LINE.match(first["content"]) if first["role"] in ("system", "developer") else None
        if line is None:
            return messages, ()
        if self._config.keeps_billing_line:
            return messages, (_KEPT_BILLING_LINE,)
        text = first["content"][line.end() :]
        rest = [messages[0].model_copy(update={"content": text})] if text else []
        return [*rest, *messages[1:]] or messages, (_REMOVED_BILLING_LINE,)

    def _encode_request(self, body: ChatRequest, messages: Sequence[Message], max_tokens: int) -> list[int]:
        ends = {
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
        }
        return self._encode_chat(
            messages,
            max_tokens,
            parse_special=body.parse_special,
            tools=body.template_tools,
            variables=body.template_variables,
            ends={name: value for name, value in ends.items() if value is not None},
        )

    def _generation(self, body: CompletionRequest | ChatRequest, max_tokens: int) -> Prepared[Any]:
        self._check(body)
        grammar = answer_grammar(body)
        notes: tuple[str, ...] = ()
        syntax = AnswerSyntax()
        cleared: dict[str, Any] = dict.fromkeys(GRAMMAR_FIELDS) | {body.prompt_field: []}
        if isinstance(body, ChatRequest):
            messages, notes = self._without_billing_line(body.messages)
            prompts = [self._encode_request(body, messages, max_tokens)]
            syntax = self._syntax(body, prompts[0], is_free=grammar is None)
            cleared["tools"] = None
        else:
            self._check_sizes([prompt for prompt in body.prompts if isinstance(prompt, str)], "prompt", max_tokens)
            add_special = body.add_special_tokens is not False
            prompts = [
                self._encode(prompt, body.parse_special, max_tokens, add_special=add_special) for prompt in body.prompts
            ]
        if body.truncate_prompt_tokens is not None:
            prompts = [prompt[-body.truncate_prompt_tokens :] for prompt in prompts]
        self._check_prompts(prompts, body.prompt_field, max_tokens)
        self._check_known([body.stop_token_ids or ()], "stop_token_ids")
        self._check_known([body.allowed_token_ids or ()], "allowed_token_ids")
        self._check_known([[token for token, _ in body.biases]], "logit_bias")
        bad_words = self._bad_words(body)
        return Prepared(body.model_copy(update=cleared), prompts, grammar, syntax, bad_words, notes=notes)

    def _bad_words(self, body: CompletionRequest | ChatRequest) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of each forbidden text: as given, and with one leading space."""
        texts = {form: None for word in body.bad_words or () for form in (word, f" {word.lstrip()}")}
        try:
            found = [tuple(self._tokenizer.encode(text, add_special=False)) for text in texts]
        except ArgumentError as error:
            raise ApiError(400, f"bad_words: {error}", "bad_words") from error
        return tuple(tokens for tokens in found if tokens)

    def _syntax(self, body: ChatRequest, prompt: Sequence[int], *, is_free: bool) -> AnswerSyntax:
        """Return the form of the answer. `is_free` is False if a grammar determines the whole answer."""
        forced, tools = body.forced_tools, body.tools if body.template_tools else None
        template = (self._tokenizer.tool_template if tools else self._tokenizer.chat_template) or ""
        form, has_reasoning = syntax_of_template(template)
        names = tuple(tool.function.name for tool in tools or ())
        if forced:
            is_named = isinstance(body.tool_choice, NamedToolChoice)
            return AnswerSyntax(
                "arguments" if is_named else "list", tuple(tool.name for tool in forced), body.max_calls
            )
        if not is_free:
            return AnswerSyntax()
        tail = self._tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special=False) if has_reasoning else ""
        starts = tail.rstrip().endswith("<think>")
        calls = form if names else "none"
        return AnswerSyntax(calls, names, body.max_calls, has_reasoning, starts)

    def _one(self, body: TokenizeRequest | PromptBody, max_tokens: int, *, add_special: bool = True) -> list[int]:
        """Encode the only prompt of a body: a conversation, a text or tokens."""
        if body.messages is not None:
            messages, _ = self._without_billing_line(body.messages)
            return self._encode_request(body.to_chat(), messages, max_tokens)
        return self._encode(body.prompt or "", body.parse_special is not False, max_tokens, add_special=add_special)

    def _encode(
        self, prompt: str | list[int], parse_special: bool, max_tokens: int, *, add_special: bool = True
    ) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        try:
            return self._tokenizer.encode(
                prompt, add_special=add_special, parse_special=parse_special, max_tokens=max_tokens
            )
        except ArgumentError as error:
            raise _refusal(error, "prompt", max_tokens) from error

    def _encode_chat(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        parse_special: bool,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        ends: Mapping[str, bool] | None = None,
    ) -> list[int]:
        """`variables` are passed to the template. `ends` are options of Tokenizer.chat_text for the prompt's end."""
        conversation = [message.for_template() for message in messages]
        self._check_sizes(["".join(message["content"] for message in conversation)], "messages", max_tokens)
        options: dict[str, Any] = {
            "parse_special": parse_special,
            "max_tokens": max_tokens,
            "tools": tools,
            **(ends or {}),
        }
        variables = variables or {}
        if taken := sorted({"self", "messages", *options} & variables.keys()):
            name = "chat_template_kwargs"
            raise ApiError(400, f"{name}: {', '.join(taken)} is reserved; rename the variable", name)
        try:
            return self._tokenizer.encode_chat(conversation, **variables, **options)
        except StateError as error:
            raise ApiError(400, f"{error}: use /v1/completions", "messages") from error
        except (ArgumentError, TypeError) as error:
            raise _refusal(error, "messages", max_tokens) from error

    def _check(self, body: ChatRequest | CompletionRequest) -> None:
        self._check_model(body.model)
        most, num_answers = self._config.max_answers, body.n or 1
        if isinstance(body, CompletionRequest):
            num_answers *= len(body.prompts)
        if num_answers > most:
            raise ApiError(400, f"n times the number of prompts is {num_answers}; the limit is {most}", "n")
        if isinstance(body, ChatRequest):
            _check_tool_choice(body)
        _check_prompt_logprobs(body)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")

    def _check_model(self, name: str) -> None:
        if name not in self._config.names:
            raise unknown_model(name, self._config.names)

    def _check_sizes(self, texts: Sequence[str], name: str, max_tokens: int) -> None:
        """Reject texts with more bytes than `max_tokens` tokens can have, before the template or tokenizer runs."""
        try:
            for text in texts:
                self._tokenizer.check_size(len(text.encode(errors="surrogatepass")), max_tokens)
        except RangeError as error:
            raise _refusal(error, name, max_tokens) from error

    def _check_prompts(self, prompts: Sequence[Sequence[int]], name: str, max_tokens: int) -> None:
        lengths = [len(prompt) for prompt in prompts]
        if not min(lengths):
            raise ApiError(400, f"{name} is empty: a request needs at least one token", name)
        if max(lengths) >= max_tokens:
            message = f"{name} has {max(lengths)} tokens; the limit is {max_tokens}, including one token to generate"
            raise ApiError(400, message, name, "context_length_exceeded")
        self._check_known(prompts, name)

    def _check_known(self, prompts: Sequence[Sequence[int]], name: str) -> None:
        highest, vocab = max(max(prompt, default=0) for prompt in prompts), self._config.vocab_size
        if highest >= vocab:
            raise ApiError(400, f"{name}: token {highest} is not in [0, {vocab})", name)


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    return ApiError(404, f"unknown model {name!r}; this server has {', '.join(map(repr, known))}", "model")


def _validate(model: type[Body], data: bytes | bytearray) -> tuple[Body, tuple[str, ...]]:
    """Return the validated body, and the names of the fields that are ignored."""
    ignored: tuple[str, ...] = ()
    table = getattr(model, "fields", None)
    value = _parse(data)
    try:
        if issubclass(model, Sampling) and isinstance(value, dict) and len(value) <= MAX_FIELDS:
            value, ignored = split(value, model.model_fields, model.place)
        elif table is not None and isinstance(value, dict) and len(value) <= MAX_FIELDS:
            value, ignored = split(value, model.model_fields, table=table)
        return model.model_validate(value), ignored
    except UnsupportedFieldError as error:
        raise ApiError(400, f"{error.name}: {error}", error.name, "unsupported_field") from error
    except ValidationError as error:
        raise _from_validation(error, {*model.model_fields, *(table or FIELDS)}, value) from error


def _parse(data: bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    If msgspec rejects the text, Python's slower parser runs too. Python's parser reports the position of an error, and
    accepts NaN and unpaired surrogates. The later validation rejects these values and names their field.
    """
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(data)
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at {error.pos}"
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    except RecursionError:
        why = "it is nested too deep"
    except ValueError:  # Python limits the digits of integers
        why = "a number has too many digits"
    raise ApiError(400, f"the body is not JSON: {why}", code="invalid_json")


def _to_chat(body: CountTokensRequest | ResponsesRequest) -> ChatRequest:
    try:
        return body.to_chat()
    except ValidationError as error:
        raise _from_validation(error, ChatRequest.model_fields) from error


def _from_validation(error: ValidationError, known: Collection[str], body: Any = None) -> ApiError:
    """Convert an error of pydantic. The message does not quote the input, which may be a prompt.

    If a value may have several types, pydantic reports one error for each type. The error with the longest path belongs
    to the type that fits best, so only this error is converted. Errors of validators for the whole body have no path,
    but their message starts with the name of a field. `known` has the field names of this endpoint, and often those of
    related endpoints. If `body` is None, the paths of pydantic are used as they are.
    """
    errors = error.errors(include_url=False, include_input=False)
    paths = [_path(each, body) for each in errors]
    first, path = max(zip(errors, paths, strict=True), key=lambda pair: len(pair[1]))
    where = ".".join(map(str, path)) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field" if len(path) > 1 else _unknown_field(str(path[0]), known)
    first_word = message.partition(" ")[0].rstrip(":")
    param = where or (first_word if first_word in known else None)
    head = f"{where}: " if where else "" if param else "the body: "
    return ApiError(400, head + message, param, str(first["type"]))


def _path(error: ErrorDetails, body: Any) -> list[int | str]:
    """Return the place of an error in the body, without the names that pydantic adds for the types of a union."""
    if body is None:
        return list(error["loc"])
    path: list[int | str] = []
    value = body
    for name in error["loc"]:
        is_key = isinstance(value, dict) and name in value
        is_index = isinstance(value, list) and isinstance(name, int) and name < len(value)
        if is_key or is_index:
            path.append(name)
            value = value[name]
    if error["type"] == "missing" and isinstance(value, dict):
        path.append(error["loc"][-1])
    elif error["type"].startswith("union_tag"):
        path.append(error["ctx"]["discriminator"].strip("'"))
    return path


def _unknown_field(name: str, known: Collection[str]) -> str:
    if name in known:
        return "this endpoint does not have the field"
    near = difflib.get_close_matches(name, known, 1)
    return "unknown field" + (f"; did you mean {near[0]}?" if near else "")


def _check_prompt_logprobs(body: ChatRequest | CompletionRequest) -> None:
    name = "prompt_logprobs"
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, f"{name} cannot be combined with stream: true; use echo and logprobs", name)
    if body.prompt_logprobs_start is not None and body.num_prompt_logprobs is None:
        field = "prompt_logprobs_start"
        raise ApiError(400, f"{field} needs {name}, or echo and logprobs", field)
    field, limit = body.token_limit
    if limit == 0 and not body.echo and body.prompt_logprobs is None:
        raise ApiError(400, f"{field}: 0 needs echo: true or {name}", field)


def _check_tool_choice(body: ChatRequest) -> None:
    name = "tool_choice"
    if body.tool_choice in (None, "none", "auto"):
        return
    if not body.tools:
        raise ApiError(400, f"{name}: a forced call needs tools; set tools, or set {name} to none or auto", name)
    if not body.forced_tools:
        known = ", ".join(tool.function.name for tool in body.tools)
        raise ApiError(400, f"{name}: no tool has this name; the tools are {known}", name)


def _refusal(error: ArgumentError | TypeError, name: str, max_tokens: int) -> ApiError:
    if isinstance(error, RangeError):
        message = f"{name}: {error}; the limit is {max_tokens} tokens, including one token to generate"
        return ApiError(400, message, name, "context_length_exceeded")
    return ApiError(400, f"{name}: {error}", name)
