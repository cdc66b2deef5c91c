"""Request bodies: OpenAI's fields and kvtier's additions. Unknown fields are rejected (see fields.py).

Validation takes linear time and reports few errors for any input. Sizes are checked before items, validation of a list
stops at the first invalid item, and lists of tokens are checked as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvtier.engine.params import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_BIASES,
    PENALTY,
    REPETITION_PENALTY,
    TEMPERATURE,
    Penalties,
    SamplingParams,
)
from kvtier.index.labels import Hints
from kvtier.server.config import MAX_PRIORITY

Text = Annotated[str, StringConstraints(max_length=4 << 20)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_YEAR_SECONDS = 366 * 86_400
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ShortText = Annotated[str, StringConstraints(max_length=256)]
_MAX_TOKEN_ID = (1 << 31) - 1
TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
INT64 = 1 << 63
MAX_FIELDS = 64  # limit for objects with known fields; the largest model has 50 fields
_MAX_PROMPTS = 128
# Nesting limit for arbitrary JSON, because serializing recurses once per level (pydantic fails at 255).
_MAX_DEPTH = 100


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return value
    raise ValueError(f"objects and lists are nested deeper than {_MAX_DEPTH} levels")


AnyObject = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""Arbitrary JSON of limited depth."""


def _bounded(value: Any, most: int = MAX_FIELDS) -> Any:
    """Check the size of a list or an object before any of its items is validated."""
    if isinstance(value, list | dict) and len(value) > most:
        raise PydanticCustomError("too_long", "{count} items; the limit is {most}", {"count": len(value), "most": most})
    return value


def few(most: int) -> BeforeValidator:
    """Return a check of the size of a list or an object, for models and fields."""
    return BeforeValidator(lambda value: _bounded(value, most))


TemplateVariables = Annotated[dict[str, str | int | float | bool | None], Field(max_length=64), few(64)]
"""Variables for the chat template."""


def _token_ids(values: list[Any], where: str = "") -> list[int]:
    """Check a list as a whole. 1.4 million items take 0.1 s; an error per item would take 26 s (x86-64, 2026-11-16)."""
    if not values:
        raise ValueError(f"{where}empty list of tokens; a request needs at least one token")
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > _MAX_TOKEN_ID:
        valid = (type(value) is int and 0 <= value <= _MAX_TOKEN_ID for value in values)
        at = next(index for index, is_valid in enumerate(valid) if not is_valid)
        raise ValueError(f"{where}item {at} is not a token id, an integer in [0, {_MAX_TOKEN_ID}]")
    return values


def _allowed_ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("expected a list of token ids")
    return _token_ids(_bounded(value, MAX_ALLOWED_TOKENS))


def _one_prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _token_ids(value)
    raise ValueError("expected a text or a list of token ids")


def _prompts(value: Any) -> str | list[int] | list[str] | list[list[int]]:
    """Check one or several prompts. The first item of a list determines its type."""
    if not isinstance(value, list) or not value or type(value[0]) is int:
        return _one_prompt(value)
    if len(value) > _MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts; the limit is {_MAX_PROMPTS}")
    if isinstance(value[0], str):
        if not all(isinstance(prompt, str) for prompt in value):
            raise ValueError("all prompts must be texts if the first one is a text")
        return value
    if not all(isinstance(prompt, list) for prompt in value):
        raise ValueError("expected a text, token ids, texts, or lists of token ids")
    return [_token_ids(prompt, f"prompt {index}: ") for index, prompt in enumerate(value)]


def _token_list(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("expected a list of token ids")
    return _token_ids(value)


_Tokens = Annotated[list[TokenId], Field(min_length=1)]
OnePrompt = Annotated[str | list[int], PlainValidator(_one_prompt, json_schema_input_type=Text | _Tokens)]
Prompts = Annotated[
    str | list[int] | list[str] | list[list[int]],
    PlainValidator(
        _prompts,
        json_schema_input_type=Text
        | _Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[list[_Tokens], Field(min_length=1, max_length=_MAX_PROMPTS)],
    ),
]


class Strict(BaseModel):
    """Base model that converts no types and rejects unknown fields and infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    _few_fields = model_validator(mode="before")(lambda value: _bounded(value))


class TextPart(Strict):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: Text


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object. Clients send JSON text; chat templates expect an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
        _shallow({"arguments": arguments})
    except (ValueError, RecursionError):  # the model wrote invalid JSON; the template gets the text
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class Message(Strict):
    """One turn of a conversation. Ignores fields that other servers add to answers (refusal, annotations, ...)."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=4096, fail_fast=True), few(4096)] | None = None
    name: ShortText | None = None
    reasoning_content: Text | None = None
    """Reasoning of an earlier answer. Templates that support it keep it while a tool loop runs."""
    tool_calls: Annotated[list[AnyObject], Field(max_length=128, fail_fast=True), few(128)] | None = None
    tool_call_id: ShortText | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content or tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates, with its content joined to one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        tool_calls = [_template_call(call) for call in self.tool_calls or ()]
        optional = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": tool_calls,
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": content, **{key: value for key, value in optional.items() if value}}


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True), few(4096)]


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool definition, which is passed to the chat template unchanged."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    name: Name


class NamedToolChoice(Strict):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


def check_end(messages: Sequence[Message], add_prompt: bool | None, is_continued: bool | None) -> None:
    """Check the fields for the end of a chat prompt. Raises ValueError."""
    if not is_continued:
        return
    if add_prompt:
        raise ValueError("continue_final_message excludes add_generation_prompt: true")
    last = messages[-1].for_template()
    if last["role"] != "assistant" or not last["content"].strip():
        raise ValueError("continue_final_message needs a final message of the assistant that is not empty")


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    """True if every event has the usage so far."""
    include_obfuscation: bool | None = None
    """Accepted without effect."""


class JsonSchema(Strict):
    model_config = ConfigDict(populate_by_name=True)

    name: Annotated[str, StringConstraints(max_length=64)] = "answer"
    description: Text | None = None
    schema_: AnyObject = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


Schema = AnyObject | Text
"""A JSON schema, as an object or as text."""
Choices = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]],
    Field(min_length=1, max_length=1024, fail_fast=True),
    few(1024),
]


class StructuredOutputs(Strict):
    """Constraints of vLLM. At most one of the first five fields is set."""

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    # These fields are accepted without effect.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None


GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields that can hold a grammar of the answer."""


def _biases(values: dict[str, float]) -> dict[str, float]:
    low, high = LOGIT_BIAS
    for name, value in values.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= _MAX_TOKEN_ID):
            raise ValueError(f"every key is a token id, an integer in [0, {_MAX_TOKEN_ID}]")
        if not low <= value <= high:
            raise ValueError(f"the bias of token {name} is not in [{low:g}, {high:g}]")
    return values


class Sampling(Strict):
    """Fields that chat completions and text completions share."""

    place: ClassVar[str]
    """The endpoint in fields.ApiField.places."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    temperature: Annotated[float, Field(ge=TEMPERATURE[0], le=TEMPERATURE[1])] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=PENALTY[0], le=PENALTY[1])] | None = None
    frequency_penalty: Annotated[float, Field(ge=PENALTY[0], le=PENALTY[1])] | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTY[0], le=REPETITION_PENALTY[1])] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True), few(16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True), few(64)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """0 needs echo or prompt_logprobs."""
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs_start: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Index of the first prompt token whose log-probability is computed. Earlier tokens may come from the cache."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    """Number of tokens at the end of each prompt to keep."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Name | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    request_id: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None
    """Name of the request for logs and /control/explain, like the header x-request-id."""
    logit_bias: (
        Annotated[dict[str, float], Field(max_length=MAX_BIASES), few(MAX_BIASES), AfterValidator(_biases)] | None
    ) = None
    allowed_token_ids: (
        Annotated[
            list[int],
            Field(min_length=1, max_length=MAX_ALLOWED_TOKENS),
            PlainValidator(_allowed_ids, json_schema_input_type=list[TokenId]),
        ]
        | None
    ) = None
    bad_words: Annotated[list[StopText], Field(max_length=64, fail_fast=True), few(64)] | None = None
    session_id: Name | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=512)] | None = None
    session_over: bool | None = None
    expects_return_seconds: Annotated[float, Field(ge=0, le=_YEAR_SECONDS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    # These fields are accepted because OpenAI's clients send them. They have no effect.
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=64), few(64)] | None = None
    store: bool | None = None
    service_tier: Annotated[str, StringConstraints(max_length=64)] | None = None

    @property
    def hints(self) -> Hints:
        """Hints of the client about the next request of its session."""
        session = self.session_id or self.prompt_cache_key or ""
        return Hints(session, bool(self.session_over), self.expects_return_seconds)

    def sampling_params(
        self, *, max_tokens: int, logprobs: int | None, bad_words: tuple[tuple[int, ...], ...] = ()
    ) -> SamplingParams:
        """Return the engine's parameters. `bad_words` has the tokens of each bad word. May raise ArgumentError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        presence, frequency = self.presence_penalty or 0.0, self.frequency_penalty or 0.0
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            penalties=Penalties(self.repetition_penalty or 1.0, presence, frequency),
            seed=None if self.seed is None else self.seed % (1 << 64),
            stop=stop,
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=self.biases,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=bad_words,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            prompt_logprobs_start=max(1, self.prompt_logprobs_start or 1),
            n=self.n or 1,
        )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Token ids and biases in logit_bias."""
        return tuple((int(name), value) for name, value in (self.logit_bias or {}).items())

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to compute per prompt token; None for no log-probabilities of the prompt."""
        return self.prompt_logprobs


class ChatRequest(Sampling):  # POST /v1/chat/completions
    endpoint: ClassVar = "chat"
    place: ClassVar = "c"
    id_prefix: ClassVar = "chatcmpl-"
    prompt_field: ClassVar = "messages"

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    """Chat templates write the special tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True), few(128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False limits an answer to one tool call."""
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    """False ends the prompt after the last message, without the start of an answer."""
    continue_final_message: bool | None = None
    """True if the answer continues the last message, which is the assistant's."""
    enable_thinking: bool | None = None
    """Short form of a variable in chat_template_kwargs."""
    parse_special: bool = False
    """True if the text of a special token in messages, tools or chat_template_kwargs is parsed as that token."""

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        check_end(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to report per token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the answer."""
        limits = (("max_completion_tokens", self.max_completion_tokens), ("max_tokens", self.max_tokens))
        given = [(name, limit) for name, limit in limits if limit is not None]
        return min(given, key=lambda limit: limit[1], default=("max_tokens", None))

    @property
    def template_variables(self) -> dict[str, str | int | float | bool | None]:
        """Variables for the chat template."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**thinking, **(self.chat_template_kwargs or {})}

    @property
    def template_tools(self) -> list[Mapping[str, Any]] | None:
        """Tools for the chat template; None if the model must not use tools."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def forced_tools(self) -> list[FunctionDefinition]:
        """Functions of which the model must call at least one; empty if it may answer with text."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedToolChoice):
            return [function for function in functions if function.name == self.tool_choice.function.name][:1]
        return functions if self.tool_choice == "required" else []

    @property
    def max_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None


class CompletionRequest(Sampling):  # POST /v1/completions
    endpoint: ClassVar = "completion"
    place: ClassVar = "t"
    id_prefix: ClassVar = "cmpl-"
    prompt_field: ClassVar = "prompt"

    prompt: Prompts
    parse_special: bool = True
    """True if the text of a special token in a prompt is parsed as that token."""
    add_special_tokens: bool | None = None
    """False adds no special tokens, such as begin-of-text, to prompts that are texts."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    """True if the answer begins with the prompt."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    @property
    def token_limit(self) -> tuple[str, int]:
        return "max_tokens", 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


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
            raise ValueError("prompt and messages: set one of them")
        if self.messages is not None:
            check_end(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self

    def to_chat(self) -> ChatRequest:
        """Return a chat request with the same prompt."""
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
    tokens: Annotated[
        list[int], PlainValidator(_token_list, json_schema_input_type=Annotated[list[TokenId], Field(min_length=1)])
    ]


class PromptBody(_PromptOrMessages):
    """A prompt for the control API, and the tenant and salt that select the cache."""

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
    num_blocks: Annotated[int, Field(ge=1, lt=1 << 31)]
