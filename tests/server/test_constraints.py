"""The engine process compiles a schema once per tenant, in a separate thread, while other requests continue."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvtier.engine.engine import EngineConfig
from kvtier.engine.llm import LLM
from kvtier.engine.params import SamplingParams
from kvtier.engine.schemas import Grammar, SchemaCompiler
from kvtier.engine.tokenizer import load_tokenizer
from kvtier.errors import ArgumentError, UnavailableError
from kvtier.server import schema_cache
from kvtier.server.engine_process import EngineServer
from kvtier.server.messages import ENGINE_CODEC, SHUTDOWN, Abort, Call, Channel, Reply, Started, StepOutputs, Submit
from kvtier.server.schema_cache import SchemaCompilations

pytest.importorskip("llguidance")
WAIT = 120.0
# This schema takes 2 s to compile, so later messages arrive during the compilation.
SLOW = Grammar("json", json.dumps({"type": "object", "properties": {f"some property {i}": {} for i in range(3000)}}))
OBJECT = Grammar("json", '{"type": "object"}')
INVALID = Grammar("json", '{"type": "nonsense"}')


def new_compilations(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    # the tiny model has 259 tokens, and token 257 ends an answer
    return SchemaCompilations(lambda: SchemaCompiler(tokenizer.to_json(), 259, [257]))


def test_schema_is_compiled_once_per_tenant(tiny_model):
    compilations = new_compilations(tiny_model)
    first = compilations.get(OBJECT, b"a")
    assert compilations.get(OBJECT, b"a") is first
    assert compilations.get(OBJECT, b"b") is not first
    logits = torch.zeros(259)
    first.result(WAIT)().forbid(logits)
    assert [load_tokenizer(tiny_model).decode([i]) for i in logits.isfinite().nonzero().flatten().tolist()] == ["{"]
    for number in range(20):
        compilations.get(Grammar("json", f'{{"const": {number}}}'), b"a").result(WAIT)
    assert compilations.get(OBJECT, b"a") is not first  # the oldest compilation was evicted


def test_error_for_invalid_schema_is_not_cached(tiny_model):
    compilations = new_compilations(tiny_model)
    failed = compilations.get(INVALID, b"")
    assert isinstance(failed.exception(WAIT), ArgumentError)
    assert compilations.get(INVALID, b"") is not failed
    # The error for the missing model stays unchanged, because kvtier raises it. Errors of libraries become an
    # UnavailableError.
    broken = SchemaCompilations(lambda: SchemaCompiler(load_tokenizer("/nowhere").to_json(), 259, [257]))
    assert not isinstance(broken.get(OBJECT, b"").exception(WAIT), UnavailableError)


def test_concurrent_calls_start_one_compiling_thread(tiny_model, monkeypatch):
    started, both = [], threading.Barrier(2)

    class SlowThread(threading.Thread):
        def __init__(self, **options):
            started.append(self)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)  # wait for a second thread, which must not start
            super().__init__(**options)

    compilations = new_compilations(tiny_model)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: time.sleep(0.1), range(2)))  # starts both threads of the pool
        patched = types.SimpleNamespace(Thread=SlowThread, get_native_id=threading.get_native_id)
        monkeypatch.setattr(schema_cache, "threading", patched)
        futures = list(threads.map(lambda tenant: compilations.get(OBJECT, tenant), (b"a", b"b")))
    for future in futures:
        future.result(WAIT)
    assert len(started) == 1


def test_engine_serves_and_aborts_requests_during_compilation(tiny_model):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = LLM(str(tiny_model), EngineConfig()).engine
        serving = threading.Thread(target=EngineServer(engine, Channel(theirs, ENGINE_CODEC)).run)
        serving.start()
        channel = Channel(ours, ENGINE_CODEC)
        events = iter(channel)
        assert isinstance(next(events).value, Started)
        params = SamplingParams(max_tokens=1, temperature=0)
        channel.send(Submit("slow", (1, 2), params, schema=SLOW))
        channel.send(Submit("wrong", (1, 2), params, schema=INVALID))
        channel.send(Submit("plain", (1, 2), params))
        channel.send(Call(7, "snapshot", {}))
        channel.send(Abort("slow"))
        received = []
        # The error for "wrong" arrives last, because "slow" is compiled first.
        while not any(isinstance(event, Reply) and event.error for event in received):
            received.append(next(events))
        assert received[-1].id == "wrong"
        outputs = [
            output.request_id for event in received if isinstance(event, StepOutputs) for output in event.outputs
        ]
        assert outputs == ["plain"]
        assert [event.id for event in received if isinstance(event, Reply)] == [7, "wrong"]
        channel.send(Submit("again", (1, 2), params, schema=SLOW))  # this schema is already compiled
        assert next(events).outputs[0].request_id == "again"
        channel.send(Submit("last", (1, 2), params, schema=Grammar("json", SLOW.text.replace("some", "other"))))
        channel.send(Call(8, SHUTDOWN, {}))  # shutdown does not wait for the compilation
        serving.join(WAIT)
        assert not serving.is_alive()
