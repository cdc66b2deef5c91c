"""Completions: from a prepared request to the engine and back to an HTTP answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request
from starlette.responses import Response

from kvtier.engine.params import Explanation, FinishReason, Output
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ArgumentError, KvtierError
from kvtier.server.admission import Admission, Room
from kvtier.server.auth import salt_of
from kvtier.server.config import Limits, Tenant
from kvtier.server.engine_client import EngineClient, Mailbox
from kvtier.server.errors import ApiError, of_engine
from kvtier.server.messages import Submit
from kvtier.server.middleware import EventStream, unless_gone
from kvtier.server.prepare import Prepared
from kvtier.server.protocol import ChatRequest, CompletionRequest, Sampling
from kvtier.server.request_log import RequestLog, RequestRecord
from kvtier.server.responses import DONE, ChatForm, CompletionForm, Form, Usage, error_event
from kvtier.server.schema_checks import SchemaChecks

_log = logging.getLogger("kvtier.server")
_GRACE_SECONDS = 5.0  # beyond the time limit, for a client to take what is there


@dataclass(frozen=True, slots=True)
class CompletionSpec:
    """What is to be generated, and what the client calls it."""

    prompts: Sequence[Sequence[int]]
    prompt_name: str
    max_tokens: int | None
    max_tokens_name: str
    logprobs: int | None
    schema: str | None = None


@dataclass(slots=True)
class HttpJob:
    """One HTTP request on its way: what is asked for, and what is known of it so far."""

    id: str
    endpoint: str
    tenant: Tenant | None
    submits: tuple[Submit, ...]
    form: Form
    stream: bool
    include_usage: bool
    began: float = 0.0
    """When the HTTP request came (time.monotonic)."""
    ttft: float | None = None
    finish: str = "disconnected"
    mailbox: Mailbox = field(default_factory=Mailbox)
    usage: Usage = field(default_factory=Usage)

    @property
    def num_answers(self) -> int:
        """Over all prompts."""
        return sum(submit.params.n for submit in self.submits)

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts."""
        return sum(len(submit.tokens) for submit in self.submits)


class Completions:
    """Runs jobs on the engine."""

    def __init__(
        self,
        engine: EngineClient,
        schemas: SchemaChecks,
        tokenizer: Tokenizer,
        model: str,
        limits: Limits,
        admission: Admission,
        room: Room,
        activity: RequestLog,
    ) -> None:
        self._engine = engine
        self._schemas = schemas
        self._tokenizer = tokenizer
        self.model = model
        self._limits = limits
        self._admission = admission
        self._room = room
        self._activity = activity

    async def chat(self, prepared: Prepared[ChatRequest], request: Request) -> HttpJob:
        """The job of a chat request. Raises 4xx for what cannot be run."""
        body = prepared.body
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens is the old name of max_completion_tokens: give one", "max_tokens")
        wanted = body.max_completion_tokens or body.max_tokens
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        ask = CompletionSpec(prepared.prompts, "messages", wanted, name, body.num_logprobs, prepared.schema)
        await self._check_schema(ask, request)
        return self._job(body, request.state.tenant, ask, ChatForm)

    async def completion(self, prepared: Prepared[CompletionRequest], request: Request) -> HttpJob:
        """The job of a completion request."""
        body = prepared.body
        ask = CompletionSpec(
            prepared.prompts, "prompt", body.max_tokens or 16, "max_tokens", body.logprobs, prepared.schema
        )
        await self._check_schema(ask, request)
        return self._job(body, request.state.tenant, ask, CompletionForm)

    async def answer(self, job: HttpJob, request: Request) -> Response:
        """Run it. Errors before the first token become an HTTP status, later ones an event in the stream."""
        job.began = request.state.began
        pieces = self._events(job) if job.stream else self._whole(job)
        first = await unless_gone(request.receive, anext(pieces))
        headers = {"x-request-id": job.id}
        if not job.stream:
            await pieces.aclose()
            return Response(first, 200, headers, "application/json")
        seconds = job.began + self._limits.request_seconds + _GRACE_SECONDS - time.monotonic()
        return EventStream(first, pieces, headers, seconds)

    # ---- inside ----------------------------------------------------------------------------------------------------

    async def _check_schema(self, ask: CompletionSpec, request: Request) -> None:
        if ask.schema is None:
            return
        tenant, seconds = request.state.tenant, self._limits.request_seconds
        with self._admission.prepare(tenant):
            try:
                async with asyncio.timeout(request.state.began + seconds - time.monotonic()):
                    name = tenant.name if tenant is not None else ""
                    await unless_gone(request.receive, self._schemas.check(ask.schema, name))
            except TimeoutError as error:
                raise ApiError(504, f"the request took longer than {seconds:g} s", code="timeout") from error

    def _job(
        self, body: Sampling, tenant: Tenant | None, ask: CompletionSpec, form: type[ChatForm | CompletionForm]
    ) -> HttpJob:
        room = self._checked_room(ask, tenant)
        try:
            params = body.sampling_params(max_tokens=ask.max_tokens or room, logprobs=ask.logprobs)
        except ArgumentError as error:  # what the fields alone do not show
            name = "n" if "samples" in str(error) else "min_tokens" if "min_tokens" in str(error) else None
            raise ApiError(400, f"{name or 'sampling'}: {error}", name) from error
        id = f"{form.kind}-{secrets.token_hex(12)}"
        salt = salt_of(tenant, body.cache_salt)
        names = [id] if len(ask.prompts) == 1 else [f"{id}-{number}" for number in range(len(ask.prompts))]
        priority = body.priority or 0
        if tenant is not None:  # or one tenant could delay the others
            priority = min(priority, tenant.max_priority)
        submits = tuple(
            Submit(name, tuple(prompt), params, priority, salt, ask.schema)
            for name, prompt in zip(names, ask.prompts, strict=True)
        )
        made = form(id, self.model, int(time.time()), self._tokenizer, logprobs=ask.logprobs is not None)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return HttpJob(id, form.endpoint, tenant, submits, made, bool(body.stream), include_usage)

    def _checked_room(self, ask: CompletionSpec, tenant: Tenant | None) -> int:
        """Tokens that are left for an answer to the longest prompt. Raises 400 if they are too few."""
        most, longest = self._room.of(tenant), max(len(prompt) for prompt in ask.prompts)
        name, code, room = ask.prompt_name, "context_length_exceeded", most - longest
        if room < 1:  # the device tier was made smaller since the prompt was prepared
            raise ApiError(
                400, f"{name} has {longest} tokens; with one to generate this server takes {most}", name, code
            )
        if ask.max_tokens is not None and ask.max_tokens > room:
            raise ApiError(
                400,
                f"{longest} tokens of {name} and {ask.max_tokens} of {ask.max_tokens_name} are more than the "
                f"{most} this server takes; ask for at most {room}",
                ask.max_tokens_name,
                code,
            )
        return room

    async def _whole(self, job: HttpJob) -> AsyncGenerator[bytes]:
        num_bytes, most = 0, self._limits.response_bytes
        async with aclosing(self._outputs(job)) as batches:
            async for outputs in batches:
                for index, mine in _by_choice(job, outputs).items():
                    num_bytes += job.form.add(index, mine)
                if num_bytes > most:
                    job.finish = "refused"
                    raise ApiError(
                        400,
                        f"the response has more than {most} bytes; set stream: true or ask for fewer log-probabilities",
                        code="response_too_large",
                    )
        yield job.form.whole(job.num_answers, job.usage)

    async def _events(self, job: HttpJob) -> AsyncGenerator[bytes]:
        opened: set[int] = set()
        try:
            async with aclosing(self._outputs(job)) as batches:
                async for outputs in batches:
                    event = _event(job, outputs, opened)
                    if event:
                        yield event
            yield (job.form.closing(job.usage) if job.include_usage else b"") + DONE
        except ApiError as error:
            if not opened:
                raise
            yield error_event(error.body) + DONE

    async def _outputs(self, job: HttpJob) -> AsyncGenerator[list[Output]]:
        """What the engine gives, under the limits; whatever happens, the request is on the books once it is over."""
        try:
            with self._admission.admit(job.num_answers, job.tenant):
                deadline = job.began + self._limits.request_seconds
                async with aclosing(self._engine.stream(job.submits, job.mailbox, deadline)) as batches:
                    async for outputs in batches:
                        self._count(job, outputs)
                        yield outputs
            job.finish = outputs[-1].finish_reason.value if outputs[-1].finish_reason is not None else "stop"
        except TimeoutError as error:
            job.finish = "timeout"
            seconds = self._limits.request_seconds
            raise ApiError(504, f"the request took longer than {seconds:g} s", code="timeout") from error
        except KvtierError as error:
            job.finish = "refused" if isinstance(error, ArgumentError) else "error"
            raise of_engine(error) from error
        except ApiError as error:
            job.finish = "refused" if error.status < 500 or error.status == 503 else "error"
            raise
        finally:
            self._book(job)

    def _count(self, job: HttpJob, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        self._activity.delivered(now - job.mailbox.sent)
        if job.ttft is None:
            job.ttft = now - job.began
        usage = job.usage
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                _log.error("request %s failed in the engine: %s", job.id, output.error)
                raise ApiError(500, f"the engine could not go on with this request: {output.error}", code="step_failed")
            if output.finish_reason is FinishReason.REFUSED:
                raise ApiError(503, f"there is no room for this request: {output.error}", code="no_room", retry_after=5)
            usage.completion_tokens += len(output.token_ids)
        # every output of an answer repeats its prompt's numbers; the first answer's are taken
        if not usage.prompt_tokens:
            usage.prompt_tokens = job.num_prompt_tokens
        for output in outputs:
            if output.index == 0 and output.finish_reason is not None:
                usage.cached_tokens += output.num_cached_tokens

    def _book(self, job: HttpJob) -> None:
        explanations = list(job.mailbox.explanations.values())
        usage = job.usage
        if job.finish in ("disconnected", "timeout"):  # the engine had it, whether or not a token came of it
            usage.prompt_tokens = job.num_prompt_tokens
        record = RequestRecord(
            job.id,
            job.tenant.name if job.tenant is not None else "",
            job.endpoint,
            time.time(),
            job.finish,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            job.ttft,
            time.monotonic() - job.began,
            explanations[0].tokens_from if explanations else {},
            _sentence(explanations[0]) if explanations else "",
        )
        self._activity.ended(record)
        self._admission.spend(job.tenant, usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens)
        _log.info(
            "request=%s tenant=%s endpoint=%s finish=%s prompt=%d cached=%d new=%d ttft_ms=%s seconds=%.3f",
            *(record.id, record.tenant or "-", record.endpoint, record.finish),
            *(record.prompt_tokens, record.cached_tokens, record.new_tokens),
            "-" if record.ttft_seconds is None else round(record.ttft_seconds * 1e3),
            record.seconds,
        )


def _sentence(explanation: Explanation) -> str:
    """For people who ask why."""
    return "; ".join(part for part in (explanation.miss, explanation.why_loaded) if part)


def _event(job: HttpJob, outputs: Sequence[Output], opened: set[int]) -> bytes:
    """What the outputs of a step, or of several, add to each choice; those not `opened` yet are opened."""
    event = b""
    for index, mine in _by_choice(job, outputs).items():
        if index not in opened:
            opened.add(index)
            event += job.form.opening(index)
        event += job.form.piece(index, mine)
    return event


def _by_choice(job: HttpJob, outputs: Sequence[Output]) -> dict[int, list[Output]]:
    found: dict[int, list[Output]] = {}
    for output in outputs:
        found.setdefault(_place(job, output), []).append(output)
    return found


def _place(job: HttpJob, output: Output) -> int:
    """Which choice of the answer an output belongs to: prompts in order, and for each its n answers."""
    if len(job.submits) == 1:
        return output.index
    return int(output.request_id.rsplit("-", 1)[1]) * job.submits[0].params.n + output.index
