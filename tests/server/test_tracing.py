"""A stub OTLP collector receives one complete trace per sampled request."""

from __future__ import annotations

import gzip
import secrets
import socket
import sys
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvtier.errors import UnavailableError
from kvtier.server.config import ServerConfig
from kvtier.server.serve import serve
from server_support import ServerProcess

pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvtier[otel]'")
collector_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

PARENT = "00f067aa0ba902b7"
PROMPT = "a secret prompt that fills a few blocks. " * 4
PHASES = ["queue", "fetch", "match", "load", "prefill", "first_token", "decode"]


class Collector:
    """An OTLP/HTTP collector that stores received spans by trace."""

    def __init__(self) -> None:
        self.spans: dict[str, list] = defaultdict(list)
        self.resources: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                collector.take(collector_pb2.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def take(self, message) -> None:
        for resource in message.resource_spans:
            self.resources |= {each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.trace_id.hex()].append(span)

    def trace(self, trace_id: str) -> tuple[object, list]:
        """Wait for the span `kvtier.request` of a trace. Return this span, and the other spans in order of arrival."""
        deadline = time.monotonic() + 60
        while not (roots := [span for span in self.spans[trace_id] if span.name == "kvtier.request"]):
            assert time.monotonic() < deadline, f"the trace did not arrive: {self.spans}"
            time.sleep(0.02)
        (root,) = roots
        return root, [span for span in self.spans[trace_id] if span is not root]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def traced(tiny_model, collector, tmp_path_factory):
    """Yield a server that has three tiers and sends its traces to a collector."""
    folder = tmp_path_factory.mktemp("traced")
    options = ("--model", str(tiny_model), "--threads", "1", "--otlp-traces-endpoint", collector.endpoint)
    tiers = ("--blocks", "64", "--host-blocks", "64", "--disk", str(folder / "kv"), "--always-load")
    server = ServerProcess(folder / "log", *options, *tiers, env={"OTEL_BSP_SCHEDULE_DELAY": "50"})
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log, server.log


@pytest.fixture
def client():
    """Return a client's trace id, and the header `traceparent` with this id."""
    trace = secrets.token_hex(16)
    return trace, f"00-{trace}-{PARENT}-01"


def ask(server, traceparent: str = "", **options):
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **options}
    answer = server.post("/v1/completions", json=body, headers={"traceparent": traceparent} if traceparent else {})
    assert answer.status_code == 200, answer.text
    return answer


def attributes(span) -> dict[str, object]:
    found = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return {key: value for key, value in found.items() if not key.endswith("finish_reasons")}


def test_request_has_one_complete_trace_with_id_of_client(traced, collector, client):
    trace, traceparent = client
    ask(traced)
    traced.wait_for(lambda state: state["tiers"][2]["num_used"] >= len(PROMPT) // 16)  # all blocks are on disk
    assert traced.post("/control/reset", {}).status_code == 200  # the next request must fetch and load its blocks
    answer = ask(traced, traceparent)
    explained = traced.get(f"/control/explain/{answer.headers['x-request-id']}").json()
    root, children = collector.trace(trace)
    assert root.parent_span_id.hex() == PARENT
    assert answer.headers["traceparent"] == f"00-{trace}-{root.span_id.hex()}-01"
    assert sorted(span.name for span in children) == sorted(PHASES)
    assert {span.parent_span_id for span in children} == {root.span_id}
    spans = {span.name: span for span in children}
    for span in children:
        start, end = span.start_time_unix_nano, span.end_time_unix_nano
        assert root.start_time_unix_nano <= start <= end <= root.end_time_unix_nano, span.name
    for before, after in (("queue", "match"), ("match", "load"), ("load", "prefill"), ("prefill", "first_token")):
        assert spans[before].end_time_unix_nano == pytest.approx(spans[after].start_time_unix_nano, abs=2), before
    assert spans["decode"].end_time_unix_nano == root.end_time_unix_nano
    waited = explained["waited_seconds"] * 1e9
    assert spans["queue"].end_time_unix_nano - spans["queue"].start_time_unix_nano == pytest.approx(waited, abs=2)
    assert attributes(spans["match"]) == {
        "kvtier.request_id": explained["request_id"],
        "kvtier.state": "length",
        "kvtier.prompt_tokens": len(PROMPT),
        "kvtier.cached_tokens": explained["num_cached_tokens"],
        "kvtier.preemptions": 0,
        "kvtier.miss": explained["miss"],
        "kvtier.why_loaded": explained["why_loaded"],
        **{f"kvtier.tokens_from.{tier}": count for tier, count in explained["tokens_from"].items()},
    }
    assert explained["tokens_from"]["disk"] > 0
    usage = attributes(root)
    assert (usage["gen_ai.usage.input_tokens"], usage["gen_ai.usage.output_tokens"]) == (len(PROMPT), 5)
    assert (usage["gen_ai.response.id"], usage["gen_ai.request.model"]) == (explained["request_id"], traced.model)
    assert "kvtier" in collector.resources
    assert "secret" not in str(collector.spans)


def test_requests_without_valid_parent_start_new_traces(traced, collector):
    found = set()
    for traceparent in ("", "00-nonsense", f"ff-{'5' * 32}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01"):
        _, trace_id, span_id, flags = ask(traced, traceparent, stream=True).headers["traceparent"].split("-")
        root, children = collector.trace(trace_id)
        assert (root.span_id.hex(), root.parent_span_id, int(flags, 16) & 1) == (span_id, b"", 1)
        assert {"queue", "match", "prefill", "first_token", "decode"} <= {span.name for span in children}
        found.add(trace_id)
    assert len(found) == 4


def test_trace_of_two_prompts_has_the_phases_of_both(traced, collector, client):
    trace, traceparent = client
    answer = ask(traced, traceparent, prompt=[PROMPT, "another"])
    _, children = collector.trace(trace)
    prompts = {attributes(span)["kvtier.request_id"] for span in children}
    assert prompts == {f"{answer.headers['x-request-id']}-{number}" for number in range(2)}
    assert [span.name for span in children].count("decode") == 2


def test_request_that_is_not_sampled_sends_no_spans(traced, collector, client):
    trace, traceparent = client
    unsampled = "5" * 32
    assert ask(traced, f"00-{unsampled}-{PARENT}-00").headers["traceparent"].endswith("-00")
    ask(traced, traceparent)
    collector.trace(trace)
    assert unsampled not in collector.spans


def test_refused_request_is_an_error_in_its_trace(traced, collector, client):
    trace, traceparent = client
    assert traced.post("/control/sleep").status_code == 200
    body = {"model": traced.model, "prompt": PROMPT, "max_tokens": 5}
    answer = traced.post("/v1/completions", json=body, headers={"traceparent": traceparent})
    assert traced.post("/control/wake").status_code == 200
    assert answer.status_code == 503
    root, children = collector.trace(trace)
    assert (root.status.code, root.status.message, children) == (2, "refused", [])  # 2 is STATUS_CODE_ERROR


def test_server_without_collector_answers_and_stops(start, client):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
    server = start("--otlp-traces-endpoint", endpoint, env={"OTEL_BSP_SCHEDULE_DELAY": "50"})
    ask(server, client[1])
    assert server.stop() == 0


def test_server_without_otlp_option_sends_no_traceparent(server, client):
    assert "traceparent" not in ask(server, client[1]).headers


def test_tracing_without_otel_extra_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.delitem(sys.modules, "kvtier.server.tracing", raising=False)
    with pytest.raises(UnavailableError, match=r"pip install 'kvtier\[otel\]'"):
        serve(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))
