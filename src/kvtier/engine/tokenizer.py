"""Text to tokens and back: tokenizer.json or GGUF metadata through `tokenizers`, chat templates through jinja2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvtier.engine.chat import ChatTemplate
from kvtier.engine.gguf_header import read_metadata
from kvtier.engine.packaged import DEFAULT_MODEL, resolve
from kvtier.errors import CheckpointError, StateError, UnavailableError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Message = Mapping[str, Any]
_REPLACEMENT = "\ufffd"
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that text must not be cut inside of
# How GGUF's tokenizer.ggml.pre names cut text before byte pairs are merged: a pattern for `Split`, or None where
# ByteLevel's own is used.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS: Mapping[str, str | None] = MappingProxyType(
    {
        "default": None,
        "gpt-2": None,
        "smollm": None,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    }
)


class Tokenizer:
    """A model's tokenizer, with its chat template if it has one."""

    def __init__(
        self, backend: Backend, *, chat_template: str | None = None, special: Mapping[str, str] | None = None
    ) -> None:
        """`special`: bos_token, eos_token and so on, as chat templates name them."""
        self._backend = backend
        self.special = MappingProxyType(dict(special or {}))
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, special ones included."""
        return int(self._backend.get_vocab_size())

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the checkpoint names one."""
        return self.token_id(self.special["eos_token"]) if "eos_token" in self.special else None

    def token_id(self, token: str) -> int | None:
        """The number of a token by its exact text ("<|im_end|>")."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Tokens of a text. add_special: with what the model wants before and after a text (often a bos token)."""
        return list(self._backend.encode(text, add_special_tokens=add_special).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special))

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """A conversation as the model was trained to read it; more variables go to the template."""
        if self._template is None:
            raise StateError("this checkpoint has no chat template; give the prompt as a text")
        return self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Tokens of a conversation (options as of chat_text). The template has written the special tokens already."""
        return self.encode(self.chat_text(messages, **options), add_special=False)

    def to_json(self) -> str:
        """As a tokenizer.json has it."""
        return str(self._backend.to_str())

    def stream(self, *, skip_special: bool = True) -> TokenStream:
        """Decode token by token."""
        return TokenStream(self, skip_special=skip_special)


class TokenStream:
    """Text of a growing output: what each token adds, whole characters only.

    Tokens between `_begin` and `_shown` are decoded again and cut off, since how a token reads may depend on what
    stands before it (a space at the beginning of a text).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._begin = 0
        self._shown = 0

    def add(self, token_id: int) -> str:
        """The text this token completes; empty while a character is still missing bytes."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT):  # perhaps the beginning of a character
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return text

    def finish(self) -> str:
        """The rest, with U+FFFD for a character that was never completed."""
        text = self._new_text()
        self._begin = self._shown = len(self._ids)
        return text

    def _new_text(self) -> str:
        decode = self._tokenizer.decode
        known = decode(self._ids[self._begin : self._shown], skip_special=self._skip_special)
        return decode(self._ids[self._begin :], skip_special=self._skip_special)[len(known) :]


def load_tokenizer(model: str | Path = DEFAULT_MODEL) -> Tokenizer:
    """The tokenizer of a model folder, a GGUF file or a packaged model (see `resolve`)."""
    path = resolve(model)
    if path.is_dir():
        return _from_folder(path)
    return _from_gguf(read_metadata(path))


def _from_folder(folder: Path) -> Tokenizer:
    tokenizers = _tokenizers()
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
    if isinstance(template, list):  # several named ones
        template = next((each["template"] for each in template if each["name"] == "default"), None)
    return Tokenizer(backend, chat_template=template, special=special)


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    tokenizers = _tokenizers()
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PATTERNS:
        raise UnsupportedModelError(
            f"the GGUF file has a tokenizer of model {kind!r} and pre-type {pre!r}; kvtier reads byte pairs (gpt2) of "
            f"{', '.join(_PATTERNS)}; for others use a folder with tokenizer.json"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, fuse_unk=False))
    steps: list[Any] = []
    if pre == "smollm":
        steps.append(tokenizers.pre_tokenizers.Digits(individual_digits=True))
    pattern = _PATTERNS[pre]
    if pattern is not None:
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


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UnavailableError("tokenizing needs the tokenizers package: pip install 'kvtier[engine]'") from error
    return tokenizers
