"""Log-probabilities in OpenAI's form: names and bytes of tokens that are parts of characters, offsets in the text."""

import json

import pytest
import tokenizers

from kvtier.engine import Tokenizer
from kvtier.engine.output import FinishReason, Output
from kvtier.engine.params import Logprobs
from kvtier.server.responses import ChatForm, Choice, CompletionForm, Usage

TEXT = "a€😀b"  # 1 + 3 + 4 + 1 bytes


@pytest.fixture(scope="module")
def tokenizer():
    """Token i is byte i; 256 is special."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)} | {"<|end|>": 256, "ab": 257}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


def choice(tokens, top=()):
    logprobs = [Logprobs(-1.0, tuple(top)) for _ in tokens]
    return Choice([TEXT], list(tokens), logprobs, FinishReason.LENGTH)


def output(tokens, reason=None):
    return Output("id", 0, "", tuple(tokens), tuple(Logprobs(-1.0, ()) for _ in tokens), reason, 1, 0)


def test_chat_logprobs_partial_characters_have_their_bytes(tokenizer):
    form = ChatForm("id", "m", 0, tokenizer, logprobs=True)
    tokens = TEXT.encode()
    body = form.whole([choice(tokens, [(0xE2, -1.0), (0x82, -2.0), (0x41, -3.0)])], Usage())
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == TEXT
    assert [each["token"] for each in content[:3]] == ["a", "\\xe2", "\\x82"]
    top = content[0]["top_logprobs"]
    assert [(each["token"], each["bytes"]) for each in top] == [("\\xe2", [0xE2]), ("\\x82", [0x82]), ("A", [0x41])]


def test_completion_top_logprobs_keep_every_token(tokenizer):
    form = CompletionForm("id", "m", 0, tokenizer, logprobs=True)
    top = [(token, -float(token)) for token in (*range(0x80, 0x90), 257, 0x41)]
    (found,) = form.whole([choice([0x61], top)], Usage())["choices"][0]["logprobs"]["top_logprobs"]
    assert len(found) == len(top)
    assert found["bytes:\\x80"] == -128.0
    assert list(found.values()) == [value for _, value in top]


def test_completion_top_logprobs_same_text_named_by_id(tokenizer):
    form = CompletionForm("id", "m", 0, tokenizer, logprobs=True)
    top = [(0x41, -1.0), (0x41, -2.0)]
    (found,) = form.whole([choice([0x61], top)], Usage())["choices"][0]["logprobs"]["top_logprobs"]
    assert found == {"A": -1.0, "token_id:65": -2.0}


def test_completion_text_offset_counts_characters(tokenizer):
    tokens = [*TEXT.encode(), 256, 0x63]
    wanted = [0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4]
    whole = CompletionForm("id", "m", 0, tokenizer, logprobs=True).whole([choice(tokens)], Usage())
    assert whole["choices"][0]["logprobs"]["text_offset"] == wanted
    form, offsets = CompletionForm("id", "m", 0, tokenizer, logprobs=True), []
    for begin in range(0, len(tokens), 2):
        event = form.piece(0, [output(tokens[begin : begin + 2])])
        offsets += json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == wanted
