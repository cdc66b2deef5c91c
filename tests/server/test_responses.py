"""OpenAI's Responses API: translation to a chat, output items, streams and errors."""

from __future__ import annotations

import json

import httpx
import pytest

from kvtier.server.agent_fields import RESPONSES_FIELDS
from kvtier.server.fields import HEADER
from kvtier.server.responses_api import ResponsesRequest
from scripted_model import make_scripted_model
from tiny_model import CHAT_TEMPLATE

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
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
QUESTION = "Will it rain in Paris?"


def ask(server, **fields):
    options = {"model": server.model, "input": QUESTION, "max_output_tokens": 64, "temperature": 0, **fields}
    return server.client().responses.create(**options)


def post(server, **fields) -> httpx.Response:
    return server.post(PATH, {"model": server.model, "input": QUESTION, "max_output_tokens": 4, **fields})


def shown(response) -> list[tuple]:
    """Return the type, the status and the content of each item of a response."""
    items = []
    for item in response.output:
        if item.type == "function_call":
            items.append((item.type, item.status, item.name, item.arguments))
        else:
            items.append((item.type, item.status, "".join(part.text for part in item.content)))
    return items


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """Yield a server whose model reasons and calls a tool."""
    from server_support import ServerProcess

    folder = tmp_path_factory.mktemp("scripted")
    make_scripted_model(folder, SCRIPT, CHAT_TEMPLATE + "{# <think> </think> <tool_call> #}")
    server = ServerProcess(folder / "log", "--model", str(folder), "--threads", "1")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log, server.log


def test_response_has_items_of_reasoning_text_and_call(scripted):
    response = ask(scripted, tools=[WEATHER])
    assert shown(response) == [
        ("reasoning", "completed", "The user wants rain."),
        ("message", "completed", "Let me look."),
        ("function_call", "completed", "weather", '{"city": "Paris"}'),
    ]
    assert (response.status, response.output_text, response.error) == ("completed", "Let me look.", None)
    usage = response.usage
    assert usage.output_tokens_details.reasoning_tokens == 3  # two texts of one token each, and the closing tag
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert len({item.id for item in response.output}) == 3


def test_streamed_response_equals_whole_response(scripted):
    whole = ask(scripted, tools=[WEATHER])
    events = list(ask(scripted, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in (*events[:2], events[-1])] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert shown(events[-1].response) == shown(whole)
    texts, open_items, done = {}, set(), []
    for event in events[2:-1]:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            open_items.add(event.item.id)
            assert event.output_index == len(done)
        elif kind == "output_item.done":
            open_items.remove(event.item.id)
            done.append(event.item)
        elif kind.endswith(".delta"):
            assert event.item_id in open_items
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        elif kind.endswith("text.done"):
            assert texts[event.item_id] == event.text
        elif kind == "function_call_arguments.done":
            assert texts[event.item_id] == event.arguments
    assert (done, open_items) == (events[-1].response.output, set())


def test_cut_response_is_incomplete(scripted):
    *_, last = ask(scripted, max_output_tokens=2, stream=True)
    for response in (ask(scripted, max_output_tokens=2), last.response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert shown(response)[-1][1] == "incomplete"


def test_stream_of_openai_client_returns_final_response(scripted):
    client = scripted.client()
    options = {"model": scripted.model, "input": QUESTION, "tools": [WEATHER], "temperature": 0}
    with client.responses.stream(**options) as stream:
        final = stream.get_final_response()
    assert shown(final) == shown(ask(scripted, tools=[WEATHER]))


@pytest.mark.parametrize("choice", [{"type": "function", "name": "weather"}, "required"])
def test_response_after_a_tool_result_contains_only_text(server, choice):
    pytest.importorskip("llguidance")
    first = ask(server, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    (call,) = first.output
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    history = [
        {"role": "user", "content": QUESTION},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    last = ask(server, input=history, tools=[WEATHER], tool_choice="none", max_output_tokens=5)
    assert [item.type for item in last.output] in (["message"], [])


def test_translated_input_equals_chat_messages(server):
    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"zone": "UTC"}'}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "clock", "arguments": {"zone": "UTC"}}
    chat = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "user", "content": "And?"},
    ]
    request = ResponsesRequest(model="tiny", input=items, instructions="Be brief.")
    assert [message.for_template() for message in request.to_chat().messages] == chat
    count = server.post("/tokenize", {"messages": chat}).json()["count"]
    assert post(server, input=items, instructions="Be brief.").json()["usage"]["input_tokens"] == count


def test_cached_tokens_of_a_response_are_reported(server):
    fields = {"instructions": "You read long texts. " * 40}
    first, second = (post(server, **fields).json()["usage"] for _ in range(2))
    assert second["input_tokens_details"]["cached_tokens"] >= first["input_tokens"] - 16


def test_schema_of_text_format_determines_the_text(server):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = ask(server, text={"format": format, "verbosity": "low"})
    assert json.loads(response.output_text)["a"] in (1, 2)
    assert response.text.format.schema_ == schema


def test_unsupported_tool_types_of_responses_are_skipped(server):
    tools = [{"type": "web_search"}, WEATHER, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}]
    answer = post(server, tools=tools, include=["reasoning.encrypted_content"], store=False)
    assert answer.headers[HEADER] == "include, store, tools.custom, tools.web_search"
    assert [tool["name"] for tool in answer.json()["tools"]] == ["weather"]
    assert answer.json()["usage"]["input_tokens"] == post(server, tools=[WEATHER]).json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": None}]}, "input.0.output"),
        ({"input": "long " * 3000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format.schema"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"stop": [""]}, "stop.0"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"inputs": "x"}, "inputs"),
    ],
)
def test_invalid_request_for_a_response_is_400_with_the_field(server, fields, param):
    answer = post(server, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
    assert param.split(".")[0] in error["message"]


def test_sampling_fields_of_vllm_apply_to_a_response(server):
    def text(**fields) -> str:
        return post(server, **fields).json()["output"][0]["content"][0]["text"]

    # Token 65 is "b".
    assert text(structured_outputs={"choice": ["only this"]}, max_output_tokens=20) == "only this"
    assert text(logit_bias={"65": 100}, ignore_eos=True, max_output_tokens=4, temperature=0) == "bbbb"
    found = text(
        logit_bias={"65": 100}, stop=["bb"], include_stop_str_in_output=True, max_output_tokens=4, temperature=0
    )
    assert found == "bb"


def test_request_id_of_a_response_is_returned_and_explained(server):
    answer = post(server, request_id="my-response", max_output_tokens=1)
    assert answer.headers["x-request-id"] == "my-response"
    assert server.get("/control/explain/my-response").json()["request_id"] == answer.json()["id"]


def test_honoured_fields_are_fields_of_responses_request():
    honoured = {name for name, field in RESPONSES_FIELDS.items() if field.kind == "honoured"}
    assert honoured | {"include"} == {*ResponsesRequest.model_fields}


def test_ignored_fields_of_responses_are_named_in_the_header(server):
    names = sorted(name for name, field in RESPONSES_FIELDS.items() if field.kind == "ignored")
    answer = post(server, **{**dict.fromkeys(names, "x"), "include": ["x"]})
    assert (answer.status_code, answer.headers[HEADER]) == (200, ", ".join(names))


def test_refused_fields_of_responses_are_400_with_their_name(server):
    for name, field in RESPONSES_FIELDS.items():
        if field.kind == "refused":
            assert post(server, **{name: {"other": 1}}).json()["error"]["param"] == name
            for value in (None, *field.neutral):
                assert post(server, **{name: value}).status_code == 200
