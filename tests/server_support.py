"""Start real server processes for tests of the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

# The servers use plain HTTP. If certificates were verified, every call of httpx.get would first read the system's
# certificates, which takes 45 ms of CPU time (2-core Xeon, 2026-11-16).
VERIFY = False


class ServerProcess:
    """A process of `kvtier serve` on a free port. Its log is written to a file."""

    def __init__(
        self, log: Path, *arguments: str, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        """`prefix` precedes the command line of the server. An example is ("nice", "-n", "5")."""
        self._log = log
        self._clients: dict[str, openai.OpenAI] = {}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "kvtier", "serve", "--port", "0", "--json", *arguments],
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server did not start:\n{self.log}"
        started = json.loads(line)
        self.url, self.model = started["address"], started["model"]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def engine_pid(self) -> int:
        """Process id of the engine process, the only child of the server with `spawn_main` in the command line."""
        for child in psutil.Process(self.process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                return child.pid
        raise AssertionError("there is no engine process")

    def client(self, key: str = "no key") -> openai.OpenAI:
        """Return the OpenAI client for an API key. `stop` closes the client."""
        if key not in self._clients:
            self._clients[key] = openai.OpenAI(
                base_url=f"{self.url}/v1",
                api_key=key,
                max_retries=0,
                timeout=60,
                http_client=openai.DefaultHttpxClient(verify=VERIFY),
            )
        return self._clients[key]

    def async_client(self, key: str = "no key") -> openai.AsyncOpenAI:
        client = openai.DefaultAsyncHttpxClient(verify=VERIFY)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, http_client=client
        )

    def get(self, path: str, key: str = "") -> httpx.Response:
        return httpx.get(self.url + path, headers=_headers(key), timeout=60, verify=VERIFY)

    def post(self, path: str, body: Any = None, key: str = "", **options: Any) -> httpx.Response:
        options = options or {"json": body}
        headers = {**_headers(key), **options.pop("headers", {})}
        return httpx.post(self.url + path, headers=headers, timeout=60, verify=VERIFY, **options)

    def state(self, key: str = "") -> dict[str, Any]:
        answer = self.get("/state", key)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait_for(
        self, condition: Callable[[dict[str, Any]], bool], seconds: float = 30, key: str = ""
    ) -> dict[str, Any]:
        """Poll the server's state until the condition is True for it. Return this state. Fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition(state := self.state(key)):
            assert time.monotonic() < deadline, f"condition not met within {seconds} s: {state}"
            time.sleep(0.02)
        return state

    def stop(self, seconds: float = 60) -> int:
        """Close the clients, send SIGTERM if the server still runs, and return its exit code."""
        for client in self._clients.values():
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
