"""`echo`, `prompt_logprobs` and `return_token_ids` over HTTP. Log-probabilities equal those of transformers."""

from __future__ import annotations

import json
import uuid

import numpy as np
import pytest
import torch

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def oracle(tiny_model):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def logprobs_of(oracle, tokens):
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1).numpy()


def complete(server, **fields):
    answer = server.post(TEXT, {"model": server.model, "temperature": 0, "max_tokens": 1, "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(server, text):
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def text_of(length=150):
    return (f"{uuid.uuid4()} né " * 9)[:length]


def test_echo_logprobs_of_cached_prompt_equal_transformers(server, oracle):
    """Use the same fields as lm-evaluation-harness, which compares each log-probability with the highest one."""
    text = text_of()
    tokens = tokens_of(server, text)
    complete(server, prompt=tokens)  # fills the cache
    for prompt in (text, tokens, tokens):
        body = complete(server, prompt=prompt, echo=True, logprobs=1)
        (choice,) = body["choices"]
        assert choice["text"].startswith(text)
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(tokens) + 1
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        np.testing.assert_allclose(found["token_logprobs"][1:-1], logprobs_of(oracle, tokens), atol=1e-4)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        assert all(value <= most for value, most in zip(found["token_logprobs"][1:], best, strict=True))
        assert found["token_logprobs"][-1] == best[-1]
        assert found["text_offset"][-1] == len(text)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # all tokens are computed for their logits


def test_prompt_logprobs_start_uses_cache_for_earlier_tokens(server, oracle):
    tokens = tokens_of(server, text_of())
    whole = complete(server, prompt=tokens, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    body = complete(server, prompt=tokens, prompt_logprobs=2, prompt_logprobs_start=100)
    later = body["choices"][0]["prompt_logprobs"]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 99  # the logits of token 99 predict token 100
    assert later[:100] == [None] * 100
    exact = logprobs_of(oracle, tokens)
    for entries, first in ((whole, 1), (later, 100)):
        chosen = [entry[str(token)]["logprob"] for token, entry in zip(tokens[first:], entries[first:], strict=True)]
        np.testing.assert_allclose(chosen, exact[first - 1 :], atol=1e-4)
        assert {entry["rank"] for each in entries[first:] for entry in each.values()} >= {1, 2}
        assert all(2 <= len(entry) <= 3 for entry in entries[first:])


def test_echo_of_n_answers_repeats_prompt_in_each(server):
    tokens, text = tokens_of(server, "Once upon a time"), "Once upon a time"
    body = complete(server, prompt=[text, text + "!"], n=2, temperature=1, echo=True, logprobs=0, max_tokens=3)
    scores = [choice["logprobs"]["token_logprobs"] for choice in body["choices"]]
    assert [choice["text"][: len(text)] for choice in body["choices"]] == [text] * 4
    assert [len(each) for each in scores] == [len(tokens) + 3] * 2 + [len(tokens) + 4] * 2
    assert scores[0][: len(tokens)] == scores[1][: len(tokens)]
    assert scores[2][: len(tokens) + 1] == scores[3][: len(tokens) + 1]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_streamed_echo_equals_echo_in_whole_response(server, logprobs, max_tokens):
    fields = {"prompt": text_of(), "echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
    whole = complete(server, **fields)
    body = {"model": server.model, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    lines = server.post(TEXT, body).text.split("\n\n")
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    (expected,) = whole["choices"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert choices[-1]["finish_reason"] == expected["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == max_tokens
    if logprobs is not None:
        for name, values in expected["logprobs"].items():
            joined = [value for choice in choices for value in choice["logprobs"][name]]
            if name.endswith("_logprobs"):
                assert len(joined) == len(values)
            else:
                assert joined == values
        joined = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
        np.testing.assert_allclose(joined[1:], expected["logprobs"]["token_logprobs"][1:], atol=1e-4)


def test_max_tokens_0_with_echo_returns_only_the_prompt(server):
    body = complete(server, prompt="Once upon", echo=True, max_tokens=0)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("Once upon", "length")
    assert body["usage"]["completion_tokens"] == 0
    one = complete(server, prompt=[65], prompt_logprobs=0, max_tokens=0)["choices"][0]
    assert (one["text"], one["prompt_logprobs"]) == ("", [None])


def test_chat_prompt_logprobs_are_in_the_response(server, oracle):
    messages = [{"role": "user", "content": f"Hello {uuid.uuid4()}"}]
    fields = {"model": server.model, "messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    body = server.post(CHAT, {**fields, "prompt_logprobs": 0, "return_token_ids": True}).json()
    tokens = body["prompt_token_ids"]
    assert tokens == server.post("/tokenize", {"messages": messages}).json()["tokens"]
    chosen = [
        entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], body["prompt_logprobs"][1:], strict=True)
    ]
    np.testing.assert_allclose(chosen, logprobs_of(oracle, tokens), atol=1e-4)
    assert len(body["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_streamed_token_ids_equal_token_ids_of_whole_response(server, path):
    prompt = {"messages": [{"role": "user", "content": "Hé"}]} if path == CHAT else {"prompt": "Hé"}
    fields = {"model": server.model, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **prompt}
    whole = server.post(path, fields | {"ignore_eos": True}).json()
    lines = server.post(path, fields | {"ignore_eos": True, "stream": True}).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    joined = [token for event in events for token in event["choices"][0].get("token_ids", ())]
    assert joined == whole["choices"][0]["token_ids"]
    assert len(joined) == 12
    first = events[0] if path == CHAT else events[0]["choices"][0]
    expected = whole if path == CHAT else whole["choices"][0]
    assert first["prompt_token_ids"] == expected["prompt_token_ids"]
    assert all("prompt_token_ids" not in json.dumps(event) for event in events[1:])
