"""Anthropic's Messages API: translation to a chat, content blocks, streams, errors, and billing lines in prompts."""

from __future__ import annotations

import json

import httpx
import pytest

from kvtier.server.agent_fields import MESSAGES_FIELDS
from kvtier.server.fields import HEADER
from kvtier.server.messages_api import CountTokensRequest, MessagesRequest
from scripted_model import make_scripted_model
from tiny_model import CHAT_TEMPLATE

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};"
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SCRIPT = [
    "<think>",
    "\nThe user wants ",
    "rain.\n",
    "</think>",
    "\n\nLet me look.",
    '\n<tool_call>\n{"name": "weather", ',
    '"arguments": {"city": "Pa',
    'ris"}}\n</tool_call>',
]
THINKING = CHAT_TEMPLATE + "{# <think> </think> <tool_call> #}"
USER = {"role": "user", "content": "Will it rain in Paris?"}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}


def body_of(server, **fields) -> dict:
    return {"model": server.model, "max_tokens": 64, "temperature": 0, "messages": [USER], **fields}


def ask(server, **fields) -> httpx.Response:
    return server.post(PATH, body_of(server, **fields))


def events(answer: httpx.Response) -> list[dict]:
    """Return the events of a stream. Check that the name of each event equals the type in its body."""
    found = []
    for text in filter(None, answer.text.split("\n\n")):
        name, _, data = text.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict]) -> dict:
    """Join the events of a stream into a message, and check the order of the events."""
    assert found[0]["type"] == "message_start"
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    message, texts, is_open = found[0]["message"], {}, False
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(message["content"]))
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
            kind = event["delta"].pop("type")
            assert kind in ("text_delta", "thinking_delta", "input_json_delta")
            (text,) = event["delta"].values()
            texts[event["index"]] = texts.get(event["index"], "") + text
        is_open = event["type"] != "content_block_stop"
    for index, text in texts.items():
        block = message["content"][index]
        key = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[key] = json.loads(text) if key == "input" else text
    return {**message, **found[-2]["delta"], "usage": found[-2]["usage"]}


def without_ids(message: dict) -> dict:
    for block in message["content"]:
        block.pop("id", None)
    return {key: value for key, value in message.items() if key not in ("id", "usage")}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """Yield a server that leaves billing lines in prompts. Its model reasons and calls a tool."""
    from server_support import ServerProcess

    folder = tmp_path_factory.mktemp("scripted")
    make_scripted_model(folder, SCRIPT, THINKING)
    server = ServerProcess(folder / "log", "--model", str(folder), "--threads", "1", "--keep-billing-line")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log, server.log


def test_message_has_blocks_of_thinking_text_and_tool_use(scripted):
    answer = ask(scripted, tools=[WEATHER]).json()
    thinking, text, call = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "The user wants rain.")
    assert text == {"type": "text", "text": "Let me look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert (answer["stop_reason"], answer["role"], answer["type"]) == ("tool_use", "assistant", "message")
    assert call["id"].startswith("toolu_")


def test_streamed_message_equals_whole_message(scripted):
    whole = without_ids(ask(scripted, tools=[WEATHER]).json())
    streamed = ask(scripted, tools=[WEATHER], stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert without_ids(joined(events(streamed))) == whole


def test_stop_sequence_ends_the_message_and_is_reported(scripted):
    answer = ask(scripted, stop_sequences=["zzz", "me"]).json()
    assert answer["content"][-1] == {"type": "text", "text": "Let "}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "me")
    streamed = joined(events(ask(scripted, stop_sequences=["zzz", "me"], stream=True)))
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == ("stop_sequence", "me")


def test_stop_sequence_in_a_tool_call_is_the_stop_reason(scripted):
    """The tool call is incomplete. If the stop reason were `tool_use`, the client would run the call."""
    message = ask(scripted, tools=[WEATHER], stop_sequences=["Pa"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Pa")
    assert message["content"][-1]["type"] == "tool_use"


def test_cut_message_has_stop_reason_max_tokens(scripted):
    answer = ask(scripted, max_tokens=2).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert answer["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}])
def test_message_after_a_tool_result_contains_only_text(server, choice):
    pytest.importorskip("llguidance")
    answer = ask(server, tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True}).json()
    (call,) = answer["content"]
    assert (call["name"], call["input"]["city"] in ("Paris", "Rome")) == ("weather", True)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    turns = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    last = ask(server, messages=turns, tools=[WEATHER], tool_choice={"type": "none"}, max_tokens=5).json()
    assert [block["type"] for block in last["content"]] in (["text"], [])


def test_usage_separates_cached_tokens_from_input_tokens(server):
    system = "You read long texts. " * 40
    first, second = (ask(server, system=system, max_tokens=1).json()["usage"] for _ in range(2))
    total = server.post(COUNT, {"model": server.model, "system": system, "messages": [USER]}).json()["input_tokens"]
    for usage in (first, second):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == total
    assert second["cache_read_input_tokens"] >= total - 16
    start = events(ask(server, system=system, max_tokens=1, stream=True))[0]["message"]["usage"]
    assert start["cache_read_input_tokens"] == second["cache_read_input_tokens"]


def test_translated_conversation_has_as_many_tokens_as_chat(server):
    call = {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "UTC"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Wait."}, call]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "noon", "is_error": True},
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    function = {"name": "clock", "arguments": {"zone": "UTC"}}
    chat = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: noon"},
        {"role": "user", "content": "And?"},
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    counted = server.post(COUNT, {"model": server.model, "messages": turns, "system": system}).json()
    assert counted == {"input_tokens": server.post("/tokenize", {"messages": chat}).json()["count"]}


def test_final_assistant_message_is_continued(scripted):
    """The scripted model starts its script after a line feed, so the message to continue ends with a line feed."""
    turns = [USER, {"role": "assistant", "content": "It is\n"}]
    counts = [
        scripted.post(COUNT, {"model": scripted.model, "messages": messages}).json()["input_tokens"]
        for messages in (turns, [USER])
    ]
    assert counts[0] - counts[1] == len("It is\n")
    assert ask(scripted, messages=turns).json()["content"][0]["thinking"] == "The user wants rain."


@pytest.mark.parametrize("keeps", [False, True])
def test_billing_line_is_removed_unless_the_option_keeps_it(request, keeps):
    server = request.getfixturevalue("scripted" if keeps else "server")
    answers = []
    for number in range(2):
        blocks = [
            {"type": "text", "text": BILLING.format(number)},
            {"type": "text", "text": "You are a coding agent. " * 20},
        ]
        answers.append(ask(server, system=blocks, max_tokens=1))
    cached = answers[1].json()["usage"]["cache_read_input_tokens"]
    assert cached < 100 if keeps else cached > 400
    explained = server.get(f"/control/explain/{answers[1].headers['request-id']}").json()
    assert ["billing line" in note for note in explained["notes"]] == [True]
    assert ("--keep-billing-line" in explained["notes"][0]) == keeps
    recent = {record["id"]: record["explanation"] for record in server.state()["recent"]}
    assert "billing line" in recent[answers[1].headers["request-id"]]


def test_billing_line_in_chat_requests_is_removed(server):
    chat = [{"role": "system", "content": BILLING.format(1) + "\n\nBe kind."}, USER]
    answers = [
        server.post("/v1/chat/completions", {"model": server.model, "messages": messages, "max_tokens": 1}).json()
        for messages in (chat, [{"role": "system", "content": "Be kind."}, USER], [chat[0], USER])
    ]
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    only = [{"role": "system", "content": BILLING.format(1)}, USER]
    answer = server.post("/v1/chat/completions", {"model": server.model, "messages": only, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] < answers[0]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}, USER]}, "messages.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages.0.content.0.thinking"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format.schema"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokenz": 5}, "max_tokenz"),
    ],
)
def test_invalid_message_is_400_in_anthropics_format(server, fields, param):
    answer = ask(server, **fields)
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert found["error"]["param"] == param, found
    assert param.split(".")[0] in found["error"]["message"]


def test_unknown_model_is_404_in_anthropics_format(server):
    answer = ask(server, model="claude")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_schema_of_output_config_determines_the_text(server):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for fields in ({"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}},):
        (text,) = ask(server, **fields).json()["content"]
        assert json.loads(text["text"])["a"] in (1, 2)


def test_tools_of_other_types_are_skipped_and_named(server):
    tools = [{"type": "web_search_20250305", "name": "web_search"}, WEATHER]
    answer = ask(server, tools=tools, max_tokens=1, metadata={"user_id": "x"})
    assert answer.headers[HEADER] == "metadata, tools.web_search_20250305"
    counts = [
        server.post(COUNT, {"model": server.model, "messages": [USER], "tools": each}).json()["input_tokens"]
        for each in (tools, [WEATHER])
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("kind", "expected"), [(None, False), ("disabled", False), ("enabled", True)])
def test_thinking_sets_variable_of_chat_template(kind, expected):
    thinking = {"type": kind, "budget_tokens": 1024} if kind else None
    request = MessagesRequest(model="tiny", max_tokens=1, messages=[USER], thinking=thinking)
    assert request.to_chat().chat_template_kwargs == {"enable_thinking": expected}


def test_large_message_is_prepared_in_a_worker_process(server):
    text = "word " * 400  # a body of more than 2 KiB, and a prompt of fewer than CONTEXT tokens
    assert ask(server, messages=[{"role": "user", "content": text}], max_tokens=1).status_code == 200
    error = ask(server, messages=[{"role": "user", "content": text}], tools=[{"name": "x"}]).json()["error"]
    assert error["param"] == "tools.0"


def test_api_key_is_accepted_in_x_api_key_and_authorization(start):
    server = start("--host", "127.0.0.1", env={"KVTIER_API_KEY": "key-of-a-tenant"})
    for headers in ({"x-api-key": "key-of-a-tenant"}, {"authorization": "Bearer key-of-a-tenant"}):
        answer = server.post(PATH, headers=headers, json=body_of(server, max_tokens=1))
        assert answer.status_code == 200, answer.text
    for headers in ({}, {"x-api-key": "other"}, {"x-api-key": "key-of-a-tenant", "authorization": "Bearer other"}):
        answer = server.post(PATH, headers=headers, json=body_of(server))
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


def test_honoured_fields_are_fields_of_messages_request():
    honoured = {name for name, field in MESSAGES_FIELDS.items() if field.kind == "honoured"}
    assert honoured == {*MessagesRequest.model_fields}
    assert {*CountTokensRequest.model_fields} <= honoured


def test_ignored_fields_of_messages_are_named_in_the_header(server):
    names = sorted(name for name, field in MESSAGES_FIELDS.items() if field.kind == "ignored")
    answer = ask(server, max_tokens=1, **dict.fromkeys(names, "x"))
    assert (answer.status_code, answer.headers[HEADER]) == (200, ", ".join(names))


def test_refused_fields_of_messages_are_400_with_their_name(server):
    for name, field in MESSAGES_FIELDS.items():
        if field.kind == "refused":
            assert ask(server, **{name: {"other": 1}}).json()["error"]["param"] == name
            for value in (None, *field.neutral):
                assert ask(server, max_tokens=1, **{name: value}).status_code == 200
