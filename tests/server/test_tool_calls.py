"""Tool calls and reasoning of a running server. A grammar forces the calls, or a scripted model writes them."""

from __future__ import annotations

import json
import shutil

import pytest

from scripted_model import make_scripted_model
from tiny_model import CHAT_TEMPLATE

pytest.importorskip("llguidance")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Paris", "Rome"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(server, **options):
    messages = options.pop("messages", [{"role": "user", "content": "Will it rain in Paris?"}])
    options = {"temperature": 0, "max_tokens": 300, "tools": TOOLS, **options}
    return server.client().chat.completions.create(model=server.model, messages=messages, **options)


def joined(stream):
    """Return the finish reason, the content, the reasoning and the calls of a stream with one choice."""
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, [call.id, call.function.name, ""])
            assert call.id in (None, known[0])
            known[2] += call.function.arguments
        reason = choice.finish_reason or reason
    return reason, content, reasoning, list(calls.values())


def parts(answer):
    """Return the finish reason, the content, the reasoning and the calls of an answer that was not streamed."""
    message = answer.choices[0].message
    calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    return answer.choices[0].finish_reason, message.content or "", getattr(message, "reasoning_content", ""), calls


def is_weather(arguments):
    value = json.loads(arguments)
    return value["city"] in ("Paris", "Rome") and 1 <= value["days"] <= 9 and len(value) == 2


def without_ids(found):
    return (*found[:3], [call[1:] for call in found[3]])


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}])
def test_named_tool_choice_forces_one_call_of_the_named_tool(server, options):
    whole, streamed = ask(server, tool_choice=NAMED, **options), ask(server, tool_choice=NAMED, stream=True, **options)
    reason, content, _, [(_, name, arguments)] = parts(whole)
    assert (reason, content, name) == ("tool_calls", "", "weather")
    assert whole.choices[0].message.content is None
    assert is_weather(arguments)
    assert without_ids(joined(streamed))[3] == [["weather", arguments]]


def test_required_tool_choice_forces_calls_that_fit_a_schema(server):
    limits = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5}
    names = set()
    for seed in range(16):
        answer = parts(ask(server, seed=seed, **limits))
        streamed = joined(ask(server, seed=seed, stream=True, **limits))
        [(_, name, arguments)] = answer[3]
        names.add(name)
        assert is_weather(arguments) if name == "weather" else json.loads(arguments) == {}
        assert answer[0] == "tool_calls"
        assert streamed[3][0][1:] == [name, arguments]
    assert names == {"weather", "clock"}


def test_chat_turn_after_a_tool_result_has_no_tool_call(server):
    messages = [{"role": "user", "content": "Will it rain?"}]
    call = ask(server, messages=messages, tool_choice=NAMED).choices[0].message
    messages += [
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "rain"},
    ]
    answer = ask(server, messages=messages, tool_choice="none", max_tokens=5)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": NAMED, "tools": TOOLS, "min_tokens": 3}, "min_tokens"),
        (
            {"tool_choice": NAMED, "tools": [{**WEATHER, "function": {"name": "weather", "parameters": {"type": 5}}}]},
            "tools",
        ),
    ],
)
def test_invalid_forced_call_is_400_with_the_field(server, fields, param):
    body = {"model": server.model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 5, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == param


@pytest.mark.parametrize(("choice", "stop"), [("required", "arguments"), (NAMED, '"city"')])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_cut_by_stop_text_finishes_with_stop(server, choice, stop, stream):
    body = {"model": server.model, "messages": [{"role": "user", "content": "?"}], "tools": [WEATHER]}
    answer = server.post("/v1/chat/completions", {**body, "tool_choice": choice, "stop": stop, "stream": stream})
    assert answer.status_code == 200
    reasons = {reason for reason in ("stop", "tool_calls") if f'"finish_reason":"{reason}"' in answer.text}
    assert reasons == {"stop"}


def test_cache_control_and_refusals_in_history_are_accepted(server):
    mark = {"cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": "Hello", **mark}]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    marked = {"messages": [{"role": "user", "content": content}, refusal], "tools": [{**WEATHER, **mark}]}
    plain = {
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "No."}],
        "tools": [WEATHER],
    }
    tokens = [server.post("/tokenize", body).json()["tokens"] for body in (marked, plain)]
    assert tokens[0] == tokens[1]


THINKING = CHAT_TEMPLATE + "{# <think> </think> <tool_call> #}"
CALLS = [
    "<think>",
    "\nThe user wants ",
    "the weather.\n",
    "</think>",
    "\n\nLet me look.",
    "\n<tool",
    '_call>\n{"name": "wea',
    'ther", "arguments": {"city": "Pa',
    'ris"}}\n</tool_',
    "call>",
    "\n<tool_call>\n",
    '{"name": "clock", "arguments": {}}',
    "\n</tool_call>",
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """Yield a server whose model reasons and calls two tools."""
    from server_support import ServerProcess

    folder = tmp_path_factory.mktemp("scripted")
    make_scripted_model(folder, CALLS, THINKING)
    server = ServerProcess(folder / "log", "--model", str(folder), "--threads", "1")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log, server.log


def test_calls_and_reasoning_of_a_model_are_parsed(scripted):
    found = parts(ask(scripted))
    expected = [["weather", '{"city": "Paris"}'], ["clock", "{}"]]
    assert without_ids(found) == ("tool_calls", "Let me look.", "The user wants the weather.", expected)
    assert without_ids(joined(ask(scripted, stream=True))) == without_ids(found)
    assert len({call[0] for call in found[3]}) == 2


def test_parallel_tool_calls_false_keeps_only_the_first_call(scripted):
    found = parts(ask(scripted, parallel_tool_calls=False))
    assert [call[1] for call in found[3]] == ["weather"]
    assert without_ids(joined(ask(scripted, parallel_tool_calls=False, stream=True))) == without_ids(found)


def test_tool_choice_none_returns_calls_as_content(scripted):
    reason, content, reasoning, calls = parts(ask(scripted, tool_choice="none"))
    assert (reason, reasoning, calls) == ("stop", "The user wants the weather.", [])
    assert content.startswith("Let me look.\n<tool_call>")


def test_logprobs_of_a_parsed_answer_cover_every_token(scripted):
    whole = ask(scripted, logprobs=True).choices[0].logprobs.content
    chunks = list(ask(scripted, logprobs=True, stream=True))
    streamed = [token for chunk in chunks for token in getattr(chunk.choices[0].logprobs, "content", None) or ()]
    assert [token.token for token in whole] == [token.token for token in streamed]
    assert [token.token for token in whole[: len(CALLS)]] == CALLS


def test_think_tag_in_prompt_makes_answer_start_as_reasoning(tmp_path, start):
    template = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    folder = make_scripted_model(
        tmp_path / "model", ["It is ", "easy.", "\n</think>\n", "Yes."], template + "{# </think> #}"
    )
    server = start("--model", str(folder))
    assert without_ids(parts(ask(server, tools=[])))[:3] == ("stop", "Yes.", "It is easy.")
    assert joined(ask(server, tools=[], stream=True))[1:3] == ("Yes.", "It is easy.")
    shutil.rmtree(folder)


def test_tool_template_is_used_only_with_tools(tmp_path):
    from kvtier.engine.tokenizer import load_tokenizer

    folder = make_scripted_model(tmp_path, ["Yes."])
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_text([]) == "plain"
    assert tokenizer.chat_text([], tools=[WEATHER]) == "with tools"


def test_arguments_in_history_reach_the_template_as_objects(server):
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    call["function"]["arguments"] = {"zone": "UTC"}
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == tokens
    call["function"]["arguments"] = '{"zone": '
    assert server.post("/tokenize", {"messages": messages}).status_code == 200
