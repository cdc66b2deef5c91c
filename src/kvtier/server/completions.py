"""Completions: runs a prepared request on the engine and returns the HTTP response."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from kvtier.engine.params import FinishReason, Output, SamplingParams
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ArgumentError, KvtierError
from kvtier.server.admission import Admission
from kvtier.server.completion_format import AnswerFormat, CompletionFormat, Usage, with_usage
from kvtier.server.config import Limits, Tenant, salt_of, tenant_name
from kvtier.server.engine_client import EngineLink, Mailbox
from kvtier.server.errors import ApiError, from_engine
from kvtier.server.fields import HEADER
from kvtier.server.grammars import AnswerGrammar
from kvtier.server.messages import Submit
from kvtier.server.messages_api import MessagesRequest
from kvtier.server.messages_format import MessagesFormat
from kvtier.server.middleware import EventStream, before_deadline, request_timeout, unless_gone
from kvtier.server.prepare import Prepared
from kvtier.server.prompt_report import PromptReport
from kvtier.server.protocol import ChatRequest, CompletionRequest, StreamOptions
from kvtier.server.request_log import RequestLog, RequestRecord
from kvtier.server.responses_api import ResponsesRequest
from kvtier.server.responses_format import ResponsesFormat
from kvtier.server.schema_cache import SchemaChecks

if TYPE_CHECKING:  # needs the extra `otel`
    from kvtier.server.tracing import RequestTrace, Tracing

_Prepared = Prepared[ChatRequest] | Prepared[CompletionRequest]
_log = logging.getLogger("kvtier.server")
_GRACE_SECONDS = 5.0  # added to the request's time limit, so that the client can read the rest of the response


@dataclass(slots=True)
class HttpJob:
    """One HTTP request, from admission to the last byte of the response."""

    tenant: Tenant | None
    submits: tuple[Submit, ...]
    format: AnswerFormat
    stream: bool
    options: StreamOptions
    began: float
    """time.monotonic() at the start of the HTTP request."""
    record: RequestRecord
    arrived: dict[tuple[str, int], float] = field(default_factory=dict)
    """Time at which the newest token of each answer arrived, by request id and index."""
    mailbox: Mailbox = field(default_factory=Mailbox)
    trace: RequestTrace | None = None
    restriction: str | None = None
    """For error messages: name of a field that restricts the tokens of the answer; None if there is no such field."""

    @property
    def num_answers(self) -> int:
        return sum(submit.params.n for submit in self.submits)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(submit.tokens) for submit in self.submits)

    @property
    def usage(self) -> Usage:
        return Usage(self.record.prompt_tokens, self.record.cached_tokens, self.record.new_tokens)


@dataclass(frozen=True, slots=True)
class Completions:
    engine: EngineLink
    schemas: SchemaChecks
    tokenizer: Tokenizer
    limits: Limits
    admission: Admission
    request_log: RequestLog
    tracing: Tracing | None = None
    """None if the server sends no traces."""

    async def answer(self, prepared: _Prepared, request: Request) -> Response:
        """Run a request. Raises ApiError. After the first event of a stream, errors are sent as events instead."""
        tenant = request.state.tenant
        if prepared.grammar is not None:
            with self.admission.prepare(tenant):
                check = self._check_grammar(prepared.grammar, tenant_name(tenant))
                await before_deadline(request, self.limits, check)
        job = self._job(prepared, request)
        if self.tracing is not None:
            job.trace = self.tracing.begin(request.headers, job.began)
        pieces = self._events(job) if job.stream else self._whole(job)
        first = await unless_gone(request.receive, anext(pieces))
        headers = {
            "x-request-id": job.record.client_id or job.record.id,
            **(job.trace.headers if job.trace is not None else {}),
        }
        if isinstance(prepared.source, MessagesRequest):
            headers["request-id"] = job.record.id  # Anthropic's name
        if prepared.ignored:
            headers[HEADER] = ", ".join(prepared.ignored)
        if not job.stream:
            await pieces.aclose()
            return Response(first, 200, headers, "application/json")
        seconds = job.began + self.limits.request_seconds + _GRACE_SECONDS - time.monotonic()
        return EventStream(first, pieces, headers, seconds)

    async def _check_grammar(self, answer: AnswerGrammar, tenant: str) -> None:
        try:
            await self.schemas.check(answer.grammar, tenant)
        except ApiError as error:
            if error.status != 400:  # the grammar is not the cause
                raise
            raise answer.error(error) from error

    def _job(self, prepared: _Prepared, request: Request) -> HttpJob:
        tenant, body, prompts = request.state.tenant, prepared.body, prepared.prompts
        room = self._max_new_tokens(prepared, tenant)
        try:
            limit = body.token_limit[1]
            max_tokens = room if limit is None else limit
            params = body.sampling_params(
                max_tokens=max_tokens, logprobs=body.num_logprobs, bad_words=prepared.bad_words
            )
        except ArgumentError as error:  # a combination of fields is invalid
            name = "n" if "samples" in str(error) else "min_tokens" if "min_tokens" in str(error) else None
            raise ApiError(400, f"{name or 'sampling'}: {error}", name) from error
        api = prepared.source or body
        id = f"{api.id_prefix}{secrets.token_hex(12)}"
        salt = salt_of(tenant, body.cache_salt)
        names = [id] if len(prompts) == 1 else [f"{id}-{number}" for number in range(len(prompts))]
        priority = body.priority or 0
        grammar = prepared.grammar.grammar if prepared.grammar is not None else None
        if tenant is not None:  # a higher priority is lowered to the tenant's limit
            priority = min(priority, tenant.max_priority)
        submits = tuple(
            Submit(name, tuple(prompt), params, priority, salt, grammar, body.hints)
            for name, prompt in zip(names, prompts, strict=True)
        )
        client_id = body.request_id or request.state.client_id
        record = RequestRecord(id, tenant_name(tenant), api.endpoint, client_id=client_id, notes=prepared.notes)
        options = body.stream_options or StreamOptions()
        format = self._format(prepared, id, params, options)
        restriction = _restriction(prepared)
        began = request.state.began
        return HttpJob(tenant, submits, format, bool(body.stream), options, began, record, restriction=restriction)

    def _format(self, prepared: _Prepared, id: str, params: SamplingParams, options: StreamOptions) -> AnswerFormat:
        match prepared.source:
            case MessagesRequest():
                return MessagesFormat(id, prepared.body.model, prepared.syntax)
            case ResponsesRequest() as source:
                return ResponsesFormat(id, int(time.time()), source, prepared.syntax)
        body = prepared.body
        return CompletionFormat(
            id,
            body.model,
            int(time.time()),
            self.tokenizer,
            is_chat=isinstance(body, ChatRequest),
            logprobs=params.logprobs is not None,
            syntax=prepared.syntax,
            include_usage=options.include_usage,
            names_ids=bool(body.return_tokens_as_token_ids),
            prompt=self._prompt_report(body, prepared.prompts, params),
        )

    def _prompt_report(
        self, body: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> PromptReport | None:
        if not body.echo and body.prompt_logprobs is None and not body.return_token_ids:
            return None
        return PromptReport(
            self.tokenizer,
            prompts,
            params.n,
            echo=bool(body.echo),
            num_echoed_top=params.logprobs or 0,
            num_top=body.prompt_logprobs,
            first_scored=params.prompt_logprobs_start,
            token_ids=bool(body.return_token_ids),
        )

    def _max_new_tokens(self, prepared: _Prepared, tenant: Tenant | None) -> int:
        """Return the number of tokens left for an answer to the longest prompt. Raises 400 if too few are left."""
        most, longest = self.admission.max_tokens(tenant), max(len(prompt) for prompt in prepared.prompts)
        room, code, name = most - longest, "context_length_exceeded", prepared.body.prompt_field
        if room < 1:  # the device tier was shrunk after the prompt was prepared
            message = f"{name} has {longest} tokens; the limit is {most}, including one token to generate"
            raise ApiError(400, message, name, code)
        field_name, max_tokens = prepared.body.token_limit
        if max_tokens is not None and max_tokens > room:
            message = (
                f"{name} ({longest} tokens) and {field_name} ({max_tokens}) together exceed the limit of {most}; "
                f"set {field_name} to at most {room}"
            )
            raise ApiError(400, message, field_name, code)
        return room

    async def _whole(self, job: HttpJob) -> AsyncGenerator[bytes]:
        num_bytes, most = 0, self.limits.response_bytes
        async with aclosing(self._outputs(job)) as batches:
            async for outputs in batches:
                for index, mine in _by_choice(job, outputs).items():
                    num_bytes += job.format.add(index, mine)
                if num_bytes > most:
                    job.record.finish = "refused"
                    raise ApiError(
                        400,
                        f"the response has more than {most} bytes; set stream: true or request fewer log-probabilities",
                        code="response_too_large",
                    )
        yield job.format.whole(job.num_answers, job.usage)

    async def _events(self, job: HttpJob) -> AsyncGenerator[bytes]:
        opened: set[int] = set()
        try:
            async with aclosing(self._outputs(job)) as batches:
                async for outputs in batches:
                    data = _event(job, outputs, opened)
                    if data:
                        yield data
            yield job.format.closing(job.usage)
        except ApiError as error:
            if not opened:
                raise
            yield job.format.failure(error)

    async def _outputs(self, job: HttpJob) -> AsyncGenerator[list[Output]]:
        """Admit and submit a job, and yield its outputs. Records the request even if it fails."""
        record = job.record
        try:
            deadline = job.began + self.limits.request_seconds
            with (
                self.admission.admit(job.num_answers, job.tenant),
                self.engine.submit(job.submits, job.mailbox, deadline),
            ):
                while job.mailbox.num_left:
                    outputs = await job.mailbox.take()
                    self._count(job, outputs)
                    if not any(output.prompt_logprobs for output in outputs):
                        yield outputs
                        continue
                    for output in outputs:  # one at a time, because formatting blocks other tasks for milliseconds
                        yield [output]
                        await asyncio.sleep(0)
            record.finish = outputs[-1].finish_reason.value if outputs[-1].finish_reason is not None else "stop"
        except TimeoutError as error:
            record.finish = "timeout"
            raise request_timeout(self.limits) from error
        except KvtierError as error:
            record.finish = "refused" if isinstance(error, ArgumentError) else "error"
            raise from_engine(error) from error
        except ApiError as error:
            record.finish = "refused" if error.status < 500 or error.status == 503 else "error"
            raise
        finally:
            self._end(job)

    def _count(self, job: HttpJob, outputs: Sequence[Output]) -> None:
        now, record = time.monotonic(), job.record
        if not record.prompt_tokens:
            record.prompt_tokens = job.num_prompt_tokens
        self.request_log.delivery.observe(now - job.mailbox.sent)
        if record.ttft_seconds is None and not outputs[0].prompt_logprobs:
            record.ttft_seconds = now - job.began
        for output in outputs:
            if output.finish_reason is not None:
                self._check_end(job, output)
            record.new_tokens += len(output.token_ids)
            if output.token_ids:
                answer = (output.request_id, output.index)
                if (before := job.arrived.get(answer)) is not None:
                    self.request_log.vllm.gaps.observe(now - before)
                job.arrived[answer] = now

    def _check_end(self, job: HttpJob, output: Output) -> None:
        """Raise an error if an answer failed. Otherwise count the cached tokens of its prompt."""
        record = job.record
        match output.finish_reason:
            case FinishReason.ERROR:
                _log.error("request %s failed in the engine: %s", record.id, output.error)
                raise ApiError(500, f"the engine could not complete the request: {output.error}", code="step_failed")
            case FinishReason.CONFLICT:
                raise ApiError(400, output.error, job.restriction, code="no_token_allowed")
            case FinishReason.REFUSED:
                raise ApiError(503, f"no cache space for this request: {output.error}", code="no_room")
        if output.index == 0:  # the n answers share one cached prefix, so count it once
            record.cached_tokens += output.num_cached_tokens

    def _end(self, job: HttpJob) -> None:
        record = job.record
        if record.finish in ("disconnected", "timeout"):  # the engine received the prompt even if it sent no output
            record.prompt_tokens = job.num_prompt_tokens
        record.ended, record.seconds = time.time(), time.monotonic() - job.began
        explanation = next(iter(job.mailbox.explanations.values()), None)
        reasons = [*record.notes]
        if explanation is not None:
            record.tokens_from = explanation.tokens_from
            reasons = [explanation.miss, explanation.why_loaded, *reasons]
        record.explanation = "; ".join(filter(None, reasons))
        self.request_log.ended(record, explanation)
        if self.tracing is not None and job.trace is not None:
            self.tracing.end(job.trace, job.began, record, job.mailbox.explanations.values())
        self.admission.spend(job.tenant, record.prompt_tokens - record.cached_tokens + record.new_tokens)
        _log.info(
            "request=%s client_id=%s tenant=%s endpoint=%s finish=%s prompt=%d cached=%d new=%d ttft_ms=%s "
            "seconds=%.3f",
            *(record.id, record.client_id or "-", record.tenant or "-", record.endpoint, record.finish),
            *(record.prompt_tokens, record.cached_tokens, record.new_tokens),
            "-" if record.ttft_seconds is None else round(record.ttft_seconds * 1e3),
            record.seconds,
        )


def _restriction(prepared: _Prepared) -> str | None:
    names = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")
    given = [name for name in names if getattr(prepared.body, name)]
    return given[0] if given else prepared.grammar.field if prepared.grammar is not None else None


def _event(job: HttpJob, outputs: list[Output], opened: set[int]) -> bytes:
    """Return the events for new outputs. A choice that is not in `opened` is added and gets an opening event."""
    data = b""
    for index, mine in _by_choice(job, outputs).items():
        if index in opened and not job.options.continuous_usage_stats:
            data += job.format.piece(index, mine)
            continue
        events = [] if index in opened else [job.format.opening(index)]
        opened.add(index)
        events.append(job.format.piece(index, mine))
        if job.options.continuous_usage_stats:
            events = [with_usage(each, job.usage) for each in events if each]
        data += b"".join(events)
    return data


def _by_choice(job: HttpJob, outputs: list[Output]) -> dict[int, list[Output]]:
    """Group outputs by the index of their choice, which is (index of the prompt) * n + (index of the answer)."""
    if len(outputs) == len(job.submits) == 1 and not outputs[0].prompt_logprobs:
        return {outputs[0].index: outputs}
    groups: dict[int, list[Output]] = {}
    for output in outputs:
        choice = output.index
        if len(job.submits) > 1:
            choice += int(output.request_id.rsplit("-", 1)[1]) * job.submits[0].params.n
        groups.setdefault(choice, []).append(output)
        if output.prompt_logprobs:  # only the first answer has them, and the response repeats them for all n answers
            for sibling in range(1, job.submits[0].params.n):
                groups.setdefault(choice + sibling, []).append(replace(output, index=sibling))
    return groups
