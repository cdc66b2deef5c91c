"""Clients and agent frameworks complete a tool loop of two turns: a forced call with its result, then an answer.

Some of them also return structured output.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

NEEDED = ("openai", "anthropic", "litellm", "langchain_openai", "instructor", "pydantic_ai", "agents")
if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"needs the clients {', '.join(missing)}: make test-clients", allow_module_level=True)

QUESTION, ANSWER = "Will it rain?", "It will rain."
CITIES = ("Paris", "Rome")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Return the weather in a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "weather"}}


class Weather(BaseModel):
    """A question about the weather in a city."""

    model_config = ConfigDict(extra="forbid")  # otherwise the model keeps adding fields
    city: Literal["Paris", "Rome"]


class Report(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    rain: bool


def test_openai_chat_completes_a_tool_loop(server):
    import openai

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=f"{server}/v1", api_key="-", max_retries=0) as client:
        create, options = client.chat.completions.create, {"model": "tiny", "tools": [TOOL], "temperature": 0}
        message = create(messages=messages, tool_choice=NAMED, **options).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        last = create(messages=messages, tool_choice="none", max_tokens=8, **options).choices[0]
    assert (last.finish_reason, last.message.content, last.message.tool_calls) == ("stop", ANSWER, None)


def test_openai_responses_completes_a_tool_loop(server):
    import openai

    items: list[Any] = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"model": "tiny", "tools": [{"type": "function", **FUNCTION}], "temperature": 0}
    with openai.OpenAI(base_url=f"{server}/v1", api_key="-", max_retries=0) as client:
        choice = {"type": "function", "name": "weather"}
        with client.responses.stream(input=items, tool_choice=choice, **options) as stream:
            first = stream.get_final_response()
        (call,) = first.output
        assert json.loads(call.arguments)["city"] in CITIES
        items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        last = client.responses.create(input=items, tool_choice="none", max_output_tokens=8, **options)
    assert (last.status, last.output_text) == ("completed", ANSWER)


def test_anthropic_completes_a_tool_loop(server):
    import anthropic

    tool = {"name": "weather", "description": "Return the weather in a city.", "input_schema": SCHEMA}
    options: dict[str, Any] = {"model": "tiny", "tools": [tool], "system": "You know the weather."}
    greedy = {"extra_body": {"temperature": 0}}
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=server, api_key="-", max_retries=0) as client:
        choice = {"type": "tool", "name": "weather"}
        with client.messages.stream(messages=turns, tool_choice=choice, max_tokens=256, **options) as stream:
            first = stream.get_final_message()
        (call,) = first.content
        assert (first.stop_reason, call.name, call.input["city"] in CITIES) == ("tool_use", "weather", True)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=turns, tool_choice={"type": "none"}, max_tokens=8, **options, **greedy)
        counted = client.messages.count_tokens(messages=turns, tool_choice={"type": "none"}, **options)
    assert (last.stop_reason, [block.text for block in last.content]) == ("end_turn", [ANSWER])
    assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_completes_a_tool_loop(server, provider):
    import litellm

    address = f"{server}/v1" if provider == "openai" else server
    options = {"model": f"{provider}/tiny", "api_base": address, "api_key": "-", "tools": [TOOL], "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = litellm.completion(messages=messages, tool_choice=NAMED, max_tokens=256, **options).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    last = litellm.completion(messages=messages, tool_choice="none", max_tokens=8, **options).choices[0]
    assert (last.finish_reason, last.message.content, last.message.tool_calls) == ("stop", ANSWER, None)


def test_langchain_completes_a_tool_loop(server):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{server}/v1", api_key="-", temperature=0, max_retries=0, max_tokens=256)
    messages: list[Any] = [HumanMessage(QUESTION)]
    messages.append(model.bind_tools([Weather], tool_choice="Weather").invoke(messages))
    (call,) = messages[-1].tool_calls
    assert call["args"]["city"] in CITIES
    messages.append(ToolMessage("rain", tool_call_id=call["id"]))
    last = model.bind_tools([Weather], tool_choice="none").invoke(messages)
    assert (last.tool_calls, last.content) == ([], ANSWER)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_returns_structured_output(server, method):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{server}/v1", api_key="-", temperature=0, max_retries=0, max_tokens=256)
    report = model.with_structured_output(Report, method=method).invoke(QUESTION)
    assert report.city in CITIES


def test_instructor_completes_a_tool_loop(server):
    import instructor
    import openai

    with openai.OpenAI(base_url=f"{server}/v1", api_key="-", max_retries=0) as base:
        client = instructor.from_openai(base, mode=instructor.Mode.TOOLS)
        options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_retries": 0, "max_tokens": 256}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        create = client.chat.completions.create_with_completion
        weather, raw = create(messages=messages, response_model=Weather, **options)
        message = raw.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"rain in {weather.city}"}
        messages += [{**message.model_dump(exclude_none=True), "content": ""}, result]
        report, _ = create(messages=messages, response_model=Report, **options)
    assert (weather.city in CITIES, report.city in CITIES) == (True, True)


def test_pydantic_ai_completes_a_tool_loop(server):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked: list[str] = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather in a city."""
        asked.append(city)
        return "rain"

    def settings(_: Any) -> dict[str, Any]:
        choice = "none" if asked else "required"
        return {"temperature": 0.0, "max_tokens": 256, "parallel_tool_calls": False, "tool_choice": choice}

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{server}/v1", api_key="-"))
    agent = Agent(model, tools=[weather], model_settings=settings)
    assert (agent.run_sync(QUESTION).output, len(asked)) == (ANSWER, 1)


def test_pydantic_ai_returns_structured_output(server):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{server}/v1", api_key="-"))
    settings = {"temperature": 0.0, "max_tokens": 256, "parallel_tool_calls": False}
    report = Agent(model, output_type=Report, model_settings=settings).run_sync(QUESTION).output
    assert report.city in CITIES


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_openai_agents_complete_a_tool_loop(server, api):
    import agents
    import openai

    asked: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather in a city."""
        asked.append(city)
        return "rain"

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="-", max_retries=0)
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    settings = agents.ModelSettings(tool_choice="weather", temperature=0.0, max_tokens=256, parallel_tool_calls=False)
    agent = agents.Agent(
        name="forecaster",
        instructions="You know the weather.",
        tools=[weather],
        model=kind(model="tiny", openai_client=client),
        model_settings=settings,
    )
    result = agents.Runner.run_sync(agent, QUESTION)
    assert (len(asked), result.final_output) == (1, ANSWER)
