"""Request fields of OpenAI and vLLM are honoured, ignored or refused.

A header of the response lists ignored fields. An error names a refused field.
"""

from __future__ import annotations

import json

import httpx
import pytest

from kvtier.server.agent_fields import RESPONSES_FIELDS
from kvtier.server.fields import FIELDS, HEADER
from kvtier.server.protocol import ChatRequest, CompletionRequest, StreamOptions

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    TEXT: {"prompt": "Hello", "max_tokens": 1},
}
PLACES = {CHAT: "c", TEXT: "t"}
"""The letters of the endpoints in `ApiField.places`."""
VALUES = {"store": True, "metadata": {"a": "b"}}
"""Values for those ignored fields that require a type. The other ignored fields accept any value."""


def send(server, path: str, **fields) -> httpx.Response:
    return server.post(path, {"model": server.model, **BODIES[path], **fields})


def of_kind(kind: str, path: str) -> list[str]:
    return [name for name, field in FIELDS.items() if field.kind == kind and PLACES[path] in field.places]


def of_place(place: str) -> set[str]:
    return {name for name, field in FIELDS.items() if place in field.places}


def events(answer: httpx.Response) -> list[dict]:
    lines = answer.text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
def test_table_has_every_field_of_the_openai_client(api):
    from openai.types import completion_create_params, responses
    from openai.types.chat import completion_create_params as chat_params

    params, table = {
        "chat": (chat_params.CompletionCreateParamsBase, of_place("c")),
        "completions": (completion_create_params.CompletionCreateParamsBase, of_place("t")),
        "responses": (responses.response_create_params.ResponseCreateParamsBase, {*RESPONSES_FIELDS}),
    }[api]
    fields = {*params.__required_keys__, *params.__optional_keys__, "stream"}
    assert len(fields) > 15
    assert fields <= table


@pytest.mark.parametrize(("path", "model"), [(CHAT, ChatRequest), (TEXT, CompletionRequest)])
def test_honoured_fields_are_fields_of_the_request_class(path, model):
    honoured = {name for name in of_kind("honoured", path) if "." not in name}
    assert honoured == {name for name in model.model_fields if FIELDS[name].kind == "honoured"}
    assert {*model.model_fields} <= {*FIELDS}
    nested = {name.partition(".")[2] for name in FIELDS if name.startswith("stream_options.")}
    assert nested == {*StreamOptions.model_fields}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_ignored_fields_are_accepted_and_named_in_header(server, path):
    names = [name for name in of_kind("ignored", path) if "." not in name]
    answer = send(server, path, **{name: VALUES.get(name, "x") for name in names})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == ", ".join(sorted(names))
    assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_refused_field_is_400_with_its_name(server, path):
    for name in of_kind("refused", path):
        error = send(server, path, **{name: {"other": [1]}}).json()["error"]
        assert (error["param"], name in error["message"]) == (name, True), error


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_refused_field_with_neutral_value_is_accepted(server, path):
    for name in of_kind("refused", path):
        for value in (None, *FIELDS[name].neutral):
            answer = send(server, path, **{name: value})
            assert (answer.status_code, HEADER in answer.headers) == (200, False), (name, value, answer.text)


def test_unknown_field_is_400_with_nearest_name(server):
    error = send(server, CHAT, prompt_cache_kee="x").json()["error"]
    assert (error["param"], error["code"]) == ("prompt_cache_kee", "extra_forbidden")
    assert "did you mean prompt_cache_key?" in error["message"]


def test_field_of_other_endpoint_is_400(server):
    assert send(server, CHAT, prompt="x").json()["error"]["param"] == "prompt"
    assert send(server, CHAT, suffix="x").json()["error"]["param"] == "suffix"
    assert send(server, TEXT, tools=[]).json()["error"]["param"] == "tools"


def test_body_with_too_many_fields_is_400(server):
    unknown = {f"field{number}": 1 for number in range(70)}
    answer = send(server, CHAT, verbosity="low", **unknown)
    assert answer.status_code == 400
    assert "the limit is 64" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stream_with_continuous_usage_has_usage_in_all_events(server, path):
    options = {"continuous_usage_stats": True, "include_usage": True, "include_obfuscation": True}
    more = {"ignore_eos": True, "temperature": 0}
    answer = send(server, path, stream=True, stream_options=options, **more, max_tokens=4)
    assert answer.headers[HEADER] == "stream_options.include_obfuscation"
    counts = [event["usage"]["completion_tokens"] for event in events(answer)]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert events(answer)[-1]["choices"] == []


def test_stop_text_is_included_on_request(server):
    fields = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    text = send(server, TEXT, **fields).json()["choices"][0]["text"]
    stop = text[3:6]
    fields |= {"stop": [stop]}
    for stream in (False, True):
        answers = [
            send(server, TEXT, **fields, include_stop_str_in_output=shown, stream=stream) for shown in (False, True)
        ]
        found = [
            "".join(each["choices"][0]["text"] for each in (events(answer) if stream else [answer.json()]))
            for answer in answers
        ]
        assert found == [text[: text.index(stop)], text[: text.index(stop)] + stop]


def test_prompt_is_truncated_to_its_last_tokens(server):
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    whole = send(server, TEXT, **fields | {"prompt": "Hello"}).json()
    cut = send(server, TEXT, **fields | {"prompt": "xyz Hello"}, truncate_prompt_tokens=5).json()
    assert cut["choices"][0]["text"] == whole["choices"][0]["text"]
    assert cut["usage"]["prompt_tokens"] == 5
    assert send(server, CHAT, truncate_prompt_tokens=5).json()["usage"]["prompt_tokens"] == 5
    assert send(server, TEXT, truncate_prompt_tokens=0).json()["error"]["param"] == "truncate_prompt_tokens"


def test_tokens_in_logprobs_are_named_by_id_on_request(server):
    answer = send(server, TEXT, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True).json()["choices"][0]
    assert answer["logprobs"]["tokens"] == [f"token_id:{token}" for token in answer["token_ids"]]
    assert all(name.startswith("token_id:") for name in answer["logprobs"]["top_logprobs"][0])
    chat = send(server, CHAT, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True).json()["choices"][
        0
    ]
    assert [each["token"] for each in chat["logprobs"]["content"]] == [
        f"token_id:{token}" for token in chat["token_ids"]
    ]
