"""Messages between front end and engine process. Invalid bodies are skipped; an invalid length ends the connection."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.engine import EngineConfig
from kvtier.engine.llm import LLM
from kvtier.engine.params import Explanation, FinishReason, Logprobs, Output, Penalties, PromptLogprobs, SamplingParams
from kvtier.engine.schemas import Grammar
from kvtier.errors import ArgumentError, ClosedError, FormatError, KvtierError, RangeError
from kvtier.server.engine_client import EngineClient
from kvtier.server.engine_process import EngineServer
from kvtier.server.messages import (
    ENGINE_CODEC,
    Abort,
    Call,
    Channel,
    EngineFailed,
    Reply,
    Started,
    StepOutputs,
    Submit,
    decode_message,
    encode_message,
    frame,
)

WAIT = 120.0
PARAMS = SamplingParams(
    temperature=0.5,
    penalties=Penalties(1.1, 0.5, -0.5),
    seed=2**64 - 1,
    stop=("a", "b"),
    stop_token_ids=(1, 2),
    logit_bias=((3, -1.5),),
    allowed_token_ids=(3, 4),
    bad_words=((5, 6), (7,)),
    logprobs=2,
    prompt_logprobs=1,
    n=3,
)
OUTPUT = Output(
    "id", 1, "t\N{EURO SIGN}", (5,), (Logprobs(-1.5, ((5, -1.5),)),), FinishReason.STOP, 7, 3, "why",
    (PromptLogprobs(-2.5, 4, ((9, -0.5),)),),
)  # fmt: skip
MESSAGES = [
    Submit("id", (1, 2, 3), PARAMS, 5, b"\0\xff", Grammar("regex", "a+")),
    Submit("id", (1,), SamplingParams()),
    Abort("id"),
    Call(7, "pin", {"tokens": [1, 2], "salt": b"\0", "name": None, "flag": True, "share": 0.5}),
    EngineFailed("why"),
    StepOutputs((OUTPUT,), (Explanation("id", "stop", 1, 2, 3, 4, "m", {"host": 5}, "w", None, 0.5),), 1.25),
    Reply(0, Started(10, 20, 30, 40, 50, (1, 2))),
    Reply(3, {"tiers": [{"name": "device", "used_by": {"": 1}}], "limit": float("inf"), "none": None}),
    Reply("id"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_decoded_message_equals_encoded_message(message):
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RangeError("too long"), RangeError, "too long"),
        (ClosedError("closed"), ClosedError, "closed"),
        (ZeroDivisionError("by zero"), KvtierError, "ZeroDivisionError: by zero"),
    ],
)
def test_error_in_reply_is_decoded_as_an_error_of_kvtier(error, kind, text):
    found = decode_message(encode_message(Reply(1, error=error)))
    assert (found.id, type(found.error), str(found.error)) == (1, kind, text)


def test_numpy_numbers_are_sent_as_python_numbers():
    np = pytest.importorskip("numpy")
    found = decode_message(encode_message(Reply(1, {"count": np.int64(3), "share": np.float32(0.5)})))
    assert found.value == {"count": 3, "share": 0.5}
    with pytest.raises(TypeError, match="cannot be sent"):
        encode_message(Reply(1, {"value": object()}))
    with pytest.raises(TypeError, match="not a message"):
        encode_message("text")


class Harmful:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


@given(data=st.binary(max_size=80), number=st.integers(0, 5))
@settings(max_examples=300)
def test_invalid_body_raises_only_format_error(data, number):
    for body in (data, bytes([number]) + data):
        with contextlib.suppress(FormatError):
            decode_message(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        pickle.dumps(Harmful()),
        b"\x00" + b"\x91" * 100_000,
        b"\x00" + msgspec.msgpack.encode({"id": 5}),
        b"\x00" + msgspec.msgpack.encode({"id": "a", "tokens": [1], "params": {"temperature": 1e9}}),
        b"\x02" + msgspec.msgpack.encode({"id": 1, "name": "x"}),
        encode_message(MESSAGES[0])[:-3],
    ],
    ids=["empty", "type", "pickle", "deep", "missing", "range", "arguments", "truncated"],
)
def test_hostile_body_is_a_format_error(body):
    with pytest.raises(FormatError):
        decode_message(body)


@pytest.fixture
def served(tiny_model):
    """Run an EngineServer on a thread. Yield a connected socket, the channel on this socket, and the thread."""
    ours, theirs = socket.socketpair()
    inner, channel = Channel(theirs, ENGINE_CODEC), Channel(ours, ENGINE_CODEC)
    serving = threading.Thread(target=EngineServer(LLM(str(tiny_model), EngineConfig()).engine, inner).run)
    serving.start()
    yield ours, channel, serving
    channel.end()
    serving.join(WAIT)
    assert not serving.is_alive()
    channel.close()
    inner.close()


def test_engine_process_skips_invalid_frames(served):
    ours, channel, _ = served
    events = iter(channel)
    assert isinstance(next(events).value, Started)
    for body in (b"", b"\xff\xff", b"\x00\x80", pickle.dumps(Harmful())):
        ours.sendall(struct.pack(">I", len(body)) + body)
    channel.send(Call(1, "no such function", {}))
    channel.send(Call(2, "pin", {"wrong": 1}))
    channel.send(Call(3, "snapshot", {}))
    replies = [next(events) for _ in range(3)]
    assert [(reply.id, type(reply.error)) for reply in replies] == [
        (1, ArgumentError),
        (2, KvtierError),
        (3, type(None)),
    ]
    channel.send(Submit("id", (1, 2), SamplingParams(max_tokens=1, temperature=0)))
    assert next(events).outputs[0].request_id == "id"


def test_engine_process_ends_after_frame_of_invalid_length(served):
    ours, _, serving = served
    ours.sendall(b"\xff\xff\xff\xff")
    serving.join(WAIT)
    assert not serving.is_alive()


def test_front_end_skips_invalid_frames(caplog):
    """Without an engine process, `_read` gets four invalid bodies, a valid reply and an invalid length."""

    async def main():
        client = object.__new__(EngineClient)
        client._boxes, client._calls, client.why = {}, {}, "the engine process ended"
        client.ended = asyncio.Event()
        reply = asyncio.get_running_loop().create_future()
        client._calls[1] = reply
        reader = asyncio.StreamReader()
        for body in (b"", b"\xff", pickle.dumps(Harmful()), b"\x04\xc0"):
            reader.feed_data(struct.pack(">I", len(body)) + body)
        reader.feed_data(frame(Reply(1, {"ok": True}), ENGINE_CODEC))
        reader.feed_data(b"\xff\xff\xff\xff")
        await asyncio.wait_for(client._read(reader), WAIT)
        assert await reply == {"ok": True}
        assert client.ended.is_set()

    asyncio.run(main())
    assert caplog.text.count("invalid message, which is skipped") == 4
