"""Start and control real vLLM processes in tests. The module vllm_driver runs inside these processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import psutil

from store_servers import wait_for
from vllm_driver import Answer, Driver, Setup

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENGINE_READY_TIMEOUT_S": "600",
}
TIMEOUT_S = 600.0
BLOCK = 32
"""Tokens per block, as in vllm_driver.ENGINE_ARGUMENTS."""


class VllmError(Exception):
    """vLLM raised an exception, died or did not answer. The message contains the end of its log."""


def connector(module: str | None = None, name: str = "KvtierConnector", **settings: Any) -> dict[str, Any]:
    """Return the vLLM setting that loads the kvtier connector, as a user writes it."""
    policy = settings.pop("load_failure_policy", "recompute")
    extra = {"host_bytes": "64MiB"} | settings
    fields: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": policy}
    if module is not None:
        fields["kv_connector_module_path"] = module
    return fields | {"kv_connector_extra_config": extra}


class Vllm:
    """An engine in another process."""

    def __init__(self, address: str, setup: Setup, log: Path) -> None:
        self.log = log
        self.pid = 0
        self._connection = Client(address)
        self._connection.send((setup, str(log)))
        self.pid = self._receive()

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `function(driver, ...)` in the process and return the result.

        The process must be able to import `function`.
        """
        self.send(function, *arguments, **options)
        return self._receive()

    def send(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Start a function without waiting for its result. `receive` returns the result."""
        try:
            self._connection.send((function, arguments, options))
        except OSError as error:
            raise VllmError(f"vLLM has ended: {self.tail()}") from error

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        return self._receive(timeout_s)

    def ask(self, prompts: Sequence[Any], **options: Any) -> list[Answer]:
        """Answer requests one after the other."""
        return self.run(Driver.ask, prompts, **options)

    def ask_together(self, prompts: Sequence[Any], **options: Any) -> list[Answer]:
        """Answer requests concurrently."""
        return self.run(Driver.ask_together, prompts, **options)

    def tokens(self, prompts: Sequence[Any], **options: Any) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.ask(prompts, **options)]

    def metrics(self) -> dict[str, float]:
        return self.run(Driver.metrics)

    def reset(self, **options: Any) -> bool:
        return self.run(Driver.reset, **options)

    def processes(self) -> list[psutil.Process]:
        """Return the engine process and its children. With executor mp, the children are the core and the workers."""
        try:
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the result of the running function."""
        self._connection.poll(seconds)

    def kill_some(self, victim: str) -> None:
        """Send SIGKILL to some processes of an engine with executor mp.

        `victim` is `worker`, `core` or `all`.
        """
        processes = self.processes()
        names = {"worker": "VLLM::Worker", "core": "VLLM::EngineCor"}  # the kernel truncates names to 15 characters
        chosen = [each for each in processes if victim == "all" or each.name().startswith(names[victim])]
        if not chosen:
            raise VllmError(f"there is no {victim} process among {processes}")
        for process in chosen:
            process.kill()

    def kill(self) -> None:
        """Kill all processes of this engine at once."""
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=30)
        self._connection.close()

    def close(self) -> None:
        """Shut the engine down in the regular way, so that the connector's `shutdown` runs."""
        processes = self.processes()
        self._connection.close()
        _, alive = psutil.wait_procs(processes, timeout=180)
        for process in alive:
            process.kill()
        if alive:
            raise VllmError(f"processes did not end within 180 s: {alive}: {self.tail()}")

    def tail(self, num_chars: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-num_chars:] if self.log.exists() else "no log"

    def _receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        try:
            while not self._connection.poll(min(5.0, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() > deadline:
                    if self.pid:
                        os.kill(self.pid, signal.SIGUSR1)  # writes the stacks of all threads to the log
                    self._connection.poll(1.0)
                    raise VllmError(f"no answer within {timeout_s:g} s: {self.tail()}")
            ok, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise VllmError(f"vLLM ended: {self.tail()}") from error
        if not ok:
            raise VllmError(f"{result}\n{self.tail(1000)}")
        return result


class Template:
    """A process that imports vLLM once and forks a process for each engine."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self._address = str(folder / "template.sock")
        self._log = folder / "template.log"
        self._count = 0
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with open(self._log, "wb") as log:
            command = [sys.executable, "-m", "vllm_driver", self._address]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        what = f"the template process to start; see {self._log}"
        wait_for(lambda: os.path.exists(self._address) or self._process.poll() is not None, what)

    @contextlib.contextmanager
    def start(
        self, connector: dict[str, Any] | None, *, executor: str = "uni", model: Path | None = None, **arguments: Any
    ) -> Iterator[Vllm]:
        """Start an engine. Upper-case `arguments` are environment variables. The others are arguments of vLLM."""
        environment = {key: arguments.pop(key) for key in list(arguments) if key.isupper()}
        self._count += 1
        setup = Setup(str(model or self.model), connector, executor, arguments, environment)
        vllm = Vllm(self._address, setup, self.folder / f"engine-{self._count}.log")
        try:
            yield vllm
        except BaseException:
            vllm.kill()
            raise
        vllm.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Oracle:
    """Returns the answers of a vLLM engine without a connector. Runs one request at a time and caches the answers."""

    def __init__(self, engine: Vllm) -> None:
        self._engine = engine
        self._known: dict[str, Any] = {}

    def ask(self, prompts: Sequence[Any], **options: Any) -> list[Answer]:
        keys = [repr((prompt, sorted(options.items()))) for prompt in prompts]
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self._known}
        self._known.update(zip(missing, self._engine.ask(list(missing.values()), **options), strict=True))
        return [self._known[key] for key in keys]

    def tokens(self, prompts: Sequence[Any], **options: Any) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.ask(prompts, **options)]


def prompt_of(number: int, num_tokens: int = 300) -> list[int]:
    """Return a prompt that shares no block with the prompts of other numbers.

    A shorter prompt of the same number is a prefix of a longer one.
    """
    draws = random.Random(number)
    return [draws.randrange(3, 500) for _ in range(num_tokens)]


def reusable_tokens(num_tokens: int) -> int:
    """Return how many tokens of a prompt a cache can provide: all full blocks that do not contain the last token."""
    return (num_tokens - 1) // BLOCK * BLOCK
