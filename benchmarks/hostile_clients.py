"""The measuring clients of benchmarks.hostile: streams of a tenant, and probes of /health, each in its own process.

Both print "ready", read a line from standard input, measure for a number of seconds and print one JSON object. They use
nothing but asyncio, so that the client is not what is measured. Neither omits the time in which the server stands
still: a probe starts every 50 ms whether or not earlier ones were answered, and a stream's open gap counts at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PROBE_EVERY_S = 0.05
PROBE_TIMEOUT_S = 10.0
RETRY_S = 0.1


@dataclass(frozen=True)
class Target:
    """Address of the server, its model, and a client's key."""

    host: str
    port: int
    model: str
    key: str = ""

    def request(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST request on a connection of its own."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True)
class Ask:
    """One stream: its request, and the text that an undisturbed server answers."""

    body: dict[str, Any]
    expected: str


@dataclass
class StreamReport:
    """Gaps of all streams in seconds, and the streams that failed."""

    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_complete: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    """Streams that ended early or with another text, by reason."""


class Stream:
    """One client that streams the same answer again and again. The time until a first token is a gap as well."""

    def __init__(self, target: Target, ask: Ask, report: StreamReport) -> None:
        self._target = target
        self._ask = ask
        self._report = report
        self._last = time.monotonic()
        self._measured_from = float("inf")
        self.streaming = asyncio.Event()

    def measure(self, now: float) -> None:
        """Count gaps that end after this moment."""
        self._measured_from = now

    def finish(self, now: float) -> None:
        """Count the gap that is still open."""
        self._report.gaps.append(now - self._last)

    async def run(self) -> None:
        """Stream until cancelled."""
        while True:
            self._last = time.monotonic()
            try:
                wrong = await self._once()
            except (OSError, asyncio.IncompleteReadError, IndexError, ValueError) as error:
                wrong = f"connection: {type(error).__name__}"
            if wrong:
                self._report.wrong[wrong] += 1
                await asyncio.sleep(RETRY_S)
            else:
                self._report.num_complete += 1

    async def _once(self) -> str:
        """Read one answer. Returns why it is wrong, or an empty string."""
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            writer.write(self._target.request("/v1/completions", json.dumps(self._ask.body).encode()))
            status = (await reader.readline()).split()[1].decode()
            while (await reader.readline()).strip():
                pass
            return await self._read(reader) if status == "200" else f"status {status}"
        finally:
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> str:
        text = ""
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue  # chunk sizes and blank lines
            if line.startswith(b"data: [DONE]"):
                return "" if text == self._ask.expected else "another text"
            event = json.loads(line[6:])
            if "error" in event:
                return f"error event {event['error'].get('code') or event['error'].get('type')}"
            self._count()
            text += event["choices"][0]["text"]
            if not self._ask.expected.startswith(text):
                return "another text"
        return "ended without [DONE]"

    def _count(self) -> None:
        now = time.monotonic()
        if now >= self._measured_from:
            self._report.gaps.append(now - self._last)
            self._report.num_tokens += 1
        self._last = now
        self.streaming.set()


async def stream(target: Target, asks: Sequence[Ask], seconds: float) -> StreamReport:
    """Run all streams; measure once each of them has a first token."""
    report = StreamReport()
    streams = [Stream(target, ask, report) for ask in asks]
    tasks = [asyncio.create_task(each.run()) for each in streams]
    async with asyncio.timeout(120):
        for each in streams:
            await each.streaming.wait()
    await wait_for_start()
    begin = time.monotonic()
    for each in streams:
        each.measure(begin)
    await asyncio.sleep(seconds)
    for each in streams:
        each.finish(time.monotonic())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return report


@dataclass
class ProbeReport:
    """Seconds from when a probe was due until its answer was whole, and the failures by kind."""

    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


async def probe(target: Target, seconds: float) -> ProbeReport:
    """Ask for /health every 50 ms, on a new connection each time."""
    report = ProbeReport()
    await wait_for_start()
    begin = time.monotonic()
    tasks = []
    for number in range(round(seconds / PROBE_EVERY_S)):
        due = begin + number * PROBE_EVERY_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(_probe_once(target, due, report)))
    await asyncio.gather(*tasks)
    return report


async def _probe_once(target: Target, due: float, report: ProbeReport) -> None:
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + due + PROBE_TIMEOUT_S - time.monotonic()):
            reader, writer = await asyncio.open_connection(target.host, target.port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {target.host}\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read()
            finally:
                writer.transport.abort()
        if not answer.startswith(b"HTTP/1.1 200"):
            report.failures[answer[9:12].decode(errors="replace") or "no answer"] += 1
    except TimeoutError:
        report.failures["timeout"] += 1
    except OSError as error:
        report.failures[type(error).__name__] += 1
    report.seconds.append(time.monotonic() - due)


async def wait_for_start() -> None:
    """Print "ready" and read one line without blocking the event loop."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


def main() -> None:
    """Run the client that the argument describes: a JSON object."""
    options = json.loads(sys.argv[1])
    target, seconds = Target(**options["target"]), float(options["seconds"])
    if options["role"] == "probe":
        report: StreamReport | ProbeReport = asyncio.run(probe(target, seconds))
    else:
        report = asyncio.run(stream(target, [Ask(**ask) for ask in options["asks"]], seconds))
    print(json.dumps(vars(report)), flush=True)


if __name__ == "__main__":
    main()
