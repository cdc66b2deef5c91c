"""Whether a JSON schema can be followed. No torch: the server asks before a request goes to the engine."""

from __future__ import annotations

import importlib.util
from typing import Any

from kvtier.errors import UnavailableError

# As people write JSON, and nothing else: with any white space allowed, a model may write nothing but that.
FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def is_available() -> bool:
    """Whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


def check_schema(schema: str) -> str:
    """Why a JSON schema cannot be followed; empty if it can."""
    llguidance = load_llguidance()
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=FORM)
    except ValueError as error:
        return str(error)
    return str(llguidance.LLMatcher.validate_grammar(grammar))


def load_llguidance() -> Any:
    """The package, or an error that says what to install."""
    try:
        import llguidance
    except ImportError as error:
        raise UnavailableError("answers after a schema need llguidance: pip install 'kvtier[structured]'") from error
    return llguidance
