"""Completions of a server, read with OpenAI's client, equal the outputs of an engine in this process."""

from __future__ import annotations

import asyncio
import json
import uuid

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.engine.llm import LLM
from kvtier.engine.sampling import SamplingParams
from tiny_model import CONTEXT

HELLO = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module")
def llm(tiny_model):
    """Yield an LLM with the model of the server. The LLM computes the expected outputs in this process."""
    instance = LLM(tiny_model)
    yield instance
    instance.close()


def fresh(text: str = "Hello") -> list[dict[str, str]]:
    """Return a conversation that no other test sends."""
    return [{"role": "user", "content": f"{uuid.uuid4()} {text}"}]


def test_chat_completion_equals_the_engine_output(server, llm):
    answer = server.client().chat.completions.create(
        model=server.model, messages=HELLO, temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
    )
    expected = llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == expected.num_prompt_tokens + 20
    assert answer.model == server.model == "tiny"


def test_chat_stream_pieces_join_to_the_whole_answer(server, llm):
    options = {"model": server.model, "messages": HELLO, "temperature": 0, "max_tokens": 30}
    chunks = list(server.client().chat.completions.create(**options, stream=True, extra_body={"ignore_eos": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)).text
    assert len(chunks) > 2  # on busy cores, one chunk may contain several tokens


def test_stream_consists_of_server_sent_events(server):
    body = {"model": server.model, "messages": HELLO, "max_tokens": 5, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-request-id"].startswith("chatcmpl-")
        events = b"".join(answer.iter_raw()).split(b"\n\n")
    assert events[-1] == b""
    assert events[-2] == b"data: [DONE]"
    for event in events[:-2]:
        assert event.startswith(b"data: {")
        assert b"\n" not in event
        assert json.loads(event[6:])["object"] == "chat.completion.chunk"


def test_stream_with_include_usage_ends_with_usage(server):
    chunks = list(
        server.client().chat.completions.create(
            model=server.model, messages=HELLO, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens <= 4


def test_repeated_prompt_is_cached_per_salt(server):
    messages = fresh("x" * 200)
    client = server.client()

    def cached(**extra):
        answer = client.chat.completions.create(model=server.model, messages=messages, max_tokens=2, extra_body=extra)
        assert answer.usage.prompt_tokens > 200
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached() < 64  # other tests may have cached the text that the chat template puts before the message
    assert cached() > 200
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 200
    assert cached(cache_salt="yours") == 0


def test_n_choices_with_a_seed_are_reproducible(server):
    def texts(**options):
        answer = server.client().chat.completions.create(
            model=server.model, messages=HELLO, n=3, seed=7, temperature=1.0, max_tokens=8, **options
        )
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_streamed_choices_equal_choices_of_whole_response(server):
    pieces = {0: "", 1: ""}
    ends = []
    for chunk in server.client().chat.completions.create(
        model=server.model, messages=HELLO, n=2, seed=3, max_tokens=8, stream=True, extra_body={"ignore_eos": True}
    ):
        choice = chunk.choices[0]
        pieces[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert sorted(ends) == [0, 1]
    whole = server.client().chat.completions.create(
        model=server.model, messages=HELLO, n=2, seed=3, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert [pieces[0], pieces[1]] == [choice.message.content for choice in whole.choices]


def test_answer_ends_before_the_stop_text(server):
    options = {"model": server.model, "prompt": "abc", "temperature": 0, "max_tokens": 40}
    whole = server.client().completions.create(**options).choices[0].text
    stop = whole[10:12]
    cut = server.client().completions.create(**options, stop=[stop, "not in the answer"])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = server.client().completions.create(**options, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[: whole.index(stop)]


def test_chat_logprobs_equal_the_engine_logprobs(server, llm):
    answer = server.client().chat.completions.create(
        model=server.model, messages=HELLO, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    expected = llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    content = answer.choices[0].logprobs.content
    assert [each.logprob for each in content] == pytest.approx([each.chosen for each in expected.logprobs], abs=1e-3)
    for each, engine in zip(content, expected.logprobs, strict=True):
        assert [top.logprob for top in each.top_logprobs] == pytest.approx([value for _, value in engine.top], abs=1e-3)
        assert each.top_logprobs[0].token == each.token  # at temperature 0, the most likely token is chosen
        # If a token is only part of a character, `token` contains the bytes as escapes such as \xc3.
        assert bytes(each.bytes).decode(errors="backslashreplace") == each.token
    chunks = server.client().chat.completions.create(
        model=server.model, messages=HELLO, temperature=0, max_tokens=6, logprobs=True, stream=True
    )
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in content]


def test_completion_accepts_text_or_tokens_or_list_of_prompts(server, llm):
    complete = server.client().completions.create
    options = {"model": server.model, "temperature": 0, "max_tokens": 6}
    one = complete(prompt="One", **options).choices[0].text
    two = complete(prompt="Two", **options).choices[0].text
    tokens = llm.tokenizer.encode("One"), llm.tokenizer.encode("Two")
    assert complete(prompt=tokens[0], **options).choices[0].text == one
    both = complete(prompt=["One", "Two"], **options)
    assert [choice.text for choice in both.choices] == [one, two]
    assert both.usage.prompt_tokens == sum(map(len, tokens))
    assert [choice.text for choice in complete(prompt=list(tokens), **options).choices] == [one, two]
    pieces = ["", ""]
    for chunk in complete(prompt=["One", "Two"], stream=True, **options):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [one, two]


def test_completion_logprobs_have_the_legacy_form(server):
    answer = server.client().completions.create(
        model=server.model, prompt="One", temperature=0, max_tokens=5, logprobs=2
    )
    result = answer.choices[0].logprobs
    assert len(result.tokens) == len(result.token_logprobs) == len(result.top_logprobs) == len(result.text_offset)
    assert result.text_offset[0] == 0
    for token, value, top in zip(result.tokens, result.token_logprobs, result.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(value)
        assert token in top


def test_tools_are_rendered_by_the_chat_template(server):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    create = server.client().chat.completions.create
    options = {"model": server.model, "messages": HELLO, "max_tokens": 1}
    bare = create(**options).usage.prompt_tokens
    num_added = len("<tools>[]</tools>") + len(json.dumps(tool))  # the tiny model has one token per byte
    assert create(**options, tools=[tool]).usage.prompt_tokens == bare + num_added
    assert create(**options, tools=[tool], tool_choice="none").usage.prompt_tokens == bare


def test_text_parts_are_joined_and_tool_calls_are_rendered(server):
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "who are you?"}]}
    ]
    count = lambda messages: server.post("/tokenize", {"messages": messages}).json()["count"]  # noqa: E731
    assert count(parts) == count(HELLO)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with_call = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    empty = [*HELLO, {"role": "assistant", "content": ""}]
    rendered = json.dumps([call]).replace('"{}"', "{}")  # templates get the arguments as an object
    assert count(with_call) == count(empty) + len(rendered)  # one token per byte


def test_other_endpoints_return_expected_values(server, llm):
    assert [model.id for model in server.client().models.list()] == ["tiny"]
    assert server.client().models.retrieve("tiny").max_model_len == CONTEXT
    assert server.post("/tokenize", {"prompt": "Grüße"}).json()["tokens"] == llm.tokenizer.encode("Grüße")
    assert server.post("/tokenize", {"messages": HELLO}).json()["tokens"] == llm.tokenizer.encode_chat(HELLO)
    assert server.get("/health").json() == {"status": "ok"}
    before = server.state()["hits"]["queried_tokens"]
    server.client().completions.create(model=server.model, prompt="Once", max_tokens=1)
    assert server.state()["hits"]["queried_tokens"] == before + len("Once")  # one token per byte
    answer = server.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    (total,) = [sample for sample in families["kvtier_tokens"].samples if sample.labels == {"kind": "prompt"}]
    assert total.value >= 4
    assert families["kvtier_ttft_seconds"].type == "histogram"


def test_explain_returns_the_result_of_a_request(server):
    messages = fresh("y" * 100)
    answer = server.client().chat.completions.create(model=server.model, messages=messages, max_tokens=3)
    explanation = server.get(f"/control/explain/{answer.id}").json()
    assert explanation["request_id"] == answer.id
    assert explanation["num_prompt_tokens"] == answer.usage.prompt_tokens
    recent = {each["id"]: each for each in server.state()["recent"]}
    assert recent[answer.id]["explanation"] == explanation["miss"] != ""
    assert server.get("/control/explain/unknown").status_code == 404


def test_64_concurrent_clients_get_correct_answers(server, llm):
    prompts = [f"Client {number} says {'la' * (number % 7)}" for number in range(64)]
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), progress=False)

    async def ask(client, number):
        options = {"model": server.model, "prompt": prompts[number], "temperature": 0, "max_tokens": 16}
        options["extra_body"] = {"ignore_eos": True}
        if number % 2:
            return (await client.completions.create(**options)).choices[0].text
        stream = await client.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once():
        async with server.async_client() as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(all_at_once()) == [answers[0].text for answers in expected]


def test_openapi_spec_lists_the_paths_of_the_server(server):
    spec = server.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health", "/state"} <= {
        *spec["paths"]
    }
    assert "422" not in spec["paths"]["/v1/completions"]["post"]["responses"]


def test_openai_client_raises_its_own_exceptions(server):
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-5'"):
        server.client().chat.completions.create(model="gpt-5", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model=server.model, messages=HELLO, max_tokens=10**6)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "context_length_exceeded"
