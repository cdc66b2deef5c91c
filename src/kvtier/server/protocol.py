"""Bodies of chat and text completions: fields of OpenAI, vLLM and kvtier. fields.py lists the refused fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from kvtier.engine.params import Penalties, SamplingParams
from kvtier.index.labels import Hints
from kvtier.server.chat_messages import FunctionDefinition, Messages, NamedToolChoice, Tool, check_end
from kvtier.server.field_types import (
    AllowedTokens,
    AnyObject,
    BadWords,
    Biases,
    Choices,
    Count,
    MinP,
    ModelName,
    Name,
    Penalty,
    PositiveCount,
    Priority,
    Prompts,
    RepetitionPenalty,
    RequestId,
    Seed,
    SessionKey,
    StopText,
    StopTexts,
    StopTokens,
    Strict,
    Temperature,
    TemplateVariables,
    Text,
    TopK,
    TopP,
    few,
)

_YEAR_SECONDS = 366 * 86_400  # limit for times in requests


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    """True to add the usage so far to every event."""
    include_obfuscation: bool | None = None
    """This field has no effect."""


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


class StructuredOutputs(Strict):
    """Restrictions of the answer in vLLM's format. At most one of the first five fields may be set."""

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


class Sampling(Strict):
    """Fields that chat completions and text completions share."""

    place: ClassVar[str]
    """Letter of the endpoint in fields.ApiField.places."""

    model: ModelName
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopTokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    """0 is accepted only with echo or prompt_logprobs."""
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs_start: Count | None = None
    """Index s of the first scored prompt token; 0 means 1. At most s - 1 tokens may come from the cache."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    """Number of tokens to keep at the end of each prompt."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    """Name of the request for logs and /control/explain, like the header x-request-id."""
    logit_bias: Biases | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    session_id: Name | None = None
    prompt_cache_key: SessionKey | None = None
    session_over: bool | None = None
    expects_return_seconds: Annotated[float, Field(ge=0, le=_YEAR_SECONDS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    # These fields are accepted because OpenAI's clients send them. They have no effect.
    user: SessionKey | None = None
    metadata: Annotated[dict[str, str], Field(max_length=64), few(64)] | None = None
    store: bool | None = None
    service_tier: Annotated[str, StringConstraints(max_length=64)] | None = None

    @property
    def hints(self) -> Hints:
        """The client's hints about the next request of the session."""
        session = self.session_id or self.prompt_cache_key or ""
        return Hints(session, bool(self.session_over), self.expects_return_seconds)

    def sampling_params(
        self, *, max_tokens: int, logprobs: int | None, bad_words: tuple[tuple[int, ...], ...] = ()
    ) -> SamplingParams:
        """Return the engine's parameters. Raises ArgumentError if one of them is invalid."""
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
    max_completion_tokens: PositiveCount | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    """Only False is accepted, because chat templates write the special tokens."""
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
    """True if the answer continues the last message, which must be from the assistant."""
    enable_thinking: bool | None = None
    """Variable of the chat template. The same variable in chat_template_kwargs has precedence."""
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
        """Name and value of the field with the smallest limit for the answer. The value is None if no limit is set."""
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
        """Functions of which the model must call at least one. Empty if no call is forced or the tool is unknown."""
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
