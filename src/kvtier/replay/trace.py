"""Traces in the Mooncake format: one JSON object a line, with a hash id for every 512 tokens of the prompt."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as a trace has it: no text, only what is needed to tell which prefixes are shared."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One for each 512 tokens, the last for what is left; equal ids after equal ids mean equal tokens."""

    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Token ids that share prefixes exactly as the hash ids do: block h holds h * 512, h * 512 + 1, ..."""
        ids = np.array(self.hash_ids, np.int64)[:, None] * TRACE_BLOCK_TOKENS + np.arange(TRACE_BLOCK_TOKENS)
        return (ids & 0x7FFFFFFF).astype(np.int32).reshape(-1)[: self.input_tokens]


@dataclass(frozen=True, slots=True)
class TraceProblem:
    """A line that is no request, and why."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read; `problems` has every line that was not."""

    requests: tuple[TraceRequest, ...]
    problems: tuple[TraceProblem, ...]


def read_trace(*paths: str | Path) -> Trace:
    """Read one or several files, .gz or plain, in order of time. Nothing is skipped without a problem that says so."""
    requests: list[TraceRequest] = []
    problems: list[TraceProblem] = []
    for path in paths:
        with _open(Path(path)) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                found = parse_line(line)
                if isinstance(found, str):
                    problems.append(TraceProblem(str(path), number, found))
                else:
                    requests.append(found)
    requests.sort(key=lambda request: request.timestamp_ms)
    return Trace(tuple(requests), tuple(problems))


def parse_line(line: str) -> TraceRequest | str:
    """The request of a line, or what is wrong with it."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return f"no JSON: {error.msg} at column {error.colno}"
    if not isinstance(record, dict):
        return f"an object is wanted, got {type(record).__name__}"
    values = []
    for name in ("timestamp", "input_length", "output_length"):
        value = record.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f"{name} must be a whole number >= 0, got {value!r}"
        values.append(value)
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        return "hash_ids must be a list of whole numbers >= 0"
    wanted = -(-values[1] // TRACE_BLOCK_TOKENS)
    if len(ids) != wanted:
        return f"{values[1]} tokens need {wanted} hash_ids of {TRACE_BLOCK_TOKENS} tokens, got {len(ids)}"
    return TraceRequest(values[0], values[1], values[2], tuple(ids))


def write_trace(requests: Iterable[TraceRequest], path: str | Path) -> int:
    """Write requests in the same format; returns how many."""
    count = 0
    with open(path, "w") as file:
        for count, request in enumerate(requests, 1):  # noqa: B007 - the count is what is returned
            record = {
                "timestamp": request.timestamp_ms,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.hash_ids),
            }
            file.write(json.dumps(record) + "\n")
    return count


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
