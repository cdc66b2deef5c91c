"""Traces: what is known of requests that were served. No text, only which prefixes they share.

Two formats, one JSON object a line, .gz or .zst or plain:

    Mooncake's    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..]}
    kvtier's log  {"event": "request", "arrival": 27.482, "block_tokens": 16, "prompt_tokens": 6955,
                   "answer_tokens": 52, "keys": ["9f86d081884c7d65", ..]}                       see record.py
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError, UnavailableError

TRACE_BLOCK_TOKENS = 512
MAX_TOKEN = 2**31 - 1
OTHER_EVENTS = ("start", "add", "step", "report", "update", "fail", "cancel")
"""What kvtier's log has besides requests; see record.py."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as a trace has it: no text, only what is needed to tell which prefixes are shared."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One for each block, the last for what is left of the prompt. Equal ids after equal ids mean equal tokens."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    has_answer: bool = False
    """Whether the ids are those of the full blocks of prompt and answer."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Those of the full blocks of the prompt: what can be found in a cache."""
        return self.hash_ids[: self.input_tokens // self.block_tokens]

    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Prompt ids that share prefixes exactly as the hash ids do: block h holds h * 512, h * 512 + 1, ..."""
        return self.sequence()[: self.input_tokens]

    def sequence(self, number: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Prompt and answer. What no hash id tells is a token that only request `number` has."""
        size = self.block_tokens
        ids = np.array(self.hash_ids, np.int64)[:, None] * size + np.arange(size)
        known = (ids & MAX_TOKEN).astype(np.int32).reshape(-1)
        num_tokens = self.input_tokens + self.output_tokens
        if not self.has_answer:  # the last id is of what is left of the prompt, without the answer behind it
            known = known[: self.input_tokens]
        rest = num_tokens - len(known)
        return np.append(known, np.full(rest, MAX_TOKEN - number, np.int32)) if rest else known


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
    """Read one or several files in order of time. Nothing is skipped without a problem that says so."""
    requests: list[TraceRequest] = []
    problems: list[TraceProblem] = []
    names: dict[str, int] = {}
    for path in paths:
        number = 0
        try:
            for number, line in enumerate(_lines(Path(path)), 1):
                found = parse_line(line, names) if line.strip() else None
                if isinstance(found, str):
                    problems.append(TraceProblem(str(path), number, found))
                elif found is not None:
                    requests.append(found)
        except (EOFError, gzip.BadGzipFile, zlib.error, _zstd_error()) as error:
            what = f"the compressed file is damaged from here on: {error}"
            problems.append(TraceProblem(str(path), number + 1, what))
        except OSError as error:
            raise ArgumentError(f"the trace {path} cannot be read: {error.strerror or error}") from error
    requests.sort(key=lambda request: request.timestamp_ms)
    _must_agree(requests)
    return Trace(tuple(_renumbered(requests)), tuple(problems))


def parse_line(line: bytes | str, names: dict[str, int] | None = None) -> TraceRequest | str | None:
    """The request of a line, or what is wrong with it; None for what else our log has. `names` numbers its keys."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return f"no JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"no JSON: {error}"
    if not isinstance(record, dict):
        return f"an object is wanted, got {type(record).__name__}"
    if record.get("event") in OTHER_EVENTS:
        return None
    return _logged(record, {} if names is None else names) if "event" in record else _mooncake(record)


def _mooncake(record: dict[str, Any]) -> TraceRequest | str:
    values: list[int] = []
    for name in ("timestamp", "input_length", "output_length"):
        value: Any = record.get(name)
        if not _is_count(value):
            return f"{name} must be a whole number >= 0, got {value!r}"
        values.append(int(value))
    if not values[1]:
        return "a prompt has at least one token, got input_length 0"
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(_is_count(i) for i in ids):
        return "hash_ids must be a list of whole numbers >= 0"
    wanted = -(-values[1] // TRACE_BLOCK_TOKENS)
    if len(ids) != wanted:
        return f"{values[1]} tokens need {wanted} hash_ids of {TRACE_BLOCK_TOKENS} tokens, got {len(ids)}"
    return TraceRequest(values[0], values[1], values[2], tuple(ids))


def _logged(record: dict[str, Any], names: dict[str, int]) -> TraceRequest | str:
    if record["event"] != "request":
        return f"no event is called {record['event']!r}; there are request, {', '.join(OTHER_EVENTS)}"
    arrival = record.get("arrival")
    if not isinstance(arrival, int | float) or isinstance(arrival, bool) or not 0 <= arrival < float("inf"):
        return f"arrival must be seconds >= 0, got {arrival!r}"
    for name in ("block_tokens", "prompt_tokens", "answer_tokens"):
        if not _is_count(record.get(name)):
            return f"{name} must be a whole number >= 0, got {record.get(name)!r}"
    size, prompt, answer = record["block_tokens"], record["prompt_tokens"], record["answer_tokens"]
    if not prompt:
        return "a prompt has at least one token, got prompt_tokens 0"
    keys = record.get("keys")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        return "keys must be a list of strings"
    if size < 1 or len(keys) != (prompt + answer) // size:
        return f"{prompt} + {answer} tokens have {(prompt + answer) // max(1, size)} full blocks, got {len(keys)} keys"
    ids = tuple(names.setdefault(key, len(names)) for key in keys)
    return TraceRequest(arrival * 1000, prompt, answer, ids, size, has_answer=True)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _must_agree(requests: Sequence[TraceRequest]) -> None:
    sizes = {request.block_tokens for request in requests}
    if len(sizes) > 1:
        raise ArgumentError(f"these files have blocks of {sorted(sizes)} tokens: replay those of one size at a time")


def _renumbered(requests: list[TraceRequest]) -> list[TraceRequest]:
    """The same requests, with ids small enough for each block to have tokens of its own."""
    highest = max((id for request in requests for id in request.hash_ids), default=0)
    if not requests or (highest + 1) * requests[0].block_tokens <= MAX_TOKEN - len(requests):
        return requests
    names: dict[int, int] = {}
    new = [tuple(names.setdefault(id, len(names)) for id in request.hash_ids) for request in requests]
    if len(names) * requests[0].block_tokens > MAX_TOKEN - len(requests):
        raise RangeError(
            f"{len(names)} different blocks of {requests[0].block_tokens} tokens are more than "
            f"{MAX_TOKEN} token ids can tell apart; replay the trace in parts"
        )
    return [replace(request, hash_ids=ids) for request, ids in zip(requests, new, strict=True)]


def write_trace(requests: Iterable[TraceRequest], path: str | Path) -> int:
    """Write requests in Mooncake's format; returns how many. Compressed if the name says so."""
    lines = []
    for request in requests:
        if request.block_tokens != TRACE_BLOCK_TOKENS:
            raise ArgumentError(
                f"Mooncake's format has blocks of {TRACE_BLOCK_TOKENS} tokens, the request {request.block_tokens}"
            )
        record = {
            "timestamp": round(request.timestamp_ms),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.hash_ids),
        }
        lines.append(json.dumps(record) + "\n")
    data = "".join(lines).encode()
    match Path(path).suffix:
        case ".gz":
            data = gzip.compress(data)
        case ".zst":
            data = _zstandard().ZstdCompressor().compress(data)
    Path(path).write_bytes(data)
    return len(lines)


def _lines(path: Path) -> Iterator[bytes]:
    match path.suffix:
        case ".gz":
            with gzip.open(path, "rb") as file:
                yield from file
        case ".zst":
            yield from _zstd_lines(path)
        case _:
            with open(path, "rb") as file:
                yield from file


def _zstd_lines(path: Path) -> Iterator[bytes]:
    """All frames of a file. One that ends early raises EOFError, which zstandard's own reader does not."""
    new, left, frame = _zstandard().ZstdDecompressor, b"", None
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            while data:
                frame = frame or new().decompressobj()
                *lines, left = (left + frame.decompress(data)).split(b"\n")
                yield from lines
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    yield left
    if frame is not None:
        raise EOFError("it ends inside a frame")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UnavailableError("a .zst file needs zstandard: pip install 'kvtier[replay]'") from error
    return zstandard


def _zstd_error() -> type[Exception]:
    """What zstandard raises, or an exception that nothing raises where it is not installed."""
    try:
        return _zstandard().ZstdError  # type: ignore[no-any-return]
    except UnavailableError:
        return gzip.BadGzipFile
