"""Log-probabilities and text offsets in OpenAI's format, including tokens that are only part of a character."""

import json

import pytest
import tokenizers

from kvtier.engine import Tokenizer
from kvtier.engine.params import FinishReason, Logprobs, Output
from kvtier.server.answers import AnswerSyntax
from kvtier.server.completion_format import CompletionFormat, Usage
from kvtier.server.messages_format import MessagesFormat
from kvtier.server.responses_api import ResponsesRequest
from kvtier.server.responses_format import ResponsesFormat

TEXT = "a€😀b"  # 1 + 3 + 4 + 1 bytes


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer in which tokens 0 to 255 are the bytes, token 256 is special, and token 257 is `ab`."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)} | {"<|end|>": 256, "ab": 257}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


def whole(form, tokens, top=(), step=1):
    """Add the tokens to `form`, `step` tokens at a time. Return the response that `form` builds from them."""
    for begin in range(0, len(tokens), step):
        new = tuple(tokens[begin : begin + step])
        logprobs = tuple(Logprobs(-1.0, tuple(top)) for _ in new)
        form.add(0, [Output("id", 0, TEXT if begin == 0 else "", new, logprobs, FinishReason.LENGTH, 1, 0)])
    return json.loads(form.whole(1, Usage(3, 1, len(tokens))))


def output(tokens, reason=None):
    return Output("id", 0, "", tuple(tokens), tuple(Logprobs(-1.0, ()) for _ in tokens), reason, 1, 0)


def test_chat_logprobs_of_partial_characters_contain_bytes(tokenizer):
    form = CompletionFormat("id", "m", 0, tokenizer, is_chat=True, logprobs=True)
    tokens = TEXT.encode()
    body = whole(form, tokens, [(0xE2, -1.0), (0x82, -2.0), (0x41, -3.0)])
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == TEXT
    assert [each["token"] for each in content[:3]] == ["a", "\\xe2", "\\x82"]
    top = content[0]["top_logprobs"]
    assert [(each["token"], each["bytes"]) for each in top] == [("\\xe2", [0xE2]), ("\\x82", [0x82]), ("A", [0x41])]


def test_completion_top_logprobs_contain_every_token(tokenizer):
    form = CompletionFormat("id", "m", 0, tokenizer, is_chat=False, logprobs=True)
    top = [(token, -float(token)) for token in (*range(0x80, 0x90), 257, 0x41)]
    (top_logprobs,) = whole(form, [0x61], top)["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top_logprobs) == len(top)
    assert top_logprobs["bytes:\\x80"] == -128.0
    assert list(top_logprobs.values()) == [value for _, value in top]


def test_completion_top_logprobs_name_repeated_text_by_token_id(tokenizer):
    form = CompletionFormat("id", "m", 0, tokenizer, is_chat=False, logprobs=True)
    top = [(0x41, -1.0), (0x41, -2.0)]
    (top_logprobs,) = whole(form, [0x61], top)["choices"][0]["logprobs"]["top_logprobs"]
    assert top_logprobs == {"A": -1.0, "token_id:65": -2.0}


def test_completion_text_offset_counts_characters(tokenizer):
    tokens = [*TEXT.encode(), 256, 0x63]
    expected = [0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4]
    body = whole(CompletionFormat("id", "m", 0, tokenizer, is_chat=False, logprobs=True), tokens)
    assert body["choices"][0]["logprobs"]["text_offset"] == expected
    form, offsets = CompletionFormat("id", "m", 0, tokenizer, is_chat=False, logprobs=True), []
    for begin in range(0, len(tokens), 2):
        event = form.piece(0, [output(tokens[begin : begin + 2])])
        offsets += json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == expected


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("logprobs", [False, True])
def test_response_does_not_depend_on_tokens_per_output(tokenizer, is_chat, logprobs):
    tokens, top = list(TEXT.encode()), [(0x41, -1.0), (0xE2, -2.0)]
    at_once, one_by_one = (
        whole(CompletionFormat("id", "m", 7, tokenizer, is_chat=is_chat, logprobs=logprobs), tokens, top, step)
        for step in (len(tokens), 1)
    )
    assert one_by_one == at_once
    (choice,) = at_once["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) == TEXT
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert (choice["logprobs"] is not None) == logprobs
    assert at_once["usage"] == Usage(3, 1, len(tokens)).body()
    assert list(at_once) == ["id", "object", "created", "model", "choices", "usage"]


def test_completion_format_counts_bytes_of_added_outputs(tokenizer):
    form = CompletionFormat("id", "m", 0, tokenizer, is_chat=True, logprobs=True)
    num_bytes = sum(form.add(0, [output([byte])]) for byte in TEXT.encode())
    assert 0 < num_bytes <= len(form.whole(1, Usage(0, 0, 0)))


@pytest.mark.parametrize("text", ["a", "é", "日本", "😀"])
def test_formats_count_utf8_bytes_of_text(tokenizer, text):
    syntax, request = AnswerSyntax(), ResponsesRequest.model_validate({"model": "m", "input": "hello"})
    forms = (
        CompletionFormat("id", "m", 0, tokenizer, is_chat=True, logprobs=False),
        MessagesFormat("msg_id", "m", syntax),
        ResponsesFormat("resp_id", 0, request, syntax),
    )
    answer = Output("id", 0, text, (0x61,), (), None, 1, 0)
    assert [form.add(0, [answer, answer]) for form in forms] == [2 * len(text.encode())] * 3


def test_response_above_the_size_limit_is_400(start):
    server = start("--max-response-bytes", "20000")
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "logprobs": 20, "ignore_eos": True}
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "response_too_large"
    server.wait_for(lambda state: state["in_flight"] == state["running"] == 0)
    streamed = server.post("/v1/completions", body | {"stream": True})
    assert streamed.status_code == 200
    assert len(streamed.content) > 20000
    assert server.post("/v1/completions", body | {"max_tokens": 4}).status_code == 200
