"""Check and compile grammars with llguidance (extra `structured`), and constrain outputs to a grammar.

A grammar is a JSON schema, a regular expression or a context-free grammar in Lark's notation. This module imports numpy
and torch only where a constraint is applied, because processes without torch use this module too.
"""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvtier.engine.packaged import optional_package
from kvtier.errors import ArgumentError, StateError

if TYPE_CHECKING:
    import llguidance
    import torch

# White space has a fixed form. If it were flexible, a model could generate white space without end.
FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_SCHEMA_BYTES = 512 << 10  # maximum size of the text of a grammar
# The time to compile a schema can grow with the square of these counts: 1,000 properties take 0.4 s, 5,000 take 9 s
# (SmolLM2, measured on 2 busy x86-64 cores, 2026-11-16). The server aborts compilations that take too long.
_MOST = {"properties": 10_000, "patterns": 256, "references": 2_000}
# Time limit for computing the first token mask. Masks are computed on the engine thread, while all other requests wait.
_MAX_MASK_SECONDS = 0.25


class Grammar(NamedTuple):
    """The text of a grammar, which may be untrusted."""

    kind: Literal["json", "regex", "lark"]
    text: str


def is_available() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def check_shape(schema: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a schema with too many properties, patterns or references."""
    counts, open_values = Counter[str](), [schema]
    while open_values:
        value: Any = open_values.pop()
        if isinstance(value, Mapping):
            counts["properties"] += _size(value.get("properties"))
            counts["patterns"] += _size(value.get("patternProperties")) + isinstance(value.get("pattern"), str)
            counts["references"] += isinstance(value.get("$ref"), str)
            open_values.extend(value.values())
        elif isinstance(value, list):
            open_values.extend(value)
    for name, most in _MOST.items():
        if counts[name] > most:
            raise ArgumentError(f"the schema has {counts[name]} {name}; at most {most} are accepted")


def to_lark(text: str) -> str:
    """Convert a grammar in Lark or GBNF to the Lark notation of llguidance. Raise ArgumentError for other texts."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # report only the type, because the text of the error quotes the grammar
        raise ArgumentError(f"the grammar is neither Lark nor GBNF: {type(error).__name__}") from error


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Mapping) else 0


class SchemaCompiler:
    """Compiles grammars for the vocabulary of one model."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise ArgumentError("outputs with a schema need an end-of-text token, but the model has none")
        self._llguidance = optional_package("llguidance", "an output with a schema", "structured")
        self._tokenizer = self._llguidance.LLTokenizer(tokenizer_json, vocab_size, list(eos_token_ids))
        self._limits = self._llguidance.LLParserLimits(verbose_errors=False)  # verbose errors quote the whole grammar

    def compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Compile a grammar without holding the GIL. Raise ArgumentError if the grammar is not supported.

        A schema of 2 KB can take hours. Therefore, first compile an untrusted grammar in a process that can be killed.
        """
        new, text = self._llguidance.LLMatcher, grammar.text
        try:
            match grammar.kind:
                case "json":
                    text = new.grammar_from_json_schema(text, overrides=FORM)
                case "regex":
                    text = new.grammar_from_regex(text)
                case "lark":
                    text = new.grammar_from_lark(text)
        except ValueError as error:
            raise ArgumentError(str(error)) from error
        matcher: llguidance.LLMatcher = new(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ArgumentError(str(matcher.get_error()))
        return matcher

    def constraint(self, grammar: Grammar) -> Callable[[], GrammarConstraint]:
        """Compile a grammar. Return a function that returns a new constraint; call it once per sequence."""
        matcher = self.compile(grammar)
        return lambda: GrammarConstraint(matcher.deep_copy())

    def check(self, grammar: Grammar) -> None:
        """Raise ArgumentError if a grammar is not supported, or if computing the first token mask takes too long."""
        matcher = self.compile(grammar).deep_copy()
        began = time.thread_time()
        matcher.compute_bitmask()
        seconds = time.thread_time() - began
        if seconds > _MAX_MASK_SECONDS:
            raise ArgumentError(
                f"the grammar takes {seconds:.2f} s for the first token; the limit is {_MAX_MASK_SECONDS:g} s. "
                "Simplify it: in a JSON schema, use fewer properties or shorter lists"
            )


class GrammarConstraint:
    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def forbid(self, logits: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to -inf. Raise StateError if all are forbidden or the parser fails."""
        import numpy as np

        from kvtier.engine.forward import to_tensors

        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=len(logits))
        if self._matcher.is_error() or not allowed.any():
            raise self._error()
        (is_allowed,) = to_tensors([allowed], logits.device)
        logits.masked_fill_(is_allowed == 0, -float("inf"))

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a token. Raise StateError if the token is forbidden."""
        if not self._matcher.consume_token(token_id):
            raise self._error()

    def _error(self) -> StateError:
        reason = self._matcher.stop_reason()  # not the error text, which may quote the schema
        return StateError(f"no token fits the schema ({reason}); use a simpler schema")
