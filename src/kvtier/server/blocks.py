"""AnswerBlocks: splits an answer into reasoning, content and tool calls, for the Messages and Responses APIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvtier.engine.params import FinishReason, Output
from kvtier.server.answers import AnswerDelta, AnswerParser, AnswerSyntax, CallDelta, TextDelta, content_delta
from kvtier.server.completion_format import to_json


@dataclass(slots=True)
class Block:
    """One part of an answer: reasoning, content, or a tool call."""

    kind: Literal["reasoning", "content", "call"]
    index: int
    id: str = ""
    """Id of the tool call. `id` and `name` are empty for other kinds."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the arguments of a call."""
        return "".join(self.pieces)


class BlockChange(NamedTuple):
    """A block was opened, extended by `text`, or closed."""

    action: Literal["open", "add", "close"]
    block: Block
    text: str = ""


class AnswerBlocks:
    """The blocks of one answer, in the order in which the model writes them. Only the last block can be open."""

    def __init__(self, syntax: AnswerSyntax, id_prefix: str) -> None:
        """The id of a tool call is `id_prefix`, followed by the number of the call."""
        self._parser = None if syntax.is_plain else AnswerParser(syntax, id_prefix)
        self._is_open = False
        self.blocks: list[Block] = []
        self.finish_reason: FinishReason | None = None
        self.num_reasoning_tokens = 0

    @property
    def ends_with_calls(self) -> bool:
        """True if the answer has a tool call and the last call is complete."""
        return self._parser is not None and self._parser.ends_with_calls

    def feed(self, outputs: Sequence[Output]) -> list[BlockChange]:
        """Process outputs, and return the changes in order. The last output of the answer closes the open block."""
        changes: list[BlockChange] = []
        for output in outputs:
            for part in self._parse(output).parts:
                changes += self._add_call(part) if isinstance(part, CallDelta) else self._add_text(part)
            self.finish_reason = output.finish_reason
            if output.finish_reason is not None:
                changes += self._close()
        return changes

    def _parse(self, output: Output) -> AnswerDelta:
        if self._parser is None:
            return content_delta(output.text)
        was_reasoning = self._parser.is_reasoning
        delta = self._parser.feed(output.text)
        if was_reasoning or self._parser.is_reasoning:
            self.num_reasoning_tokens += len(output.token_ids)
        return delta if output.finish_reason is None else delta + self._parser.finish()

    def _add_text(self, part: TextDelta) -> list[BlockChange]:
        if not part.text:
            return []
        changes: list[BlockChange] = []
        if not self._is_open or self.blocks[-1].kind != part.kind:
            changes += self._open(Block(part.kind, len(self.blocks)))
        return [*changes, self._extend(part.text)]

    def _add_call(self, part: CallDelta) -> list[BlockChange]:
        changes: list[BlockChange] = []
        if part.id is not None:
            changes += self._open(Block("call", len(self.blocks), part.id, part.name or ""))
        return [*changes, self._extend(part.arguments)] if part.arguments else changes

    def _extend(self, text: str) -> BlockChange:
        self.blocks[-1].pieces.append(text)
        return BlockChange("add", self.blocks[-1], text)

    def _open(self, block: Block) -> list[BlockChange]:
        changes = self._close()
        self.blocks.append(block)
        self._is_open = True
        return [*changes, BlockChange("open", block)]

    def _close(self) -> list[BlockChange]:
        if not self._is_open:
            return []
        self._is_open = False
        return [BlockChange("close", self.blocks[-1])]


def server_event(kind: str, body: dict[str, object]) -> bytes:
    """Return a server-sent event named `kind`. Its data is `body` with the additional field `type`, set to `kind`."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **body}))
