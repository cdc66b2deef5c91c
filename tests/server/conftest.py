"""Provide a server for all tests that do not stop it, and a function that starts further servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NEEDED = ("fastapi", "uvicorn", "uvloop", "httptools", "httpx", "openai", "psutil", "schemathesis", "transformers")
collect_ignore_glob = [] if all(importlib.util.find_spec(name) for name in NEEDED) else ["test_*.py"]


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Yield a server without API keys. Tests must not stop it. Its log must contain no unhandled exception."""
    from server_support import ServerProcess

    log = tmp_path_factory.mktemp("server") / "log"
    # The worker processes get a long deadline, because parallel tests slow these processes down.
    options = ("--model", str(tiny_model), "--blocks", "2048", "--threads", "1", "--prepare-seconds", "50")
    process = ServerProcess(log, *options)
    yield process
    state = process.wait_for(lambda state: state["in_flight"] == 0)
    assert (state["running"], state["waiting"], state["holds"]) == (0, 0, 0)
    assert process.stop() == 0
    assert "Traceback" not in process.log, process.log
    assert "exception" not in process.log.lower(), process.log


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Callable]:
    """Yield a function that starts a server with the tiny model. All servers are stopped after the test."""
    from server_support import ServerProcess

    started = []

    def run(*arguments: str, **options) -> ServerProcess:
        log = tmp_path / f"log-{len(started)}"
        started.append(ServerProcess(log, "--model", str(tiny_model), "--threads", "1", *arguments, **options))
        return started[-1]

    yield run
    for server in started:
        server.stop()
