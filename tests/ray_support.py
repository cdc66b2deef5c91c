"""Start a real Ray cluster of two nodes on this machine, with a fleet of tiny models on Ray Serve."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

MODEL = "tiny"
HEAD, WORKER = "127.0.0.2", "127.0.0.3"  # loopback addresses: no other machine can reach the cluster
APPLICATION = "kvtier"
SECONDS = 120.0
"""Timeout for each wait. Starting a replica takes 5 to 20 s on two cores."""


def wait_until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Poll a condition until its value is true, and return the value. Fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)
    return value


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def server_config(model: Path, tenants: tuple[Any, ...] = (), **engine: Any) -> Any:
    from kvtier.server.config import EngineOptions, Limits, ServerConfig, TierOptions

    tiers = TierOptions(blocks=256)
    options = EngineOptions(str(model), tiers=tiers, threads=1, max_rows=8, **engine)
    return ServerConfig(options, Limits(prepare_processes=1), names=(MODEL,), tenants=tenants)


class Fleet:
    """A Ray cluster of two raylets with Ray Serve. `run` deploys the application.

    A node has three CPUs and a replica needs half a CPU, so the replicas of every test fit on one node.
    """

    def __init__(self, model: Path) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        self._model = model
        self._settings: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 100 << 20, "include_dashboard": False}
        self.cluster = Cluster()
        self.cluster.add_node(node_ip_address=HEAD, **self._settings)
        self.worker = self.cluster.add_node(node_ip_address=WORKER, **self._settings)
        ray.init(self.cluster.address, log_to_driver=False, configure_logging=False)
        self.port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": self.port, "location": "HeadOnly"})
        self.url = f"http://127.0.0.1:{self.port}"

    def run(self, num_replicas: int, engine: dict[str, Any] | None = None, **fleet: Any) -> None:
        """Deploy the application, or update it. Return when all replicas run."""
        from ray import serve

        from kvtier.integrations.ray import RayConfig, fleet_app

        config = RayConfig(server_config(self._model, **(engine or {})), "ray", num_replicas, replica_cpus=0.5, **fleet)
        serve.run(fleet_app(config), name=APPLICATION)

    def kill_worker(self) -> None:
        """Kill the raylet of the worker node with SIGKILL."""
        self.worker.kill_raylet(check_alive=False)

    def add_worker(self) -> None:
        self.worker = self.cluster.add_node(node_ip_address=WORKER, **self._settings)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="no key", timeout=SECONDS, **{"max_retries": 0, **options}
        )

    def replicas(self) -> list[dict[str, Any]]:
        """Return the name, the process ids and the node of each replica that accepts calls."""
        from ray import serve

        handle = serve.get_deployment_handle("engine", APPLICATION)
        found = handle.broadcast("info").results(timeout_s=30, return_exceptions=True)
        return [each for each in found if isinstance(each, dict)]

    def wait_for_replicas(self, number: int) -> list[dict[str, Any]]:
        def ready() -> list[dict[str, Any]] | None:
            try:
                found = self.replicas()
            except Exception:  # no replica runs yet, or a replica has just died
                return None
            return found if len(found) == number else None

        found: list[dict[str, Any]] = wait_until(ready, f"{number} replicas")
        return found

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/state", timeout=SECONDS).json()
        return found

    def proxy_pid(self) -> int:
        listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
        return next(each.pid for each in listening if each.laddr.port == self.port)

    def close(self) -> None:
        import ray
        from ray import serve

        with contextlib.suppress(Exception):  # a test of failures may have killed Serve's controller
            serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()


@dataclass(slots=True)
class Load:
    """Client threads that send one prompt after the other inside `with load.running()`, and keep all results."""

    fleet: Fleet
    num_clients: int = 6
    max_tokens: int = 24
    stream: bool = True
    answers: list[tuple[str, str]] = field(default_factory=list)
    """Prompt and text of each complete answer."""
    errors: list[Exception] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(self.num_clients)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(self.answers) >= self.num_clients, "first answers")
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a client thread did not end"

    def more(self, number: int) -> None:
        """Wait until `number` more answers are complete."""
        enough = len(self.answers) + number
        wait_until(lambda: len(self.answers) >= enough, f"{number} more answers")

    def _client(self, number: int) -> None:
        client, turn = self.fleet.client(), 0
        while not self._stop.is_set():
            turn += 1
            prompt = f"client {number % 3} " * 8 + f"turn {turn % 5}"
            try:
                self.answers.append((prompt, ask(client, prompt, self.max_tokens, stream=self.stream)))
            except openai.OpenAIError as error:
                self.errors.append(error)
                time.sleep(0.05)  # perhaps no replica runs, so wait before the next attempt
            except httpx.TransportError as error:  # the openai client does not wrap errors inside a stream
                self.errors.append(error)
        client.close()


def ask(client: openai.OpenAI, prompt: str, max_tokens: int, *, stream: bool) -> str:
    """Return a greedy answer. Raise APIError if a stream ends without a finish reason."""
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if not stream:
        return str(client.completions.create(**options).choices[0].text)
    text, finish = "", None
    for event in client.completions.create(stream=True, **options):
        for choice in event.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    if finish is None:
        raise openai.APIError("the stream ended without a finish reason", httpx.Request("POST", "/"), body=None)
    return text


def is_lost(error: Exception) -> bool:
    """True if the error is a status 503, or the event that ends a stream after its replica died."""
    body = getattr(error, "body", None)
    code = body.get("code") if isinstance(body, dict) else None
    return getattr(error, "status_code", 0) == 503 or code == "replica_lost"


SERVE_OPTIONS = ("--cluster", "ray", "--replica-cpus", "0.5", "--threads", "1", "--blocks", "128", "--name", MODEL)
