"""Tracing: OpenTelemetry spans of each completion request, sent over OTLP/HTTP. Needs the extra `otel`.

    kvtier.request ─┬─ queue ──┬─ match ── load ── prefill ── first_token ── decode
                    └─ fetch ──┘

A request has one server span, with child spans for the phases of each prompt. The child spans are created when the
request ends, from its Explanations, so tracing costs nothing per token. The spans contain no prompts and no answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue

import kvtier
from kvtier.engine.params import Explanation
from kvtier.server.request_log import RequestRecord

_PROPAGATOR = TraceContextTextMapPropagator()
_PROBLEMS = ("error", "timeout", "refused", "disconnected")


class _Phase(NamedTuple):
    """A child span. Times are values of time.monotonic()."""

    name: str
    start: float
    end: float
    attributes: Attributes = None


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The open server span of a request."""

    span: Span
    clock_offset: int
    """Unix time minus monotonic time, in nanoseconds."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers for the response: the context of the server span in W3C's format."""
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, set_span_in_context(self.span))
        return headers

    def nanoseconds(self, monotonic: float) -> int:
        return round(monotonic * 1e9) + self.clock_offset


class Tracing:
    """Creates spans and sends them to a collector from a separate thread.

    OpenTelemetry's environment variables apply, for example OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        self._model = model
        resource = Resource.create({"service.version": kvtier.__version__})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "kvtier"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("kvtier.server", kvtier.__version__)

    def begin(self, headers: Mapping[str, str], began: float) -> RequestTrace:
        """Start the server span of a request. `began` is a value of time.monotonic().

        The headers `traceparent` and `tracestate` name the parent span. Without a valid parent, a new trace starts.
        """
        offset = time.time_ns() - time.monotonic_ns()
        context = _PROPAGATOR.extract(headers)
        start = round(began * 1e9) + offset
        return RequestTrace(
            self._tracer.start_span("kvtier.request", context, SpanKind.SERVER, start_time=start), offset
        )

    def end(
        self, trace: RequestTrace, began: float, record: RequestRecord, explanations: Iterable[Explanation]
    ) -> None:
        """End the server span of a finished request. If the span is recorded, first add the phases of the request."""
        span = trace.span
        if span.is_recording():
            span.set_attributes(_usage(record, self._model))
            if record.finish in _PROBLEMS:
                span.set_status(StatusCode.ERROR, record.finish)
            for explanation in explanations:
                self._add_phases(trace, explanation, began, record)
        span.end(trace.nanoseconds(began + record.seconds))

    def close(self) -> None:
        """Send the remaining spans and stop the thread. May block for 30 s if the collector does not answer."""
        self._provider.shutdown()

    def _add_phases(self, trace: RequestTrace, explanation: Explanation, began: float, record: RequestRecord) -> None:
        context = set_span_in_context(trace.span)
        name = {"kvtier.request_id": explanation.request_id}
        for phase in _phases(explanation, began, record):
            attributes = {**name, **(phase.attributes or {})}
            start, end = trace.nanoseconds(phase.start), trace.nanoseconds(max(phase.start, phase.end))
            self._tracer.start_span(phase.name, context, attributes=attributes, start_time=start).end(end)


def _phases(explanation: Explanation, began: float, record: RequestRecord) -> Iterator[_Phase]:
    """Yield the phases that a prompt went through."""
    arrived, ended = explanation.arrived_at, began + record.seconds
    if explanation.waited_seconds is None:  # the request ended while it was in the queue
        yield _Phase("queue", arrived, ended)
        return
    admitted = arrived + explanation.waited_seconds
    yield _Phase("queue", arrived, admitted)
    if explanation.fetch_seconds is not None:
        start, end = explanation.fetch_seconds
        yield _Phase("fetch", arrived + start, arrived + end)
    yield _Phase("match", admitted, admitted, _explained(explanation))  # too short to measure
    computing = admitted
    if explanation.loaded_seconds is not None:
        computing = arrived + explanation.loaded_seconds
        yield _Phase("load", admitted, computing)
    if explanation.ttft_seconds is None:
        yield _Phase("prefill", computing, ended)
        return
    first = arrived + explanation.ttft_seconds
    yield _Phase("prefill", min(computing, first), first)  # a layer-wise load overlaps the prefill
    if record.ttft_seconds is not None:
        delivered = began + record.ttft_seconds
        yield _Phase("first_token", first, delivered)
        yield _Phase("decode", delivered, ended, {"kvtier.new_tokens": explanation.num_new_tokens})


def _usage(record: RequestRecord, model: str) -> dict[str, AttributeValue]:
    """Return the attributes of a server span. Standard attributes have the names that OpenTelemetry defines."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "text_completion" if record.endpoint == "completion" else "chat",
        "gen_ai.request.model": model,
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": [record.finish],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.new_tokens,
        "kvtier.cached_tokens": record.cached_tokens,
        "kvtier.tenant": record.tenant,
    }
    if record.ttft_seconds is not None:
        attributes["kvtier.ttft_seconds"] = record.ttft_seconds
    return attributes


def _explained(explanation: Explanation) -> dict[str, AttributeValue]:
    """Return the explanation of a request as attributes."""
    return {
        "kvtier.state": explanation.state,
        "kvtier.prompt_tokens": explanation.num_prompt_tokens,
        "kvtier.cached_tokens": explanation.num_cached_tokens,
        "kvtier.preemptions": explanation.num_preempted,
        "kvtier.miss": explanation.miss,
        "kvtier.why_loaded": explanation.why_loaded,
        **{f"kvtier.tokens_from.{tier}": count for tier, count in explanation.tokens_from.items()},
    }
