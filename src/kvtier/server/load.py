"""Fast load generator for `kvtier bench`. Its clients read streams without an HTTP library and can disconnect early."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np


@dataclass(frozen=True, slots=True)
class LoadOptions:
    url: str
    model: str
    clients: int = 8
    requests: int = 0
    """Total number of requests from all clients. 0 sets no limit. The load also ends after `seconds`, if set."""
    seconds: float = 0.0
    max_tokens: int = 64
    prompt_words: int = 64
    shared_words: int = 48
    """Number of words at the start of a prompt that are the same in all prompts."""
    disconnect_share: float = 0.0
    """Share of the requests whose client disconnects before the response is complete."""
    key: str = ""
    seed: int = 0


@dataclass(slots=True)
class LoadReport:
    """Results, updated while the load runs."""

    statuses: Counter[int] = field(default_factory=Counter)
    """Number of responses by status. Status 0 stands for requests without a response."""
    num_disconnected: int = 0
    num_tokens: int = 0  # one per event, although an event can contain several tokens
    num_incomplete: int = 0
    """Number of streams that ended without [DONE], although the client did not disconnect."""
    ttfts: list[float] = field(default_factory=list)  # seconds from the request to the first event of each stream
    gaps: list[float] = field(default_factory=list)
    """Seconds between successive events of one stream."""
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return the figures to print, by name. Names that end in `_ms` are in milliseconds."""
        summary: dict[str, Any] = {
            "requests": sum(self.statuses.values()),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "disconnected": self.num_disconnected,
            "incomplete": self.num_incomplete,
            "tokens": self.num_tokens,
            "seconds": round(self.seconds, 2),
            "tokens_per_s": round(self.num_tokens / self.seconds, 1) if self.seconds else 0.0,
        }
        for name, values in (("ttft", self.ttfts), ("gap", self.gaps)):
            points = np.percentile(values, (50, 90, 99)) * 1e3 if values else (0.0, 0.0, 0.0)
            summary |= {f"{name}_p{p}_ms": round(float(v), 2) for p, v in zip((50, 90, 99), points, strict=True)}
        return summary


async def run_load(options: LoadOptions, progress: Callable[[LoadReport], object] = lambda _: None) -> LoadReport:
    """Run the clients until the number of requests or the time limit is reached. Complete the requests in flight."""
    report, began = LoadReport(), time.monotonic()
    numbers = iter(range(options.requests)) if options.requests else iter(range(1 << 62))
    deadline = began + options.seconds if options.seconds else float("inf")

    async def client(number: int) -> None:
        rng = random.Random(options.seed * 1009 + number)  # different for each client and seed, for up to 1,009 clients
        while time.monotonic() < deadline and next(numbers, None) is not None:
            await _send_request(options, rng, report)
            progress(report)

    progress(report)
    async with asyncio.TaskGroup() as group:
        for number in range(options.clients):
            group.create_task(client(number))
    report.seconds = time.monotonic() - began
    return report


async def _send_request(options: LoadOptions, rng: random.Random, report: LoadReport) -> None:
    leave_after = rng.randrange(options.max_tokens) if rng.random() < options.disconnect_share else -1  # -1: never
    server = urlsplit(options.url)
    status, writer = 0, None
    try:
        reader, writer = await asyncio.open_connection(server.hostname, server.port)
        sent = time.monotonic()
        writer.write(_request(options, _body(options, rng)))
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if status == 200:
            await _read_events(reader, sent, leave_after, report)
    except (OSError, IndexError, ValueError):
        report.num_incomplete += status == 200
    finally:
        report.statuses[status] += 1
        if writer is not None:
            writer.transport.abort() if leave_after >= 0 else writer.close()


async def _read_events(reader: asyncio.StreamReader, sent: float, leave_after: int, report: LoadReport) -> None:
    last, count = 0.0, 0
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue  # chunk sizes and blank lines
        if line.startswith(b"data: [DONE]"):
            return
        now = time.monotonic()
        report.num_tokens += 1
        report.gaps.append(now - last) if last else report.ttfts.append(now - sent)
        last = now
        count += 1
        if 0 <= leave_after <= count:
            report.num_disconnected += 1
            return
    report.num_incomplete += 1


def _body(options: LoadOptions, rng: random.Random) -> Mapping[str, Any]:
    shared = random.Random(options.seed)
    words = [f"{shared.randrange(10_000)}" for _ in range(options.shared_words)]
    words += [f"{rng.randrange(10_000)}" for _ in range(options.prompt_words - options.shared_words)]
    return {
        "model": options.model,
        "prompt": " ".join(words),
        "max_tokens": options.max_tokens,
        "ignore_eos": True,
        "stream": True,
    }


def _request(options: LoadOptions, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    key = f"Authorization: Bearer {options.key}\r\n" if options.key else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(options.url).netloc}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data
