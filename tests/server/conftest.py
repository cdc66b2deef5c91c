"""One server for the tests that do not stop it, and a way to start others."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NEEDED = ("fastapi", "uvicorn", "uvloop", "httptools", "httpx", "openai", "psutil", "schemathesis", "transformers")
collect_ignore_glob = [] if all(importlib.util.find_spec(name) for name in NEEDED) else ["test_*.py"]


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A server without keys. Nobody stops it; whatever the tests do, its log has no unhandled exception."""
    from server_support import ServerProcess

    log = tmp_path_factory.mktemp("server") / "log"
    # Tests that run beside this one slow the worker processes down: a deadline is for the tests that want one.
    options = ("--model", str(tiny_model), "--blocks", "2048", "--threads", "1", "--prepare-seconds", "50")
    made = ServerProcess(log, *options)
    yield made
    state = made.wait_for(lambda state: state["in_flight"] == 0)
    assert (state["running"], state["waiting"], state["holds"]) == (0, 0, 0)
    assert made.stop() == 0
    assert "Traceback" not in made.log, made.log
    assert "exception" not in made.log.lower(), made.log


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Callable]:
    """`start(*arguments, env=...)`: another server of the tiny model; stopped afterwards if it still runs."""
    from server_support import ServerProcess

    started = []

    def run(*arguments: str, **options) -> ServerProcess:
        log = tmp_path / f"log-{len(started)}"
        started.append(ServerProcess(log, "--model", str(tiny_model), "--threads", "1", *arguments, **options))
        return started[-1]

    yield run
    for server in started:
        server.stop()
