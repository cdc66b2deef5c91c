"""Read traces of served requests. A trace contains lengths, times and shared prefixes, but no text.

Each line of a plain, .gz or .zst file is a JSON object. There are two formats for requests:

    Mooncake's    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..]}
    kvtier's log  {"event": "request", "arrival": 27.482, "block_tokens": 16, "prompt_tokens": 6955,
                   "answer_tokens": 52, "keys": ["9f86d081884c7d65", ..]}

The learned eviction policy uses the optional fields `finish_reason`, `session_id`, `session_over` and
`expects_return_seconds`. A line {"event": "close", "time": 35.0, "session_id": ".."} marks the end of a session.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import ArgumentError, RangeError, UnavailableError
from kvtier.index import NO_HINTS, Hints, Outcome

TRACE_BLOCK_TOKENS = 512  # block size of Mooncake's format
MAX_TOKEN = 2**31 - 1
OTHER_EVENTS = ("start", "add", "step", "report", "update", "fail", "cancel", "discard")
"""Other events that recorder.py and benchmarks/step_recorder.py write to logs. They are skipped."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request in a trace: lengths, arrival time, and block ids that identify shared prefixes."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One id per block. If the first n ids of two requests are equal, their first n blocks are equal."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    has_answer: bool = False
    """True (kvtier's log): `hash_ids` covers all full blocks of prompt and answer.
    False (Mooncake's format): `hash_ids` covers only the prompt, and its last block may be partial."""
    finish_reason: str = ""
    hints: Hints = NO_HINTS
    closed_at_ms: float | None = None
    """Time at which the session was closed. Set only in the last request of the session before that time."""

    @property
    def outcome(self) -> Outcome:
        """Information that a server has at the end of the request."""
        return Outcome(self.output_tokens, self.finish_reason, self.hints)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Ids of the full blocks of the prompt. A cache holds only full blocks."""
        return self.hash_ids[: self.input_tokens // self.block_tokens]

    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the prompt as tokens. A block with id h has the tokens h * block_tokens, h * block_tokens + 1, ..."""
        return self.sequence()[: self.input_tokens]

    def sequence(self, number: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the tokens of prompt and answer. Tokens outside the blocks with ids are unique to request `number`."""
        size = self.block_tokens
        ids = np.array(self.hash_ids, np.int64)[:, None] * size + np.arange(size)
        known = (ids & MAX_TOKEN).astype(np.int32).reshape(-1)
        num_tokens = self.input_tokens + self.output_tokens
        if not self.has_answer:  # the last block may be partial: it ends with the prompt
            known = known[: self.input_tokens]
        rest = num_tokens - len(known)
        return np.append(known, np.full(rest, MAX_TOKEN - number, np.int32)) if rest else known


@dataclass(frozen=True, slots=True)
class SessionClose:
    """The end of a session in a trace."""

    time_ms: float
    session_id: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one or several files."""

    requests: tuple[TraceRequest, ...]
    problems: tuple[str, ...]
    """One message per invalid line or damaged file, in the form "file:line: reason"."""


def read_trace(*paths: str | Path) -> Trace:
    """Read one or several files. Requests are sorted by time. Invalid lines are skipped and listed in `problems`."""
    requests: list[TraceRequest] = []
    problems: list[str] = []
    names: dict[str, int] = {}
    closes: list[SessionClose] = []
    for path in paths:
        number = 0
        try:
            for number, line in enumerate(_lines(Path(path)), 1):
                parsed = parse_line(line, names) if line.strip() else None
                if isinstance(parsed, str):
                    problems.append(f"{path}:{number}: {parsed}")
                elif isinstance(parsed, SessionClose):
                    closes.append(parsed)
                elif parsed is not None:
                    requests.append(parsed)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            problems.append(f"{path}:{number + 1}: the compressed file is damaged from here on: {error}")
        except OSError as error:
            raise ArgumentError(f"cannot read the trace {path}: {error.strerror or error}") from error
    requests.sort(key=lambda request: request.timestamp_ms)
    sizes = {request.block_tokens for request in requests}
    if len(sizes) > 1:
        raise ArgumentError(f"the files have blocks of {sorted(sizes)} tokens; replay each block size separately")
    return Trace(tuple(_renumbered(_closed(requests, closes))), tuple(problems))


def parse_line(line: bytes | str, names: dict[str, int] | None = None) -> TraceRequest | SessionClose | str | None:
    """Return the request or the session end that a line contains. Return None for any other event of kvtier's log.

    If the line is invalid, return the reason as a string. `names` maps the keys in the log to numbers. Keys that are
    new in this line are added to `names`.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"not JSON: {error}"
    if not isinstance(record, dict):
        return f"expected an object, got {type(record).__name__}"
    if record.get("event") in OTHER_EVENTS:
        return None
    if record.get("event") == "close":
        return _close(record)
    request = _logged(record, {} if names is None else names) if "event" in record else _mooncake(record)
    return request if isinstance(request, str) else _with_hints(request, record)


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
        return f"{values[1]} tokens need {wanted} hash_ids, one per {TRACE_BLOCK_TOKENS} tokens, got {len(ids)}"
    return TraceRequest(values[0], values[1], values[2], tuple(ids))


def _logged(record: dict[str, Any], names: dict[str, int]) -> TraceRequest | str:
    if record["event"] != "request":
        return f"unknown event {record['event']!r}; expected request, close, {', '.join(OTHER_EVENTS)}"
    arrival = record.get("arrival")
    if not _is_seconds(arrival):
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
    return TraceRequest(float(arrival or 0) * 1000, prompt, answer, ids, size, has_answer=True)


def _close(record: dict[str, Any]) -> SessionClose | str:
    time, session = record.get("time"), record.get("session_id")
    if not _is_seconds(time):
        return f"time must be seconds >= 0, got {time!r}"
    if not isinstance(session, str) or not session:
        return f"session_id must be a non-empty string, got {session!r}"
    return SessionClose(float(time or 0) * 1000, session)


def _with_hints(request: TraceRequest, record: dict[str, Any]) -> TraceRequest | str:
    """Add the optional fields of a record to its request."""
    for name, kind in (("finish_reason", str), ("session_id", str), ("session_over", bool)):
        if record.get(name) is not None and not isinstance(record[name], kind):
            return f"{name} must be a {kind.__name__}, got {record[name]!r}"
    finish, session, over = record.get("finish_reason"), record.get("session_id"), record.get("session_over")
    seconds = record.get("expects_return_seconds")
    if seconds is not None and not _is_seconds(seconds):
        return f"expects_return_seconds must be seconds >= 0, got {seconds!r}"
    if finish is None and session is None and over is None and seconds is None:
        return request
    hints = Hints(session or "", bool(over), seconds) if session or over or seconds is not None else NO_HINTS
    return replace(request, finish_reason=finish or "", hints=hints)


def _closed(requests: list[TraceRequest], closes: list[SessionClose]) -> list[TraceRequest]:
    """Set `closed_at_ms` in the last request of a session before each close. `requests` are sorted by time."""
    if not closes:
        return requests
    ends = [(request.timestamp_ms, 0, number) for number, request in enumerate(requests) if request.hints.session_id]
    ends += [(close.time_ms, 1, number) for number, close in enumerate(closes)]
    last: dict[str, int] = {}
    closed = list(requests)
    for time, is_close, number in sorted(ends):
        if not is_close:
            last[requests[number].hints.session_id] = number
        elif (at := last.pop(closes[number].session_id, None)) is not None:
            closed[at] = replace(requests[at], closed_at_ms=time)
    return closed


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _renumbered(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Renumber the block ids if `sequence` would use the same token inside and outside the blocks with ids."""
    highest = max((id for request in requests for id in request.hash_ids), default=0)
    if not requests or (highest + 1) * requests[0].block_tokens <= MAX_TOKEN - len(requests):
        return requests
    names: dict[int, int] = {}
    new = [tuple(names.setdefault(id, len(names)) for id in request.hash_ids) for request in requests]
    if len(names) * requests[0].block_tokens > MAX_TOKEN - len(requests):
        raise RangeError(
            f"{len(names)} different blocks of {requests[0].block_tokens} tokens need more token ids than the "
            f"{MAX_TOKEN - len(requests)} that are available; replay the trace in parts"
        )
    return [replace(request, hash_ids=ids) for request, ids in zip(requests, new, strict=True)]


def number_paths(ids: Sequence[int], numbers: dict[tuple[int, int], int]) -> list[int]:
    """Return one number for each prefix of `ids`. Equal prefixes have equal numbers. Add new prefixes to `numbers`."""
    paths, above = [], -1
    for id in ids:
        above = numbers.setdefault((above, id), len(numbers))
        paths.append(above)
    return paths


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
    """Yield the lines of a file. Raise EOFError if a frame is truncated, which zstandard's own reader ignores."""
    try:
        import zstandard
    except ImportError as error:
        raise UnavailableError("a .zst file needs zstandard: pip install 'kvtier[replay]'") from error
    left, frame = b"", None
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    *lines, left = (left + frame.decompress(data)).split(b"\n")
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                yield from lines
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    yield left
    if frame is not None:
        raise EOFError("the file ends inside a frame")
