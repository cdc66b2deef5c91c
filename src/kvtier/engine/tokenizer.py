"""Tokenizer with incremental decoding and chat templates, from tokenizer.json or GGUF metadata. Does not import torch.

The `tokenizers` package encodes and decodes text. Chat templates run in the sandbox of jinja2, with the functions that
Hugging Face templates call.
"""

from __future__ import annotations

import codecs
import datetime
import functools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from kvtier.engine.gguf_header import GgufHeader
from kvtier.engine.packaged import DEFAULT_MODEL, optional_package, resolve
from kvtier.engine.special_text import SpecialText, show
from kvtier.errors import ArgumentError, CheckpointError, RangeError, StateError

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend


def _compile_template(source: str) -> jinja2.Template:
    jinja2 = optional_package("jinja2", "a chat template")
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson  # the tojson of jinja2 escapes HTML
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template does not compile, line {error.lineno}: {error.message}") from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise ArgumentError(f"the chat template refuses these messages: {message}")


Message = Mapping[str, Any]
_REPLACEMENT = "\ufffd"
# If a text has more than _USUAL_CHARS characters per allowed token, its tokens are first counted in pieces of
# _PIECE_CHARS characters. The count stops when it exceeds twice the allowed number.
_USUAL_CHARS, _PIECE_CHARS = 8, 1 << 14
_NFC_SHRINKS = 3  # NFC makes text at most 3 times shorter: three jamo (9 bytes) become a syllable (3 bytes)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # text of a token for one byte, in tokenizers with byte fallback
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's types of tokens whose text must not be split
# For each value of tokenizer.ggml.pre in GGUF, the pattern that splits text before byte pairs are merged. None selects
# the pattern of ByteLevel.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS: Mapping[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2", "smollm")),
    **dict.fromkeys(("llama-bpe", "llama3"), _LLAMA3),
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
}


class Tokenizer:
    """The tokenizer of a model, with the chat template if the model has one."""

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        """`special` maps names in chat templates (bos_token, eos_token) to special tokens.

        `tool_template` is the chat template for requests with tools, if the checkpoint has a separate one.
        """
        self._backend = backend
        self._lock = threading.Lock()
        self.special = MappingProxyType(dict(special or {}))
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        self._template = None if chat_template is None else _compile_template(chat_template)
        self._tool_template = self._template if tool_template is None else _compile_template(tool_template)
        self._token_bytes: dict[int, bytes] = {}

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact text ("<|im_end|>"), or None if there is no such token."""
        return self._backend.token_to_id(token)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Encode a text.

        add_special: add the tokens that the model expects around a text (often a bos token).
        parse_special: encode the text of a special token ("<|im_end|>") as that token, not as plain text.
        max_tokens: raise RangeError early if the text is far too long. The caller checks the exact token count.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ArgumentError(f"the text has an unpaired surrogate at index {error.start}") from error
        if max_tokens is not None:
            self.check_size(size, max_tokens)
            if len(text) > _USUAL_CHARS * max_tokens:
                self._check_pieces(text, max_tokens)
        return self._encode(text, add_special=add_special, parse_special=parse_special).ids

    def check_size(self, num_bytes: int, max_tokens: int) -> None:
        """Raise RangeError if a text of this size certainly has more than `max_tokens` tokens."""
        longest = self.max_token_bytes if num_bytes > max_tokens else None
        if longest is not None and num_bytes > max_tokens * longest:
            raise RangeError(
                f"the text has {num_bytes} bytes; {max_tokens} tokens of at most {longest} bytes cannot represent it"
            )

    @functools.cached_property
    def max_token_bytes(self) -> int | None:
        """Largest number of bytes of text that one token can represent; None if the limit is not known.

        The limit is known only for byte-level tokenizers that have no normalizer except NFC, and no added tokens that
        strip white space. In their vocabulary, each character represents one byte. Added tokens are stored as text.
        """
        config = json.loads(self.to_json())
        steps, added, normalizer = config["pre_tokenizer"] or {}, config["added_tokens"], config["normalizer"] or {}
        is_byte_level = "ByteLevel" in [step["type"] for step in steps.get("pretokenizers", [steps]) if step]
        shrinks = {None: 1, "NFC": _NFC_SHRINKS}.get(normalizer.get("type"))
        if not is_byte_level or shrinks is None or any(token["lstrip"] or token["rstrip"] for token in added):
            return None
        sizes = (len(token["content"].encode()) for token in added)
        return shrinks * max(*map(len, self._backend.get_vocab()), *sizes, 1)

    def _encode(self, text: str, *, parse_special: bool, add_special: bool = False) -> Encoding:
        with self._lock:  # threads share the backend, and the option is a field of the backend
            self._backend.encode_special_tokens = not parse_special
            return self._backend.encode(text, add_special_tokens=add_special)

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Raise RangeError if the pieces of a text have more than 2 * max_tokens tokens in total.

        The factor 2 is a margin, because the pieces can have more tokens than the whole text.
        """
        count = 0
        for begin in range(0, len(text), _PIECE_CHARS):
            count += len(self._encode(text[begin : begin + _PIECE_CHARS], parse_special=True))
            if count > 2 * max_tokens:
                raise RangeError(f"the text has more than {max_tokens} tokens")

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode tokens; invalid UTF-8 becomes U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text after other tokens. The bytes may end inside a character."""
        if token_id not in self._token_bytes:
            self._token_bytes[token_id] = self._find_bytes(token_id)
        return self._token_bytes[token_id]

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens, which `decode` skips by default."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def _find_bytes(self, token_id: int) -> bytes:
        text = self.decode([token_id], skip_special=False)
        if _REPLACEMENT not in text:  # decode two copies and use the second; the first may lose a leading space
            return self.decode([token_id, token_id], skip_special=False)[len(text) :].encode()
        token: str = self._backend.id_to_token(token_id) or ""
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        letters = _byte_letters()
        return bytes(letters[letter] for letter in token) if letters.keys() >= set(token) else text.encode()

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation with the chat template. `variables` are passed to the template.

        With `continue_final_message`, the text ends with the content of the last message, which the answer continues.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise StateError("this checkpoint has no chat template; use a text as the prompt")
        import jinja2

        for index, message in enumerate(messages):
            if "role" not in message:
                raise ArgumentError(f"message {index} has no role; its keys are {', '.join(message) or 'none'}")
        is_open = add_generation_prompt and not continue_final_message
        names = {**self.special, "messages": messages, "tools": tools, "add_generation_prompt": is_open, **variables}
        try:
            text = template.render(**names)
            return _until_end(text, messages[-1]["content"]) if continue_final_message else text
        except jinja2.TemplateError as error:
            raise ArgumentError(f"the chat template cannot render these messages: {error}") from error

    def encode_chat(
        self, messages: Sequence[Message], *, parse_special: bool = False, max_tokens: int | None = None, **options: Any
    ) -> list[int]:
        """Encode a conversation. `options` are passed to chat_text. `max_tokens` works as in `encode`.

        Special tokens that the template writes are encoded as special tokens. Special tokens in messages, tools and
        variables are encoded as plain text unless parse_special is True.
        """
        text = self.chat_text(messages, **options)
        tokens = self.encode(text, add_special=False, max_tokens=max_tokens)
        hidden = None if parse_special else self._special_text.hide([list(messages), options])
        if hidden is None:
            return tokens
        (hidden_messages, hidden_options), marks = hidden
        marked = self.chat_text(hidden_messages, **hidden_options)
        encoded = self._encode(marked, parse_special=True)
        spans = [(id, *span) for id, span in zip(encoded.ids, encoded.offsets, strict=True) if id in self.special_ids]
        if [id for id, _, _ in spans] == [id for id in tokens if id in self.special_ids]:
            return tokens  # the template wrote all special tokens
        kept, last = [], 0
        for id, begin, end in [*spans, (None, len(marked), len(marked))]:
            kept += self._encode(show(marked[last:begin], marks), parse_special=False).ids
            kept += [] if id is None else [id]
            last = end
        return kept

    @functools.cached_property
    def _special_text(self) -> SpecialText:
        decoder = self._backend.get_added_tokens_decoder()
        return SpecialText([decoder[id].content for id in self.special_ids])

    def to_json(self) -> str:
        return str(self._backend.to_str())

    def stream(self) -> TokenStream:
        return TokenStream(self)


class TokenStream:
    """Decodes the tokens of an output one at a time. Skips special tokens.

    The bytes of an incomplete UTF-8 character, at most 3, are held back. Invalid bytes become U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True

    def add(self, token_id: int) -> str:
        """Return the text that this token completes, without the bytes of an incomplete character."""
        data = self._tokenizer.token_bytes(token_id)
        if not data or token_id in self._tokenizer.special_ids:
            return ""
        if self._is_first:
            self._is_first = False
            text = self._tokenizer.decode([token_id], skip_special=False)  # may lack the leading space of the token
            data = data if _REPLACEMENT in text else text.encode()
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def _until_end(text: str, content: str) -> str:
    """Cut a rendered text after the content of its last message. Templates may strip the content of messages."""
    for form in (content, content.rstrip(), content.strip()):
        if form and (begin := text.rfind(form)) >= 0:
            return text[: begin + len(form)]
    raise ArgumentError("the chat template changes the final message, so the final message cannot be continued")


def load_tokenizer(model: str | Path = DEFAULT_MODEL) -> Tokenizer:
    """Load the tokenizer of a model folder, a GGUF file or a packaged model (see `resolve`)."""
    path = resolve(model)
    if path.is_dir():
        return _from_folder(path)
    return _from_gguf(GgufHeader(path).metadata)


def _from_folder(folder: Path) -> Tokenizer:
    tokenizers = optional_package("tokenizers", "tokenizing")
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; kvtier reads fast tokenizers only (transformers can convert others)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust extension raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    values = {name: config[name] for name in names if config.get(name) is not None}
    special = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    template = template_path.read_text() if template_path.exists() else config.get("chat_template")
    tool_path = folder / "additional_chat_templates" / "tool_use.jinja"
    tool_template = tool_path.read_text() if tool_path.exists() else None
    if isinstance(template, list):  # several named templates
        named = {each["name"]: each["template"] for each in template}
        template, tool_template = named.get("default"), named.get("tool_use", tool_template)
    return Tokenizer(backend, chat_template=template, tool_template=tool_template, special=special)


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    tokenizers = optional_package("tokenizers", "tokenizing")
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PATTERNS:
        raise CheckpointError(
            f"the GGUF file has a tokenizer with model {kind!r} and pre-tokenizer {pre!r}; kvtier reads model 'gpt2' "
            f"with {', '.join(_PATTERNS)}. For other tokenizers, use a folder with tokenizer.json"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, fuse_unk=False))
    steps = [tokenizers.pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if (pattern := _PATTERNS[pre]) is not None:
        steps.append(tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    steps.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for kinds, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        chosen = [token for token, each in zip(tokens, types, strict=False) if each == kinds]
        add([tokenizers.AddedToken(token, normalized=False, special=kinds == _CONTROL) for token in chosen])
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special = {name: tokens[index] for name, index in ids.items() if index is not None}
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return Tokenizer(backend, chat_template=metadata.get("tokenizer.chat_template"), special=special)


@functools.cache
def _byte_letters() -> Mapping[str, int]:
    """Return a map from the letters of byte-level BPE to bytes. Letters above U+00FF stand for unprintable bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
