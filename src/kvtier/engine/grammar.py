"""Answers that follow a JSON schema: llguidance says which tokens may come next. Extra `structured`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtier.engine.schemas import SchemaCompiler
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import StateError

if TYPE_CHECKING:
    import llguidance


class Grammars:
    """Makes constraints for one model's tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._compiler = SchemaCompiler(tokenizer.to_json(), vocab_size, eos_token_ids)

    def json(self, schema: str) -> Callable[[], JsonConstraint]:
        """Constraints, each for one answer, to JSON that this schema describes. Takes seconds for a large one."""
        matcher = self._compiler.compile(schema)
        return lambda: JsonConstraint(matcher.deep_copy())


class JsonConstraint:
    """What one answer may go on with."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def forbid(self, logits: torch.Tensor) -> None:
        """Mask the tokens that cannot follow. Raises StateError if none can, or if the grammar is too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=len(logits))
        if self._matcher.is_error() or not allowed.any():
            raise self._error()
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a token. Raises StateError if it cannot follow."""
        if not self._matcher.consume_token(token_id):
            raise self._error()

    def _error(self) -> StateError:
        why = self._matcher.stop_reason()  # a name; the error's text may quote the schema
        return StateError(f"the schema cannot be followed any further ({why}); use a simpler one")
