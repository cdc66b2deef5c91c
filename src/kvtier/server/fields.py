"""Fields of the completion requests of OpenAI and vLLM, each in one of three classes.

- honoured: the field has its documented effect. Its type and limits are in protocol.py and field_types.py.
- ignored: the field is accepted and has no effect. The header `x-kvtier-ignored` names it, unless its value is null.
- refused: the field would change the answer and is not supported. It gets 400, unless its value has no effect.

A field that is in no class gets 400 too, because it is either misspelled or unknown to this version.
docs/make_reference.py generates the tables in docs/api.md from this module and agent_fields.py. In a note, "see below"
refers to the text below these tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

HEADER = "x-kvtier-ignored"


class ApiField(NamedTuple):
    """A field of a request.

    `places` contains c if /v1/chat/completions has the field, and t if /v1/completions has it. Fields of other APIs,
    which have tables of their own (agent_fields.py), have empty `places`.
    """

    places: str
    origin: Literal["OpenAI", "Anthropic", "vLLM", "kvtier"]
    kind: Literal["honoured", "ignored", "refused"]
    """The class of the field."""
    note: str = ""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that have no effect and are accepted. Every refused field accepts null."""


def _honoured(places: str, origin: Literal["OpenAI", "vLLM", "kvtier"], note: str = "") -> ApiField:
    return ApiField(places, origin, "honoured", note)


def _ignored(places: str, origin: Literal["OpenAI", "vLLM", "kvtier"], note: str) -> ApiField:
    return ApiField(places, origin, "ignored", note)


def _refused(places: str, origin: Literal["OpenAI", "vLLM", "kvtier"], note: str, *neutral: Any) -> ApiField:
    return ApiField(places, origin, "refused", note, neutral)


FIELDS: Mapping[str, ApiField] = MappingProxyType(
    {
        "model": _honoured("ct", "OpenAI"),
        "messages": _honoured("c", "OpenAI", "text only"),
        "prompt": _honoured("t", "OpenAI", "text, tokens, or a list of either"),
        "max_tokens": _honoured("ct", "OpenAI"),
        "max_completion_tokens": _honoured("c", "OpenAI", "with `max_tokens`, the smaller one counts"),
        "temperature": _honoured("ct", "OpenAI", "0 to 100"),
        "top_p": _honoured("ct", "OpenAI"),
        "n": _honoured("ct", "OpenAI"),
        "seed": _honoured("ct", "OpenAI"),
        "stop": _honoured("ct", "OpenAI", "at most 16 texts"),
        "presence_penalty": _honoured("ct", "OpenAI", "-2 to 2"),
        "frequency_penalty": _honoured("ct", "OpenAI", "-2 to 2"),
        "logprobs": _honoured("ct", "OpenAI"),
        "top_logprobs": _honoured("c", "OpenAI", "at most 20"),
        "stream": _honoured("ct", "OpenAI"),
        "stream_options": _honoured("ct", "OpenAI"),
        "stream_options.include_usage": _honoured("ct", "OpenAI"),
        "stream_options.continuous_usage_stats": _honoured("ct", "vLLM", "usage in every event"),
        "stream_options.include_obfuscation": _ignored("ct", "OpenAI", "events are not padded"),
        "response_format": _honoured("ct", "OpenAI", "`text`, `json_object`, `json_schema`"),
        "tools": _honoured("c", "OpenAI", "type `function` only"),
        "tool_choice": _honoured("c", "OpenAI"),
        "parallel_tool_calls": _honoured("c", "OpenAI"),
        "user": _ignored("ct", "OpenAI", "API keys identify tenants"),
        "metadata": _ignored("ct", "OpenAI", "nothing is stored"),
        "store": _ignored("ct", "OpenAI", "nothing is stored"),
        "service_tier": _ignored("ct", "OpenAI", "see `priority`"),
        "prompt_cache_key": _honoured("ct", "OpenAI", "as `session_id`, if that is absent"),
        "prompt_cache_retention": _ignored("ct", "OpenAI", "the operator configures the cache"),
        "prompt_cache_options": _ignored("ct", "OpenAI", "the operator configures the cache"),
        "safety_identifier": _ignored("ct", "OpenAI", "API keys identify tenants"),
        "client_metadata": _ignored("ct", "OpenAI", "sent by Codex"),
        "prediction": _ignored("c", "OpenAI", "affects speed only"),
        "verbosity": _ignored("c", "OpenAI", "a hint for models of OpenAI"),
        "reasoning_effort": _ignored("c", "OpenAI", "a hint; see `chat_template_kwargs`"),
        "modalities": _refused("c", "OpenAI", "text only", ["text"]),
        "audio": _refused("c", "OpenAI", "text only"),
        "web_search_options": _refused("c", "OpenAI", "no web search"),
        "functions": _refused("c", "OpenAI", "use `tools`", []),
        "function_call": _refused("c", "OpenAI", "use `tool_choice`", "none", "auto"),
        "moderation": _refused("c", "OpenAI", "no moderation"),
        "logit_bias": _honoured("ct", "OpenAI", "at most 1,024 tokens, -100 to 100"),
        "echo": _honoured("ct", "OpenAI", "in chat completions only `false`"),
        "suffix": _refused("t", "OpenAI", "put the tokens for fill-in-the-middle into `prompt`", ""),
        "best_of": _refused("t", "OpenAI", "use `n`", 1),
        "top_k": _honoured("ct", "vLLM"),
        "min_p": _honoured("ct", "vLLM"),
        "repetition_penalty": _honoured("ct", "vLLM", "0.01 to 100"),
        "min_tokens": _honoured("ct", "vLLM"),
        "ignore_eos": _honoured("ct", "vLLM"),
        "stop_token_ids": _honoured("ct", "vLLM", "at most 64"),
        "chat_template_kwargs": _honoured("c", "vLLM", "variables of the template"),
        "priority": _honoured("ct", "vLLM", "-1000 to 1000, higher first; at most the tenant's `max_priority`"),
        "cache_salt": _honoured("ct", "vLLM", "a separate part of the cache"),
        "parse_special": _honoured("ct", "kvtier", "see below"),
        "kv_transfer_params": _ignored("ct", "vLLM", "see `/control`"),
        "ec_transfer_params": _ignored("ct", "vLLM", "text only"),
        "data_parallel_rank": _ignored("ct", "vLLM", "one engine"),
        "guided_decoding_backend": _ignored("ct", "vLLM", "always llguidance"),
        "session_id": _honoured("ct", "vLLM", "a name for `POST /v1/sessions/close`"),
        "session_over": _honoured("ct", "kvtier", "no further request of this session is expected"),
        "expects_return_seconds": _honoured("ct", "kvtier", "expected time until the session's next request"),
        "length_penalty": _ignored("ct", "vLLM", "for beam search only"),
        "early_stopping": _ignored("ct", "vLLM", "for beam search only"),
        "spaces_between_special_tokens": _ignored("ct", "vLLM", "special tokens are not shown"),
        "media_io_kwargs": _ignored("c", "vLLM", "text only"),
        "mm_processor_kwargs": _ignored("c", "vLLM", "text only"),
        "enable_thinking": _honoured("c", "vLLM", "a variable of the template, as in `chat_template_kwargs`"),
        "add_generation_prompt": _honoured("c", "vLLM", "false ends the prompt after the last message"),
        "continue_final_message": _honoured("c", "vLLM", "the answer continues the last message"),
        "add_special_tokens": _honoured("ct", "vLLM", "in chat completions only `false`"),
        "include_reasoning": _refused("c", "vLLM", "always true", True),
        "chat_template": _refused("c", "vLLM", "templates come from the checkpoint"),
        "documents": _refused("c", "vLLM", "put them into `messages`", []),
        "structured_outputs": _honoured("ct", "vLLM", "`json`, `regex`, `choice`, `grammar`, `json_object`"),
        "guided_json": _honoured("ct", "vLLM", "a schema as object or text"),
        "guided_regex": _honoured("ct", "vLLM", "without look-around"),
        "guided_choice": _honoured("ct", "vLLM", "at most 1,024 texts"),
        "guided_grammar": _honoured("ct", "vLLM", "Lark or GBNF"),
        "guided_whitespace_pattern": _refused("ct", "vLLM", "white space has a fixed form"),
        "allowed_token_ids": _honoured("ct", "vLLM", "at most 16,384"),
        "bad_words": _honoured("ct", "vLLM", "at most 64 texts, as sequences of tokens"),
        "return_token_ids": _honoured("ct", "vLLM"),
        "return_tokens_as_token_ids": _honoured("ct", "vLLM", "`token_id:5` in log-probabilities"),
        "prompt_logprobs": _honoured("ct", "vLLM", "at most 20; not in a stream"),
        "prompt_logprobs_start": _honoured("ct", "kvtier", "see below"),
        "request_id": _honoured("ct", "vLLM", "returned in the header `x-request-id`; `/control/explain` accepts it"),
        "skip_special_tokens": _refused("ct", "vLLM", "always true", True),
        "include_stop_str_in_output": _honoured("ct", "vLLM"),
        "truncate_prompt_tokens": _honoured("ct", "vLLM", "keeps the last tokens; the whole text must fit the context"),
        "truncation_side": _refused("ct", "vLLM", "always left", "left"),
        "use_beam_search": _refused("ct", "vLLM", "not supported", False),
        "logits_processors": _refused("ct", "vLLM", "runs code of the client", []),
        "prompt_embeds": _refused("t", "vLLM", "tokens only"),
        "thinking_token_budget": _refused("ct", "vLLM", "not supported", -1),
        "logprob_token_ids": _refused("ct", "vLLM", "use `top_logprobs`, or `logprobs` of a text completion"),
        "return_prompt_text": _refused("c", "vLLM", "use `return_token_ids` and `/detokenize`", False),
        "return_token_offsets": _ignored("ct", "vLLM", "only for vLLM's endpoints that generate nothing"),
        "return_assistant_tokens_mask": _ignored("c", "vLLM", "only for vLLM's endpoints that generate nothing"),
        "routed_experts_prompt_start": _ignored("ct", "vLLM", "experts are not returned"),
        "stream_interval": _ignored("ct", "vLLM", "each step is an event"),
        "mm_payload": _ignored("ct", "vLLM", "text only"),
        "return_mm_kwargs": _ignored("ct", "vLLM", "text only"),
        "watermarking": _refused("ct", "vLLM", "not supported", False),
        "repetition_detection": _refused("ct", "vLLM", "not supported"),
        "vllm_xargs": _refused("ct", "vLLM", "for custom samplers", {}),
    }
)


class UnsupportedFieldError(Exception):
    """A refused field with a value that would change the answer."""

    def __init__(self, name: str, note: str) -> None:
        super().__init__(f"not supported ({note.replace('`', '')})")
        self.name = name


def split(
    body: Mapping[str, Any], known: Collection[str], place: str = "", table: Mapping[str, ApiField] = FIELDS
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields to validate, and the names of the ignored fields.

    `known` contains the field names of the class that validates the body. `place` is the letter of the endpoint in
    ApiField.places, or empty if `table` is not FIELDS. Fields of other endpoints and unknown fields are among the
    returned fields, so that validation rejects them. A field in `known` is returned even if it is ignored or refused,
    so that its value is checked. Raises UnsupportedFieldError if a refused field outside `known` would have an effect.
    """
    kept, ignored = dict(body), []
    for name, value in body.items():
        field = table.get(name)
        if field is None or place not in field.places or field.kind == "honoured":
            continue
        if field.kind == "ignored" and value is not None:
            ignored.append(name)
        if name in known:
            continue
        if field.kind == "refused" and not _has_no_effect(value, field):
            raise UnsupportedFieldError(name, field.note)
        del kept[name]
    options = body.get("stream_options")
    if isinstance(options, dict):
        nested = (f"stream_options.{name}" for name in options if options[name] is not None)
        ignored += [name for name in nested if name in table and table[name].kind == "ignored"]
    return kept, tuple(sorted(ignored))


def _has_no_effect(value: Any, field: ApiField) -> bool:
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in field.neutral)
