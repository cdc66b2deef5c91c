"""Engine: requests in, tokens out. Its step is the eight-op pipeline; what to run is the scheduler's to say."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtier.batch import Pipeline, Timeline
from kvtier.batch.executor import InlineExecutor
from kvtier.batch.pipeline import Ticket, TicketStatus
from kvtier.cache.allocation import Allocation
from kvtier.cache.config import CacheConfig
from kvtier.cache.manager import CacheManager
from kvtier.engine.cache_runtime import CacheRuntime
from kvtier.engine.caches import StoreOrUrls, open_caches
from kvtier.engine.model import Model
from kvtier.engine.modules import InputBuilder, ModelForward, Sampler
from kvtier.engine.params import Explanation, FinishReason, Output, SamplingParams
from kvtier.engine.sampling import RequestSampler
from kvtier.engine.sequence import EngineSequence
from kvtier.engine.speculate import Proposer
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ArgumentError, DTypeError, EngineError, RangeError
from kvtier.fingerprint import update_digest
from kvtier.index import Chain, GhostCache, Namespace
from kvtier.memory import Placement
from kvtier.scheduler import ControlOp, Request, RowResult, Scheduler, SchedulerConfig, Step

if TYPE_CHECKING:
    from kvtier.engine.pinned_copier import PinnedCopier

IdArray = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's limits. The cache's and the scheduler's own are theirs."""

    block_tokens: int = 16
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(1024))
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Rows of the decode steps that are captured as CUDA graphs; none to capture nothing."""
    ghost_scales: tuple[float, ...] = ()
    """Sizes for which hit rates are estimated all the time, as multiples of the cache's own; none: no estimates."""
    keep_explanations: int = 1000
    """How many requests that are over can still be explained."""
    tensor_parallel: int = 1
    """Ranks that share the model's heads: processes of this machine, the first of them this one."""
    kv_shards: int = 0
    """Objects into which a stored block is cut by KV heads; 0: as many as ranks. Only with the same number do engines
    find each other's blocks, so it is the largest number of ranks that is ever to read the store."""
    rank_timeout_seconds: float = 60.0
    """How long ranks wait for each other in a step."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.kv_shards < 0 or self.rank_timeout_seconds <= 0:
            raise RangeError(
                f"tensor_parallel is 1 or more, kv_shards 0 or more and rank_timeout_seconds above 0, got "
                f"{self.tensor_parallel}, {self.kv_shards} and {self.rank_timeout_seconds}"
            )
        if self.block_tokens < 1:
            raise RangeError(f"a block has at least one token, got block_tokens={self.block_tokens}")


class Engine:
    """Runs one model. All methods are for one thread.

    A request is added, gets its tokens by and by from `step`, and ends once, by itself, by `abort` or with an error.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        proposer: Proposer | None = None,
        stores: Mapping[str, StoreOrUrls] | None = None,
        clock: Callable[[], float] = time.monotonic,
        timeline: Timeline | None = None,
    ) -> None:
        """`stores` by the names that config.cache.stores gives them, open or as URLs; the engine closes them."""
        config = config or EngineConfig()
        models = [model, *(proposer.models if proposer is not None else ())]
        for each in models[1:]:
            if each.config.vocab_size != model.config.vocab_size:
                raise ArgumentError(
                    f"the draft model has {each.config.vocab_size} tokens where the model has "
                    f"{model.config.vocab_size}: it must share the vocabulary"
                )
        limit = min(config.scheduler.max_context, *(each.config.max_positions for each in models))
        self.config = replace(config, scheduler=replace(config.scheduler, max_context=limit))
        self.tokenizer = tokenizer
        lookahead = proposer.num_tokens if proposer is not None else 0
        self.proposer = proposer
        namespace = _namespace(models, config.block_tokens)
        caches = open_caches(models, config, limit, namespace.fingerprint, stores or {})
        self.groups = caches.groups
        self.model = model = caches.groups[0].model
        try:  # a policy that does not exist, a package that is missing: no process, thread or memory may be left behind
            self.manager = CacheManager(
                namespace,
                config.cache,
                num_ranks=config.tensor_parallel,
                num_host_ready=caches.controller.num_host_ready,
                ghost=_ghost(config),
            )
            scheduler = replace(self.config.scheduler, lookahead_tokens=lookahead, starts_early=True)
            self.scheduler = Scheduler(self.manager, scheduler)
            self.tiers = CacheRuntime(
                self.manager, self.groups, caches.controller, caches.stores, self.scheduler, clock
            )
            copies = _small_copies(model.weights.device, self.tiers.poll_while_waiting)
            self._inputs = InputBuilder(self.groups, copies)
            self._choose = Sampler(self._inputs, copies)
            forward = ModelForward(self.groups, self._inputs, caches.ranks)
            self._pipeline = Pipeline(
                [self._inputs, forward, self._choose],
                phases=1,
                placement=Placement.parse(str(model.weights.device)),
                executor=InlineExecutor,
                timeline=timeline,
            )
        except BaseException:
            caches.close()
            raise
        self._clock = clock
        self._ids = itertools.count()
        self._live: dict[str, tuple[EngineSequence, Ticket]] = {}  # by the scheduler's id
        self._over: dict[str, Explanation] = {}

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
    ) -> str:
        """Take a request in; returns its id. Refuses a prompt that can never be run."""
        params = params or SamplingParams()
        vocab = self.model.config.vocab_size
        if not all(0 <= token < vocab for token in params.stop_token_ids):
            raise RangeError(f"stop_token_ids must be in [0, {vocab}), got {params.stop_token_ids}")
        tokens = self._tokens(prompt)
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        if any(generation.id == name for generation, _ in self._live.values()):
            raise ArgumentError(f"a request called {name} is running; ids are unique among those that run")
        if len(tokens) >= self.scheduler.config.max_context:
            raise RangeError(
                f"the prompt has {len(tokens)} tokens; with one to generate the model takes "
                f"{self.scheduler.config.max_context}. Shorten the prompt"
            )
        answers = [self._generation(name, index, tokens, params, priority, salt) for index in range(params.n)]
        answers[0].siblings = answers[1:]
        self._start(answers[0])
        return name

    def step(self) -> list[Output]:
        """Run one step; returns what it added to each answer. Does nothing if there is nothing to do."""
        now = self._clock()
        self.tiers.poll_before_step()
        step = self.scheduler.schedule(now)
        if step.controls:
            self.tiers.submit(step.plan)
            self.scheduler.update(step, [], now)
            self._run(step.controls)
            return []
        outputs = [output for request in step.refused for output in self._refused(request)]
        if not step.rows:
            self.tiers.submit(step.plan)
            self.scheduler.update(step, [], now)
            if not outputs:
                self.tiers.wait()
            return outputs
        transfers = self.tiers.begin_step(step.plan, step.loads)
        try:
            live = [self._live[row.request.id] for row in step.rows]
            for row, (generation, _) in zip(step.rows, live, strict=True):
                if not generation.miss and row.request.allocation is not None:
                    self._explain_miss(generation, row.request.allocation)
            self._inputs.plan(step, transfers)
            tickets = [ticket for _, ticket in live]
            pairs = zip(step.rows, tickets, strict=True)
            generating = [ticket for row, ticket in pairs if row.wants_token and row.num_tokens <= 1]
            self._pipeline.step(tickets, generating=generating, tokens=[step.num_tokens])
            self._pipeline.drain()
            failed = next((ticket for ticket in tickets if ticket.status is TicketStatus.FAILED), None)
            if failed is not None and failed.error is not None:
                raise failed.error
        except BaseException as error:
            outputs += self._failed(step, error)
            if not isinstance(error, Exception) or isinstance(error, EngineError):  # an exit, or a rank that is lost
                raise
            return outputs
        finally:
            transfers.submit_deferred()  # for a step that failed before its forward pass
        return outputs + self._finish(step)

    def abort(self, request_id: str) -> bool:
        """Cancel a request and all its answers; its blocks are free at once. False if there is no such request."""
        mine = [key for key, (generation, _) in self._live.items() if generation.id == request_id]
        for key in mine:
            generation, ticket = self._live.pop(key)
            self.scheduler.cancel(generation.request, self._clock())
            generation.finish_reason = FinishReason.ABORT
            self._remember(generation)
            ticket.cancel()
        return bool(mine)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work() or self.manager.has_plans

    def control(self, name: str, run: Callable[[], None]) -> None:
        """Do something between two steps, once."""
        self.scheduler.control(ControlOp(name, run))

    def explain(self, request_id: str) -> Explanation:
        """What is known of a request, also for a while after it is over."""
        for generation, _ in self._live.values():
            if generation.id == request_id:
                return generation.explain()
        if request_id not in self._over:
            raise ArgumentError(
                f"no request {request_id} is running, nor among the last {self.config.keep_explanations} that ended"
            )
        return self._over[request_id]

    def close(self) -> None:
        """Cancel what runs, end the threads, close the stores, free host memory."""
        for name in {generation.id for generation, _ in self._live.values()}:
            self.abort(name)
        self._pipeline.close()
        self.tiers.close()

    def chain(self, prompt: str | Sequence[int], *, salt: bytes = b"") -> Chain:
        """A prompt as the tiers know it."""
        return Chain(self.manager.namespace, self._tokens(prompt), salt=salt)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _tokens(self, prompt: str | Sequence[int]) -> IdArray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError("this engine has no tokenizer: give the prompt as token ids")
            prompt = self.tokenizer.encode(prompt)
        if not len(prompt):
            raise ArgumentError("the prompt is empty; a request needs at least one token")
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DTypeError(f"a prompt is a list of whole numbers, got {tokens.dtype} of shape {tokens.shape}")
        vocab = self.model.config.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise RangeError(f"token ids must be in [0, {vocab}), got {tokens.min()} .. {tokens.max()}")
        return tokens.astype(np.int32)

    def _generation(
        self, name: str, index: int, tokens: IdArray, params: SamplingParams, priority: int, salt: bytes
    ) -> EngineSequence:
        room = self.scheduler.config.max_context - len(tokens)
        chain = Chain(self.manager.namespace, tokens, salt=salt)
        request = Request(f"{name}#{index}", chain, min(params.max_tokens, room), priority=priority)
        ends = self.model.config.eos_token_ids
        return EngineSequence.of(name, index, request, RequestSampler(params, tokens, ends, index), self.tokenizer)

    def _start(self, generation: EngineSequence) -> None:
        self._live[generation.request.id] = (generation, self._pipeline.add(generation))
        self.scheduler.add(generation.request, self._clock())

    def _explain_miss(self, generation: EngineSequence, allocation: Allocation) -> None:
        try:
            generation.miss = str(self.manager.explain(allocation))
        except Exception as error:  # of this row
            generation.sampler.fail(error)

    def _finish(self, step: Step) -> list[Output]:
        """Give every answer its tokens, update the scheduler, and release requests that are over."""
        outputs, results, now = [], [], self._clock()
        for row in step.rows:
            generation = self._live[row.request.id][0]
            samples = self._choose.samples.get(row.request.id)
            tokens: tuple[int, ...] = ()
            try:
                if samples and not generation.sampler.error:
                    output = generation.take(samples)
                    outputs.append(output)
                    tokens = output.token_ids
            except Exception as error:  # of its tokenizer or its stop texts
                generation.sampler.fail(error)
            if generation.sampler.error:
                outputs += self._fail_row(generation, now)
            elif tokens and generation.first_token_at is None:
                generation.first_token_at = now
            results.append(RowResult(tokens, generation.finish_reason is not None))
        self.scheduler.update(step, results, now)
        for row in step.rows:
            self._settle(row.request)
        if self.proposer is not None:
            self._propose(self.proposer)
        return outputs

    def _fail_row(self, generation: EngineSequence, now: float) -> list[Output]:
        """End one request of a step with its own error, and the siblings that wait for its prompt."""
        _, ticket = self._live.pop(generation.request.id)
        self.scheduler.cancel(generation.request, now)  # update() ignores the row's result
        ticket.cancel()
        outputs = self._end(generation, FinishReason.ERROR, generation.sampler.error)
        generation.siblings = []
        return outputs

    def _settle(self, request: Request) -> None:
        """After a step: start siblings that waited for the prompt, and release a request that is over."""
        found = self._live.get(request.id)
        if found is None:  # it failed
            return
        generation, ticket = found
        if request.num_new_tokens and generation.siblings:
            for sibling in generation.siblings:
                self._start(sibling)
            generation.siblings = []
        if request.state.is_over:
            del self._live[request.id]
            self._remember(generation)
            ticket.finish()

    def _propose(self, proposer: Proposer) -> None:
        """Draft tokens for the requests that generate. A proposer that fails costs drafts, never an answer."""
        # a request whose blocks are being loaded again has no complete block table
        running = [request for request in self.scheduler.running if request.is_generating]
        ready = [request for request in running if request.allocation is not None and not request.allocation.is_loading]
        if not ready:
            return
        try:
            drafts = proposer.propose(ready, self.groups[1:])
            if len(drafts) != len(ready):
                raise ArgumentError(f"{len(drafts)} drafts for {len(ready)} requests: one each")
        except Exception as error:
            warnings.warn(f"the proposer failed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
            return
        for request, draft in zip(ready, drafts, strict=True):
            try:
                request.draft = self._checked(request, draft)
            except Exception as error:  # of this row
                warnings.warn(f"{request!r}: no draft: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)

    def _checked(self, request: Request, draft: Sequence[int]) -> tuple[int, ...]:
        """Return the draft tokens that fit. Raises for tokens outside the vocabulary: they would fail the forward."""
        room = request.max_new_tokens - request.num_new_tokens - 1
        room = min(room, self.scheduler.config.max_context - request.chain.num_tokens - 1)
        tokens, vocab = tuple(draft[: max(0, room)]), self.model.config.vocab_size
        if not all(isinstance(token, int) and 0 <= token < vocab for token in tokens):
            raise RangeError(f"draft tokens must be whole numbers in [0, {vocab}), got {tokens}")
        return tokens

    def _refused(self, request: Request) -> list[Output]:
        generation, ticket = self._live.pop(request.id)
        ticket.cancel()
        reason = FinishReason.LENGTH if request.num_new_tokens else FinishReason.REFUSED
        return self._end(generation, reason, request.reason)

    def _failed(self, step: Step, error: BaseException) -> list[Output]:
        """A module raised: the step's requests end with that error, and the engine goes on."""
        outputs = []
        for request in self.scheduler.fail(step, self._clock()):
            generation, ticket = self._live.pop(request.id)
            ticket.fail(error)
            why = generation.sampler.error or f"{type(error).__name__}: {error}"
            outputs += self._end(generation, FinishReason.ERROR, why)
        return outputs

    def _end(self, generation: EngineSequence, reason: FinishReason, error: str) -> list[Output]:
        """An answer ends without another token, and with it those that waited for its prompt."""
        outputs = [each.end(reason, error) for each in (generation, *generation.siblings)]
        self._remember(generation)
        return outputs

    def _run(self, controls: Sequence[ControlOp]) -> None:
        with contextlib.ExitStack() as stack:  # all of them, also if one raises
            for control in reversed(controls):
                stack.callback(control.run)

    def _remember(self, generation: EngineSequence) -> None:
        self._over[generation.id] = generation.explain()
        while len(self._over) > self.config.keep_explanations:
            del self._over[next(iter(self._over))]


def _small_copies(device: torch.device, listen: Callable[[], bool]) -> PinnedCopier | None:
    """For CUDA: how a step's inputs and tokens travel beside blocks; while it waits for them, it listens."""
    if device.type != "cuda":
        return None
    from kvtier.engine.pinned_copier import PinnedCopier

    return PinnedCopier(listen)


def _ghost(config: EngineConfig) -> GhostCache | None:
    """Of what memory holds: the host has a copy of what the device has, so it is the larger of the two."""
    if not config.ghost_scales or not config.cache.prefix_caching:
        return None
    own = max(config.cache.num_blocks, config.cache.host.num_blocks if config.cache.host is not None else 0)
    sizes = [max(1, round(own * scale)) for scale in config.ghost_scales]
    return GhostCache(config.block_tokens, own, config.cache.policy, capacities=sizes, rate=1.0)


def _namespace(models: Sequence[Model], block_tokens: int) -> Namespace:
    """Whose KV this is: the architectures, and a digest over a thousand numbers of every matrix.

    Training or merging an adapter changes nearly every number of the matrices it touches.
    """
    digest, layouts = hashlib.sha256(), []
    for model in models:
        config, weights = model.config, model.weights
        matrices = [
            each.weight for layer in weights.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        norms = [layer.input_norm for layer in weights.layers] + [layer.post_norm for layer in weights.layers]
        update_digest(digest, (weights.embedding, weights.norm, *norms, *matrices))
        layouts.append(
            f"block-first {config.num_layers} x 2 x {block_tokens} x {config.num_kv_heads} x {config.head_dim}"
        )
    dtype = str(models[0].weights.dtype)
    return Namespace(
        repr([model.config for model in models]), digest.hexdigest(), dtype, "; ".join(layouts), block_tokens
    )
