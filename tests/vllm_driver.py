"""A real vLLM engine in a separate process. The module vllm_support starts and controls the process.

Importing vLLM takes 10 s. Therefore, a template process imports vLLM once. Each engine is a fork of the template, and
is ready in about a second. With `executor="mp"`, the engine starts a core process and workers, as in production.

    python -m vllm_driver ADDRESS
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from typing import Any

ENGINE_ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "block_size": 32,
    "num_gpu_blocks_override": 24,
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 700,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "seed": 0,
    "disable_log_stats": False,
}


@dataclass
class Setup:
    """Settings of an engine."""

    model: str
    connector: dict[str, Any] | None
    """Fields of KVTransferConfig, or None for an engine without a connector."""
    executor: str = "uni"
    """`uni` runs everything in one process. With `mp`, core and workers are forked; with `spawn`, they are spawned."""
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Answer:
    """The result of a request."""

    tokens: tuple[int, ...]
    num_cached: int
    finish: str
    transfer: dict[str, Any] = field(default_factory=dict)
    """The field kv_transfer_params of the response."""
    others: tuple[tuple[int, ...], ...] = ()
    """Samples after the first, if the request has n > 1."""
    num_prompt_logprobs: int = 0


class Driver:
    """An engine and its requests. The functions of vllm_scenarios get the driver as their first argument."""

    def __init__(self, setup: Setup) -> None:
        os.environ.update(setup.environment)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if setup.executor == "uni" else "1"
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        arguments = ENGINE_ARGUMENTS | setup.arguments
        if setup.connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**setup.connector)
        config = EngineArgs(model=setup.model, **arguments).create_engine_config()
        if setup.executor == "mp":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the CPU platform has set spawn
        self.engine = LLMEngine.from_vllm_config(config)
        self.is_local = setup.executor == "uni"
        self.waiting: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self.after_step: list[Callable[[], None]] = []
        self.count = 0
        self.kept: dict[str, Any] = {}
        """Values that functions of vllm_scenarios keep between calls."""

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def caches(self) -> list[Any]:
        """The KV cache of each layer as a tensor [blocks, heads, tokens, content]."""
        return self.core.model_executor.driver_worker.worker.model_runner.kv_caches

    def add(
        self,
        prompt: Sequence[int] | dict[str, Any],
        *,
        name: str | None = None,
        salt: str | None = None,
        lora: tuple[str, int, str] | None = None,
        transfer: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> str:
        """Add a request. Return its name."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        name = name or f"request-{self.count}"
        given: dict[str, Any] = dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)}
        if salt is not None:
            given["cache_salt"] = salt
        options: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": 8,
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        } | sampling
        if transfer is not None:
            options["extra_args"] = {"kv_transfer_params": transfer}
        lora_request = LoRARequest(lora[0], lora[1], lora[2]) if lora else None
        self.engine.add_request(name, given, SamplingParams(**options), lora_request=lora_request)
        self.waiting.add(name)
        return name

    def step(self) -> None:
        """Run one step, collect the answers of finished requests, and call the functions in `after_step`."""
        for output in self.engine.step():
            if output.finished and output.request_id in self.waiting:
                self.waiting.discard(output.request_id)
                first, *others = output.outputs
                self.answers[output.request_id] = Answer(
                    tuple(first.token_ids),
                    output.num_cached_tokens or 0,
                    first.finish_reason or "",
                    output.kv_transfer_params or {},
                    tuple(tuple(other.token_ids) for other in others),
                    len(output.prompt_logprobs or ()),
                )
        for check in self.after_step:
            check()

    def finish(self) -> None:
        """Run steps until no request is left. With executor uni, continue until the connector has no work either."""
        while self.waiting or (self.is_local and self.scheduler.has_requests()):
            self.step()

    def abort(self, *names: str) -> None:
        self.waiting.difference_update(names)
        self.engine.abort_request(list(names))

    def state(self, name: str) -> str:
        """Return the state of a request in the scheduler, or `gone` if the scheduler does not have the request."""
        for internal, request in self.scheduler.requests.items():
            if internal == name or internal.startswith(f"{name}-"):
                return request.status.name
        return "gone"

    def step_until(self, condition: Callable[[], bool], what: str, limit: int = 10_000) -> None:
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError(f"{limit} steps ran, but this did not happen: {what}")

    # ---- calls of tests

    def ask(self, prompts: Sequence[Any], **options: Any) -> list[Answer]:
        """Answer requests one after the other."""
        found = []
        for prompt in prompts:
            name = self.add(prompt, **options)
            self.finish()
            found.append(self.answers.pop(name))
        return found

    def ask_together(self, prompts: Sequence[Any], **options: Any) -> list[Answer]:
        """Answer requests at the same time."""
        names = [self.add(prompt, **options) for prompt in prompts]
        self.finish()
        return [self.answers.pop(name) for name in names]

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters and gauges. Each name includes all labels except model and engine."""
        found: dict[str, float] = {}
        for metric in self.engine.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                labels = {key: text for key, text in metric.labels.items() if key not in ("model_name", "engine")}
                suffix = "".join(f" {key}={text}" for key, text in sorted(labels.items()))
                found[metric.name + suffix] = found.get(metric.name + suffix, 0.0) + value
        return found

    def reset(self, *, connector: bool = False, running: bool = False) -> bool:
        """Empty the device cache. Return False if vLLM refuses, because requests or saves hold device blocks.

        With `connector`, also empty the host memory of the connector. With `running`, first preempt running requests.
        """
        return self.engine.reset_prefix_cache(running, connector)


# ---- processes


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def _quiet(log: str) -> Iterator[None]:
    """Send the output of this process to a file."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    yield


def _serve(connection: Connection) -> None:
    """Create the engine that the first message describes. Then run functions until the connection ends."""
    setup, log = connection.recv()
    with _quiet(log):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        driver: Driver | None = None
        try:
            driver = Driver(setup)
            connection.send((True, os.getpid()))
            while True:
                function, arguments, options = connection.recv()
                try:
                    connection.send((True, function(driver, *arguments, **options)))
                except Exception as error:
                    traceback.print_exc()
                    connection.send((False, f"{error!r}\n{traceback.format_exc()}"))
        except EOFError:
            pass
        except Exception as error:
            traceback.print_exc()
            connection.send((False, f"{error!r}\n{traceback.format_exc()}"))
        finally:
            sys.stdout.flush()
            if driver is not None:
                driver.engine.engine_core.shutdown()
            sys.stdout.flush()
            connection.close()


def _import_everything() -> None:
    """Import the modules that an engine needs, so that a fork does not have to import them."""
    import vllm.distributed.kv_transfer.kv_connector.v1.example_connector
    import vllm.distributed.kv_transfer.kv_connector.v1.multi_connector
    import vllm.lora.punica_wrapper.punica_cpu
    import vllm.lora.request
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import EngineArgs, LLMEngine, ModelRegistry  # noqa: F401
    from vllm.model_executor.models.llama import LlamaForCausalLM

    # If a model class is given by name, vLLM inspects it in another process, which would have to import vLLM.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    with contextlib.suppress(ImportError):
        import kvtier.integrations.vllm  # noqa: F401


def main() -> None:
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    listener = Listener(f"{sys.argv[1]}.new", "AF_UNIX", backlog=16)
    os.rename(f"{sys.argv[1]}.new", sys.argv[1])  # the address appears when the listener is ready
    _import_everything()
    gc.collect()
    gc.freeze()
    while True:
        connection = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with_parent()
            listener._listener._socket.close()  # close only the socket, because Listener.close removes the address
            _serve(connection)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    # Run under the real module name, so that pickle finds the functions and classes that tests send.
    import vllm_driver

    vllm_driver.main()
