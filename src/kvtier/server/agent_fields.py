"""Fields of Anthropic's Messages API and of OpenAI's Responses API. fields.py explains the classes of fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from kvtier.server.fields import ApiField

_Origin = Literal["Anthropic", "OpenAI", "vLLM", "kvtier"]


def _honoured(origin: _Origin, note: str = "") -> ApiField:
    return ApiField("", origin, "honoured", note)


def _ignored(origin: _Origin, note: str) -> ApiField:
    return ApiField("", origin, "ignored", note)


def _refused(origin: _Origin, note: str, *neutral: Any) -> ApiField:
    return ApiField("", origin, "refused", note, neutral)


MESSAGES_FIELDS: Mapping[str, ApiField] = MappingProxyType(
    {
        "model": _honoured("Anthropic"),
        "messages": _honoured("Anthropic", "text, thinking, tool use and results; a final assistant text is continued"),
        "max_tokens": _honoured("Anthropic", "required, except by `count_tokens`"),
        "system": _honoured("Anthropic", "text; a first line `x-anthropic-billing-header: ..` is removed by default"),
        "stop_sequences": _honoured("Anthropic", "at most 16 texts"),
        "stream": _honoured("Anthropic"),
        "temperature": _honoured("Anthropic", "0 to 100"),
        "top_p": _honoured("Anthropic"),
        "top_k": _honoured("Anthropic"),
        "tools": _honoured("Anthropic", "type `custom`; other types are skipped and named in `x-kvtier-ignored`"),
        "tool_choice": _honoured("Anthropic"),
        "thinking": _honoured("Anthropic", "sets `enable_thinking` of the template; a budget has no effect"),
        "output_config": _honoured("Anthropic", "`format`; `effort` has no effect"),
        "output_format": _honoured("Anthropic", "old name of `output_config.format`"),
        "metadata": _ignored("Anthropic", "API keys identify tenants"),
        "service_tier": _ignored("Anthropic", "see `priority`"),
        "cache_control": _ignored("Anthropic", "every prefix is cached"),
        "context_management": _ignored("Anthropic", "prompts are not edited"),
        "inference_geo": _ignored("Anthropic", "one server"),
        "speed": _ignored("Anthropic", "one speed"),
        "betas": _ignored("Anthropic", "a header of Anthropic's API"),
        "user_profile_id": _ignored("Anthropic", "API keys identify tenants"),
        "diagnostics": _ignored("Anthropic", "see `/control/explain`"),
        "container": _refused("Anthropic", "no code execution"),
        "mcp_servers": _refused("Anthropic", "the client calls tools", []),
        "fallbacks": _refused("Anthropic", "one model", []),
        "thread": _refused("Anthropic", "nothing is stored"),
        "compaction": _ignored("Anthropic", "prompts are not edited"),
        "billing_policy": _ignored("Anthropic", "no billing"),
        "fallback_credit_token": _ignored("Anthropic", "no billing"),
        "workspace_id": _ignored("Anthropic", "API keys identify tenants"),
        "seed": _honoured("kvtier"),
        "chat_template_kwargs": _honoured("vLLM", "variables of the template"),
        "cache_salt": _honoured("vLLM", "a separate part of the cache"),
        "priority": _honoured("vLLM", "as for completions"),
        "kv_transfer_params": _ignored("vLLM", "see `/control`"),
        "ec_transfer_params": _ignored("vLLM", "text only"),
        "mm_payload": _ignored("vLLM", "text only"),
        "return_mm_kwargs": _ignored("vLLM", "text only"),
        "watermarking": _refused("vLLM", "not supported", False),
        "vllm_xargs": _refused("vLLM", "for custom samplers", {}),
    }
)

RESPONSES_FIELDS: Mapping[str, ApiField] = MappingProxyType(
    {
        "model": _honoured("OpenAI"),
        "input": _honoured("OpenAI", "text; messages, calls, results and reasoning"),
        "instructions": _honoured("OpenAI"),
        "max_output_tokens": _honoured("OpenAI"),
        "temperature": _honoured("OpenAI", "0 to 100"),
        "top_p": _honoured("OpenAI"),
        "stream": _honoured("OpenAI"),
        "tools": _honoured("OpenAI", "type `function`; other types are skipped and named in `x-kvtier-ignored`"),
        "tool_choice": _honoured("OpenAI", "`none`, `auto`, `required`, or a function"),
        "parallel_tool_calls": _honoured("OpenAI"),
        "text": _honoured("OpenAI", "`format`; `verbosity` has no effect"),
        "reasoning": _honoured("OpenAI", "effort `none` sets `enable_thinking: false`; the rest has no effect"),
        "include": _ignored("OpenAI", "items always have all fields; only `message.output_text.logprobs` gets 400"),
        "metadata": _ignored("OpenAI", "nothing is stored"),
        "store": _ignored("OpenAI", "nothing is stored"),
        "service_tier": _ignored("OpenAI", "see `priority`"),
        "user": _ignored("OpenAI", "API keys identify tenants"),
        "safety_identifier": _ignored("OpenAI", "API keys identify tenants"),
        "prompt_cache_key": _honoured("OpenAI", "as `session_id`, if that is absent"),
        "prompt_cache_retention": _ignored("OpenAI", "the operator configures the cache"),
        "prompt_cache_options": _ignored("OpenAI", "the operator configures the cache"),
        "client_metadata": _ignored("OpenAI", "sent by Codex"),
        "stream_options": _ignored("OpenAI", "events are not padded"),
        "truncation": _ignored("OpenAI", "input is not shortened; too long input gets 400"),
        "context_management": _ignored("OpenAI", "prompts are not edited"),
        "max_tool_calls": _ignored("OpenAI", "limits tools that OpenAI runs"),
        "access_programs": _ignored("OpenAI", "for models of OpenAI"),
        "image": _ignored("OpenAI", "text only"),
        "background": _refused("OpenAI", "nothing is stored", False),
        "previous_response_id": _refused("OpenAI", "nothing is stored; send the whole conversation"),
        "conversation": _refused("OpenAI", "nothing is stored; send the whole conversation"),
        "prompt": _refused("OpenAI", "nothing is stored"),
        "moderation": _refused("OpenAI", "no moderation"),
        "top_logprobs": _refused("OpenAI", "use `/v1/chat/completions`", 0),
        "top_k": _honoured("vLLM"),
        "seed": _honoured("vLLM"),
        "presence_penalty": _honoured("vLLM", "-2 to 2"),
        "frequency_penalty": _honoured("vLLM", "-2 to 2"),
        "repetition_penalty": _honoured("vLLM", "0.01 to 100"),
        "logit_bias": _honoured("vLLM", "at most 1,024 tokens, -100 to 100"),
        "min_p": _honoured("vLLM"),
        "stop": _honoured("vLLM", "at most 16 texts"),
        "stop_token_ids": _honoured("vLLM", "at most 64"),
        "include_stop_str_in_output": _honoured("vLLM"),
        "ignore_eos": _honoured("vLLM"),
        "structured_outputs": _honoured("vLLM", "as for completions"),
        "session_id": _honoured("vLLM", "a name for `POST /v1/sessions/close`"),
        "request_id": _honoured("vLLM", "returned in the header `x-request-id`"),
        "chat_template_kwargs": _honoured("vLLM", "variables of the template"),
        "cache_salt": _honoured("vLLM", "a separate part of the cache"),
        "priority": _honoured("vLLM", "as for completions"),
        "kv_transfer_params": _ignored("vLLM", "see `/control`"),
        "ec_transfer_params": _ignored("vLLM", "text only"),
        "media_io_kwargs": _ignored("vLLM", "text only"),
        "include_reasoning": _refused("vLLM", "always true", True),
        "skip_special_tokens": _refused("vLLM", "always true", True),
        "mm_payload": _ignored("vLLM", "text only"),
        "return_mm_kwargs": _ignored("vLLM", "text only"),
        "watermarking": _refused("vLLM", "not supported", False),
        "vllm_xargs": _refused("vLLM", "for custom samplers", {}),
        "mm_processor_kwargs": _ignored("vLLM", "text only"),
        "enable_response_messages": _refused("vLLM", "not supported", False),
        "previous_input_messages": _refused("vLLM", "put them into `input`", []),
    }
)
