"""Requests that restrict the answer: structured_outputs, guided_*, logit_bias, allowed_token_ids and bad_words."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("llguidance")
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
LARK = 'start: word " " word\nword: /[a-c]{2}/'
GBNF = 'root ::= word " " word\nword ::= [a-c] [a-c]\n'
ODD_CHOICES = ['say "hi"', "a/b\nc", "naïve \\ 日本", "[x]|(y)*"]


def post(server, **fields):
    return server.post(TEXT, {"model": server.model, "prompt": "Say", "max_tokens": 60, "seed": 1, **fields})


def texts(server, **fields):
    answer = post(server, **fields)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["text"] for choice in choices]


@pytest.mark.parametrize(
    ("kind", "value", "fits"),
    [
        ("choice", ["yes", "no", "maybe"], lambda text: text in ("yes", "no", "maybe")),
        ("choice", ODD_CHOICES, lambda text: text in ODD_CHOICES),
        ("regex", r"\d{3}-[a-f]{2}/x", lambda text: re.fullmatch(r"\d{3}-[a-f]{2}/x", text)),
        ("grammar", LARK, lambda text: re.fullmatch("[a-c]{2} [a-c]{2}", text)),
        ("grammar", GBNF, lambda text: re.fullmatch("[a-c]{2} [a-c]{2}", text)),
        ("json", SCHEMA, lambda text: json.loads(text)["n"] in (1, 2)),
        ("json", json.dumps(SCHEMA), lambda text: json.loads(text)["n"] in (1, 2)),
    ],
    ids=["choice", "odd choice", "regex", "lark", "gbnf", "schema", "schema as text"],
)
def test_answers_fit_grammars_of_all_kinds(server, kind, value, fits):
    for fields in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
        for text in texts(server, **fields, n=3):
            assert fits(text), text


def test_size_limit_of_grammar_counts_bytes_of_utf8():
    from kvtier.server.errors import ApiError
    from kvtier.server.grammars import answer_grammar
    from kvtier.server.protocol import CompletionRequest

    body = CompletionRequest(model="any", prompt="Say", guided_regex="é" * 300_000)
    with pytest.raises(ApiError, match="600000 bytes"):
        answer_grammar(body)


def test_guided_choice_can_force_any_text(server):
    for text in ODD_CHOICES:
        assert texts(server, guided_choice=[text]) == [text]


def test_streamed_chat_answer_fits_its_grammar(server):
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hi"}], "guided_regex": "[ab]{5}"}
    lines = server.post(CHAT, {**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert re.fullmatch("[ab]{5}", text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_grammar": 'start: "a'}, "guided_grammar"),
        ({"guided_grammar": "root ::= " + "(" * 3000}, "guided_grammar"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["x"] * 1025}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": '{"type": "nonsense"}'}, "guided_json"),
        ({"guided_json": {"properties": {str(number): {} for number in range(10_001)}}}, "guided_json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),  # the last token id is 258
        ({"logit_bias": {str(token): 0 for token in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [259]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_restriction_is_400_with_its_name(server, fields, param):
    body = json.dumps({"model": server.model, "prompt": "Say", "max_tokens": 5, **fields}).encode()
    answer = server.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert param.partition(".")[0] in error["message"]


def test_logit_bias_and_allowed_tokens_restrict_the_answer(server):
    def text_of(**fields):
        answer = post(server, ignore_eos=True, max_tokens=8, **fields)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    tokens = dict(zip("abc", server.post("/tokenize", {"prompt": "abc"}).json()["tokens"], strict=True))
    assert text_of(logit_bias={str(tokens["a"]): 100}) == ["a" * 8]
    assert all({*text} <= {*"abc"} for text in text_of(allowed_token_ids=[*tokens.values()], n=4))
    assert text_of(allowed_token_ids=[*tokens.values()], bad_words=["ab", "b", "c"], temperature=0) == ["a" * 8]
    biased = {"logit_bias": {str(tokens["a"]): 100, str(tokens["b"]): 90}, "bad_words": ["aa", "bb"]}
    assert text_of(**biased, frequency_penalty=0.5, temperature=0) == ["abababab"]


def test_contradictory_restrictions_are_400(server):
    fields = {"guided_choice": ["yes", "no"], "bad_words": ["y", "n"]}
    answer = post(server, **fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_token_allowed"), answer.text
    stream = post(server, guided_choice=["yes", "you"], bad_words=["e", "o"], stream=True)
    # If the error occurs before the first token, the status is 400. Otherwise, the error is an event of the stream.
    assert '"code":"no_token_allowed"' in stream.text
    assert texts(server, guided_choice=["yes", "no"], bad_words=["y"]) == ["no"]
