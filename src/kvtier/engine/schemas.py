"""JSON schemas for answers: bounds, and compilation with llguidance. No torch: the server's worker processes use it."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    import llguidance

# As people write JSON, and nothing else: with any white space allowed, a model may write nothing but that.
FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_SCHEMA_BYTES = 512 << 10
# Compiling takes up to quadratic time in these. 1,000 properties take 0.4 s, 5,000 take 9 s, and patterns under allOf
# multiply (SmolLM2's vocabulary, x86-64, 2 busy cores, 2026-11-16); a deadline covers what the numbers let pass.
_MOST = {"properties": 10_000, "patterns": 256, "references": 2_000}
# A mask is computed on the engine's thread for every token, while all other requests wait.
_MAX_MASK_SECONDS = 0.25


def is_available() -> bool:
    """True if llguidance is installed."""
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
            raise ArgumentError(f"the schema has {counts[name]} {name}; at most {most} are taken")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Mapping) else 0


class SchemaCompiler:
    """Compiles schemas for one model's tokens."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise ArgumentError("the model has no end-of-text token, with which an answer after a schema ends")
        self._llguidance = load_llguidance()
        self._tokenizer = self._llguidance.LLTokenizer(tokenizer_json, vocab_size, list(eos_token_ids))
        self._limits = self._llguidance.LLParserLimits(verbose_errors=False)  # errors would quote the whole grammar

    def compile(self, schema: str) -> llguidance.LLMatcher:
        """Compile a schema, without the GIL. Raises ArgumentError if answers cannot follow it.

        The time is not bounded: 2 KB can take hours. Do it where it can be killed first.
        """
        try:
            grammar = self._llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=FORM)
        except ValueError as error:
            raise ArgumentError(str(error)) from error
        matcher: llguidance.LLMatcher = self._llguidance.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=self._limits
        )
        if matcher.is_error():
            raise ArgumentError(str(matcher.get_error()))
        return matcher

    def check(self, schema: str) -> None:
        """Raise ArgumentError if answers cannot follow a schema, or only too slowly."""
        matcher = self.compile(schema).deep_copy()
        began = time.thread_time()
        matcher.compute_bitmask()
        seconds = time.thread_time() - began
        if seconds > _MAX_MASK_SECONDS:
            raise ArgumentError(
                f"the tokens allowed by the schema take {seconds:.2f} s to find, and {_MAX_MASK_SECONDS:g} s is the "
                "limit; a schema with fewer properties or shorter lists takes less"
            )


def load_llguidance() -> Any:
    """The package, or an error that says what to install."""
    try:
        import llguidance
    except ImportError as error:
        raise UnavailableError("answers after a schema need llguidance: pip install 'kvtier[structured]'") from error
    return llguidance
