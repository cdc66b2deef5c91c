"""Engine: runs requests step by step. The scheduler selects the rows of a step, and the pipeline computes the rows."""

from __future__ import annotations

import hashlib
import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from kvtier.batch import Pipeline, Timeline
from kvtier.batch.executor import Executor
from kvtier.cache.config import CacheConfig
from kvtier.cache.manager import CacheManager
from kvtier.engine.cache_runtime import CacheRuntime
from kvtier.engine.caches import StoreOrUrls, limit_known_keys, open_caches
from kvtier.engine.forward import I32
from kvtier.engine.model import Model
from kvtier.engine.modules import ModelForward, Sampler, StepRun, free_bytes, plan_row
from kvtier.engine.params import Explanation, FinishReason, Output, SamplingParams
from kvtier.engine.rows import DeviceRows
from kvtier.engine.sampling import RequestSampler
from kvtier.engine.sequence import EngineSequence, StopChecker
from kvtier.engine.speculate import Proposer
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ArgumentError, DTypeError, EngineError, OutOfMemoryError, RangeError
from kvtier.fingerprint import update_digest
from kvtier.index import NO_HINTS, Chain, GhostCache, Hints, Listener, Namespace
from kvtier.index.ghost import SHADOWS
from kvtier.scheduler import Request, RowResult, Scheduler, SchedulerConfig, Step
from kvtier.scheduler.scheduler import MAX_IN_FLIGHT

# Time to sleep between polls while blocks are in flight, so that other threads can run. Values from 20 us to 100 us
# give the same step time (H200, measured on 2026-11-16).
_POLL_SECONDS = 50e-6


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of an engine, including its cache and scheduler."""

    block_tokens: int = 16
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(1024))
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Batch sizes for which decode steps are captured as CUDA graphs. An empty tuple disables graphs. Not used on a CPU
    or with several ranks."""
    ghost_scales: tuple[float, ...] = ()
    """Cache sizes for which to estimate hit rates, as multiples of the real size. An empty tuple disables estimates."""
    keep_explanations: int = 1000
    """Number of ended requests whose explanations are kept for `explain`."""
    tensor_parallel: int = 1
    """Number of ranks among which the model's heads are split. Each rank is a process; this process is rank 0."""
    kv_shards: int = 0
    """Number of objects per block in a store. Each object contains some of the KV heads. 0 means one object per rank.
    Engines that share stored blocks need the same kv_shards: a common multiple of their tensor_parallel values."""
    rank_timeout_seconds: float = 60.0
    """Timeout for a step on the other ranks, and for one all_reduce."""
    phases: int = 0
    """Number of steps in flight: 1, 2, or 0 for the default, which is 2 on a GPU and 1 on a CPU. With 2, the host
    schedules a step while the device computes the previous step. The end of a sequence can then be found one step late,
    and one computed token is discarded. docs/tuning.md has measurements for GPU and CPU."""

    def __post_init__(self) -> None:
        for name, low in {"block_tokens": 1, "tensor_parallel": 1, "kv_shards": 0}.items():
            if getattr(self, name) < low:
                raise RangeError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.phases not in range(MAX_IN_FLIGHT + 1):
            raise RangeError(
                f"phases must be 1 or {MAX_IN_FLIGHT}, or 0 for the default of the device, got {self.phases}"
            )
        if self.rank_timeout_seconds <= 0:
            raise RangeError(f"rank_timeout_seconds must be above 0, got {self.rank_timeout_seconds}")


class Engine:
    """Runs one model. `add` queues a request, and `step` returns new tokens. Call all methods from one thread."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        proposer: Proposer | None = None,
        stores: Mapping[str, StoreOrUrls] | None = None,
        listener: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
        timeline: Timeline | None = None,
    ) -> None:
        """`stores` maps the names in config.cache.stores to open stores or URLs. The engine closes the stores.

        `listener` is called with the events of the index, on the engine's thread (see kvtier.events.publish_events).
        """
        config = config or EngineConfig()
        models = [model, *(proposer.models if proposer is not None else ())]
        _check_vocabularies(models)
        limit = min(config.scheduler.max_context, *(each.config.max_positions for each in models))
        phases = config.phases or (MAX_IN_FLIGHT if model.weights.device.type == "cuda" else 1)
        self.config = replace(config, phases=phases, scheduler=replace(config.scheduler, max_context=limit))
        self.tokenizer, self.proposer = tokenizer, proposer
        lookahead = proposer.num_tokens if proposer is not None else 0
        namespace = _namespace(models, config.block_tokens)
        rows = _new_rows(model, self.config, lookahead)
        self.groups, controller, counted, ranks = open_caches(models, config, namespace.fingerprint, stores or {}, rows)
        self.model = model = self.groups[0].model
        try:  # an error (unknown policy, missing package) must not leave a process, a thread or memory behind
            self.manager = CacheManager(
                namespace,
                limit_known_keys(config.cache, self.groups, counted),
                num_ranks=config.tensor_parallel,
                num_host_ready=controller.num_host_ready,
                listener=listener,
                ghost=_ghost(config),
            )
            scheduler = replace(self.config.scheduler, lookahead_tokens=lookahead, starts_early=True)
            self.scheduler = Scheduler(self.manager, scheduler)
            self.tiers = CacheRuntime(self.manager, self.groups, controller, counted, self.scheduler, clock)
            self._pipeline = Pipeline(
                [ModelForward(self.groups, rows, ranks), Sampler(rows)],
                phases=phases,
                placement=str(model.weights.device),
                executor=partial(Executor, threaded=phases > 1),
                timeline=timeline,
            )
            self.tiers.finish_steps = self._finish_steps
        except BaseException:
            controller.close()
            raise
        self._clock, self._ranks = clock, ranks
        self._ids = itertools.count()
        self._runs: deque[StepRun] = deque()  # steps in flight, oldest first
        self._undelivered: list[Output] = []  # outputs that `_finish_steps` collected for the next call of `step`
        self._live: dict[str, EngineSequence] = {}  # sequences that have started, by the id of the scheduler request
        self._ended: dict[str, Explanation] = {}

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
        hints: Hints = NO_HINTS,
    ) -> str:
        """Queue a request and return its id. Raise an error for invalid arguments, or if the prompt is too long."""
        params = params or SamplingParams()
        vocab = self.model.config.vocab_size
        for field_name, ids in params.named_token_ids.items():
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                raise RangeError(f"{field_name} must be in [0, {vocab}), got {min(ids)} .. {max(ids)}")
        tokens = self._tokens(prompt)
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        if any(sequence.id == name for sequence in self._live.values()):
            raise ArgumentError(f"a request with id {name} is running; use another id")
        if len(tokens) >= self.scheduler.config.max_context:
            raise RangeError(
                f"the prompt has {len(tokens)} tokens, but prompt and output together may have at most "
                f"{self.scheduler.config.max_context}; shorten the prompt"
            )
        context = priority, salt, hints
        first, *others = (self._new_sequence(name, index, tokens, params, *context) for index in range(params.n))
        first.siblings = others
        self._start(first)
        return name

    def step(self) -> list[Output]:
        """Start a step, and return the output of the steps that ended. If there is nothing to compute, wait briefly."""
        now = self._clock()
        self.tiers.poll(before_step=True)
        outputs, self._undelivered = self._undelivered, []
        step = self.scheduler.schedule(now)
        for request in step.refused:
            reason = FinishReason.LENGTH if request.num_new_tokens else FinishReason.REFUSED
            outputs += self._end(self._live[request.id], reason, request.reason)
        if step.rows:
            outputs += self._start_step(step)
            return outputs + self._collect(self.config.phases - 1)
        num_in_flight = len(self._runs)
        self.tiers.submit(step.plan)
        outputs += self._collect(0)
        self.scheduler.update(step, [], now)
        if not outputs and not num_in_flight:
            self.tiers.wait()
        return outputs

    def abort(self, request_id: str) -> bool:
        """Cancel all sequences of a request and release their blocks. Return False for an ended or unknown request."""
        mine = [sequence for sequence in self._live.values() if sequence.id == request_id]
        for sequence in mine:
            self.scheduler.cancel(sequence.request, self._clock())
            self._end(sequence, FinishReason.ABORT)
        return bool(mine)

    def has_work(self) -> bool:
        """True if there are requests to run, steps in flight, transfers to plan or finish, or outputs to return."""
        return bool(self.scheduler.has_work() or self.manager.has_plans or self._runs or self._undelivered)

    def explain(self, request_id: str) -> Explanation:
        """Return the state of a request that has not ended, or that ended recently."""
        for sequence in self._live.values():
            if sequence.id == request_id:
                return sequence.explain()
        if request_id not in self._ended:
            raise ArgumentError(
                f"request {request_id} is neither running nor among the last {self.config.keep_explanations} that ended"
            )
        return self._ended[request_id]

    def close(self) -> None:
        """Cancel all requests, stop all threads, close the stores and free the memory of the tiers."""
        for name in {sequence.id for sequence in self._live.values()}:
            self.abort(name)
        self._pipeline.close()
        self.tiers.finish_steps = None  # breaks a reference cycle that would delay freeing the engine's memory
        self.tiers.close()

    def close_session(self, session_id: str, *, salt: bytes = b"") -> int:
        """Record that no further request of a session is expected.

        The learned policy uses this hint, and other policies ignore it. Return the number of blocks whose last use was
        the last request of the session, or 0 if a request of the session has not ended.
        """
        return self.scheduler.close_session(session_id, salt, self._clock())

    def chain(self, prompt: str | Sequence[int], *, salt: bytes = b"") -> Chain:
        """Return the chain of a prompt: its tokens and the keys of its blocks."""
        return Chain(self.manager.namespace, self._tokens(prompt), salt=salt)

    def _tokens(self, prompt: str | Sequence[int]) -> I32:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError("this engine has no tokenizer; use token ids as the prompt")
            prompt = self.tokenizer.encode(prompt)
        if not len(prompt):
            raise ArgumentError("the prompt is empty; at least one token is needed")
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DTypeError(f"a prompt must be a list of integers, got {tokens.dtype} of shape {tokens.shape}")
        vocab = self.model.config.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise RangeError(f"token ids must be in [0, {vocab}), got {tokens.min()} .. {tokens.max()}")
        return tokens.astype(np.int32)

    def _new_sequence(
        self, name: str, index: int, tokens: I32, params: SamplingParams, priority: int, salt: bytes, hints: Hints
    ) -> EngineSequence:
        room = self.scheduler.config.max_context - len(tokens)
        sampler = RequestSampler(params, tokens, self.model.config.eos_token_ids, index)
        # only the first sequence scores the prompt, which all sequences of the request share
        is_scored = params.prompt_logprobs is not None and not index
        request = Request(
            f"{name}#{index}",
            Chain(self.manager.namespace, tokens, salt=salt),
            max(1, min(params.max_tokens, room)),
            priority=priority,
            hints=hints,
            max_cached_tokens=params.prompt_logprobs_start - 1 if is_scored else None,
            waits_for_token=sampler.waits_for_token or self.proposer is not None,
        )
        stream = self.tokenizer.stream() if self.tokenizer is not None else None
        stop = StopChecker(params.stop, include=params.include_stop)
        return EngineSequence(name, index, request, sampler, stream, stop)

    def _start(self, sequence: EngineSequence) -> None:
        self._live[sequence.request.id] = sequence
        sequence.ticket = self._pipeline.add(sequence)
        self.scheduler.add(sequence.request, self._clock())

    def _explain_miss(self, request: Request) -> str:
        allocation, limit = request.allocation, request.max_cached_tokens
        assert allocation is not None
        if limit is not None and allocation.num_cached_tokens == limit < allocation.chain.num_tokens - 1:
            return f"the log-probabilities of the prompt require computing all tokens from {limit} on"
        return str(self.manager.explain(allocation))

    def _start_step(self, step: Step) -> list[Output]:
        """Submit a step to the pipeline. After an error, finish the earlier steps and end the requests of this step."""
        run = StepRun(step, self.tiers.begin_step(step.plan, step.loads))
        for row in step.rows:
            sequence = self._live[row.request.id]
            try:
                sequence.miss = sequence.miss or self._explain_miss(row.request)
                run.planned[sequence.ticket] = plan_row(row, sequence)
            except Exception as error:  # only this request fails
                sequence.sampler.fail(error)
        resident = [ticket for ticket, each in run.planned.items() if each.is_resident]
        failure: BaseException | None
        try:
            failure = self._pipeline.submit(run.planned, generating=resident, tokens=[step.num_tokens], work=run).error
        except BaseException as raised:  # an exit or an interrupt
            failure = raised
        run.transfers.on_forward_launched()
        if failure is None or self._pipeline.num_in_flight > len(self._runs):
            self._runs.append(run)
            return []
        return self._collect(0) + self._failed(step, failure)

    def _collect(self, num_left: int) -> list[Output]:
        """Finish the oldest steps until at most `num_left` steps are in flight. After a failure, finish all steps."""
        outputs: list[Output] = []
        while len(self._runs) > num_left:
            while not self._pipeline.has_result and self.tiers.poll_while_waiting():
                time.sleep(_POLL_SECONDS)
            run = self._runs.popleft()
            try:
                batch = self._pipeline.collect()
            except BaseException as error:  # an exit or an interrupt
                return outputs + self._failed(run.step, error)
            assert batch is not None
            if batch.error is None:
                outputs += self._finish(run)
                continue
            num_left = 0
            if batch.failed_itself:
                outputs += self._failed(run.step, batch.error)
            else:
                self.scheduler.discard(run.step, self._clock())
        return outputs

    def _finish_steps(self) -> None:
        """Finish the steps in flight. The next call of `step` returns their output."""
        self._undelivered += self._collect(0)

    def _finish(self, run: StepRun) -> list[Output]:
        """Add the samples to their sequences, update the scheduler, and release ended requests."""
        outputs, results, now, step = [], [], self._clock(), run.step
        for row in step.rows:
            if row.request.state.is_over:  # the request ended while the row was in flight
                results.append(RowResult())
                continue
            sequence = self._live[row.request.id]
            samples = run.samples.get(row.request.id)
            tokens: tuple[int, ...] = ()
            try:
                if (scores := run.scores.get(row.request.id)) and not sequence.sampler.error:
                    outputs += sequence.take_scores(scores)
                if samples and not sequence.sampler.error:
                    output = sequence.take(samples)
                    outputs.append(output)
                    tokens = output.token_ids or (samples[0].token_id,)  # with max_tokens=0, the output has no token
            except Exception as error:  # raised by the tokenizer or the stop checker
                sequence.sampler.fail(error)
            if sequence.sampler.error:
                self.scheduler.cancel(row.request, now)  # so that update() ignores the result of this row
                reason = FinishReason.CONFLICT if sequence.sampler.has_conflict else FinishReason.ERROR
                outputs += self._end(sequence, reason, sequence.sampler.error)
            elif tokens and sequence.first_token_at is None:
                sequence.first_token_at = now
            results.append(RowResult(tokens, sequence.finish_reason is not None))
        self.scheduler.update(step, results, now)
        for row in step.rows:
            self._settle(row.request)
        if self.proposer is not None:
            self._propose(self.proposer)
        return outputs

    def _settle(self, request: Request) -> None:
        """Start the other sequences of a request (n > 1) once the prompt is computed. Release an ended request."""
        sequence = self._live.get(request.id)
        if sequence is None:  # the request failed
            return
        if request.num_new_tokens and sequence.siblings:
            for sibling in sequence.siblings:
                self._start(sibling)
            sequence.siblings = []
        if request.state.is_over:
            del self._live[request.id]
            self._remember(sequence)
            sequence.ticket.finish()

    def _propose(self, proposer: Proposer) -> None:
        """Get draft tokens for requests that are generating. If the proposer fails, they continue without drafts."""
        # Requests whose blocks are being loaded are left out, because their block tables are incomplete.
        running = [each for each in self.scheduler.running if each.is_generating and not each.in_flight]
        ready = [request for request in running if request.allocation is not None and not request.allocation.is_loading]
        if not ready:
            return
        try:
            drafts = proposer.propose(ready, self.groups[1:])
            if len(drafts) != len(ready):
                raise ArgumentError(f"got {len(drafts)} drafts for {len(ready)} requests, expected one per request")
        except Exception as error:
            warnings.warn(f"the proposer failed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
            return
        for request, draft in zip(ready, drafts, strict=True):
            try:
                request.draft = self._checked(request, draft)
            except Exception as error:  # only this request gets no draft
                warnings.warn(f"{request!r}: no draft: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)

    def _checked(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        """Return the draft tokens that fit into max_tokens and the context. Raise RangeError for an invalid token."""
        room = request.max_new_tokens - request.num_new_tokens - 1  # max_new_tokens is already limited by the context
        tokens, vocab = tuple(draft[: max(0, room)]), self.model.config.vocab_size
        if not all(isinstance(token, int) and 0 <= token < vocab for token in tokens):
            raise RangeError(f"draft tokens must be integers in [0, {vocab}), got {tokens}")
        return tokens

    def _failed(self, step: Step, error: BaseException) -> list[Output]:
        """End all requests of a failed step with `error`. Raise the error if the engine cannot continue."""
        outputs = []
        if self._ranks is not None:
            error = self._ranks.error_of(error)
        for request in self.scheduler.fail(step, self._clock()):
            sequence = self._live[request.id]
            sequence.ticket.fail(error)
            why = sequence.sampler.error or f"{type(error).__name__}: {error}"
            outputs += self._end(sequence, FinishReason.ERROR, why)
        if not isinstance(error, Exception) or isinstance(error, EngineError):  # the process exits, or a rank died
            raise error
        return outputs

    def _end(self, sequence: EngineSequence, reason: FinishReason, error: str = "") -> list[Output]:
        """End a sequence, and the siblings that wait for its prompt. Their last outputs have no tokens."""
        del self._live[sequence.request.id]
        sequence.ticket.cancel()  # no effect if the ticket has failed
        outputs = [each.end(reason, error) for each in (sequence, *sequence.siblings)]
        self._remember(sequence)
        return outputs

    def _remember(self, sequence: EngineSequence) -> None:
        self._ended[sequence.id] = sequence.explain()
        while len(self._ended) > self.config.keep_explanations:
            del self._ended[next(iter(self._ended))]


def _new_rows(model: Model, config: EngineConfig, lookahead: int) -> DeviceRows:
    limits, vocab, device = config.scheduler, model.config.vocab_size, model.weights.device
    max_blocks = -(-(limits.max_context + lookahead + 1) // config.block_tokens)
    sizes = limits.max_rows, max_blocks, limits.max_step_tokens, config.block_tokens, vocab
    try:
        return DeviceRows(*sizes, device, config.phases)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the state of {limits.max_rows} rows needs more than {limits.max_rows * vocab * 4 / 2**30:.2f} GiB, but "
            f"only {free_bytes(device) / 2**30:.2f} GiB are free on {device}; lower max_rows (--max-rows)"
        ) from error


def _ghost(config: EngineConfig) -> GhostCache | None:
    """Return the hit-rate estimator, if enabled. Device and host count as one cache, as large as the larger tier."""
    policy = config.cache.policy
    if not config.ghost_scales or not config.cache.prefix_caching or policy not in SHADOWS:
        return None
    own = max(config.cache.num_blocks, config.cache.host.num_blocks if config.cache.host is not None else 0)
    sizes = [max(1, round(own * scale)) for scale in config.ghost_scales]
    # The learned policy takes longer per block than other policies, so it is simulated with a smaller sample.
    learned = GhostCache(config.block_tokens, own, policy, capacities=sizes, policies=["learned"])
    if policy == "learned":
        return learned
    return GhostCache(config.block_tokens, own, policy, capacities=sizes, rate=1.0, sparse=learned)


def _check_vocabularies(models: Sequence[Model]) -> None:
    """Raise ArgumentError if the vocabulary of a draft model differs from that of the main model, models[0]."""
    vocab = models[0].config.vocab_size
    for each in models[1:]:
        if each.config.vocab_size != vocab:
            raise ArgumentError(
                f"the draft model has a vocabulary of {each.config.vocab_size} tokens, but the model has {vocab}; both "
                "need the same vocabulary"
            )


def _namespace(models: Sequence[Model], block_tokens: int) -> Namespace:
    """Return the KV namespace, which identifies the configurations, layouts and weights of these models."""
    digest, layouts = hashlib.sha256(), []
    for model in models:
        config, weights = model.config, model.weights
        linears = [each for layer in weights.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        norms = [layer.input_norm for layer in weights.layers] + [layer.post_norm for layer in weights.layers]
        update_digest(digest, (weights.embedding, weights.norm, *norms, *(each.weight for each in linears)))
        # Release 0.1.0 hashed only the tensors above. A model without the tensors below still gets the same hash.
        optional = [norm for layer in weights.layers for norm in (layer.q_norm, layer.k_norm)]
        optional += [each.bias for each in linears]
        if not torch.equal(weights.inverse_frequencies.cpu(), config.rope.inverse_frequencies(config.head_dim)):
            optional.append(weights.inverse_frequencies)  # a GGUF file contains factors that `config` lacks
        update_digest(digest, [each for each in optional if each is not None])
        layouts.append(
            f"block-first {config.num_layers} x 2 x {block_tokens} x {config.num_kv_heads} x {config.head_dim}"
        )
    dtype = "; ".join(dict.fromkeys(model.weights.arithmetic for model in models))
    return Namespace(
        repr([model.config for model in models]), digest.hexdigest(), dtype, "; ".join(layouts), block_tokens
    )
