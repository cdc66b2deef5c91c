"""Schemathesis generates valid and invalid requests from the OpenAPI spec. No request may cause a 5xx status."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from server_support import ServerProcess

EXAMPLES = 20 * int(os.environ.get("KVTIER_SOAK", "1"))
# These calls interrupt the service by design, so they are sent to a separate server.
INTERRUPTING = r"^/(sleep|wake_up|control/(sleep|wake|resize))"
MOST_BLOCKS = 64
"""Largest `num_blocks` that is sent. Larger tiers could exhaust memory. test_control.py tests larger values."""


@pytest.fixture(scope="module")
def start_fuzzed(tiny_model, tmp_path_factory) -> Iterator[Callable[[], ServerProcess]]:
    """Yield a function that starts a server whose device cache holds only 256 tokens, so that answers are short."""
    started: list[ServerProcess] = []

    def start() -> ServerProcess:
        log = tmp_path_factory.mktemp("fuzzed") / "log"
        options = ("--threads", "1", "--blocks", "16", "--host-blocks", "16")
        started.append(ServerProcess(log, "--model", str(tiny_model), *options))
        return started[-1]

    yield start
    for process in started:
        state = process.wait_for(lambda state: state["in_flight"] == 0)
        assert (state["running"], state["waiting"], state["holds"]) == (0, 0, 0)
        assert process.stop() == 0
        assert "Traceback" not in process.log, process.log
        assert "status=5" not in process.log, process.log


@pytest.fixture(scope="module")
def spec(start_fuzzed):
    return load_spec(start_fuzzed()).exclude(path_regex=INTERRUPTING)


@pytest.fixture(scope="module")
def interrupting(start_fuzzed):
    server = start_fuzzed()
    return server, load_spec(server).include(path_regex=INTERRUPTING)


def load_spec(server: ServerProcess):
    import schemathesis

    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def check(case) -> None:
    """Replace the model name and limit `num_blocks`, if present. Send the request and check the status and error."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"  # otherwise few requests would reach the engine
    if isinstance(case.body, dict) and type(case.body.get("num_blocks")) is int and case.body["num_blocks"] > 0:
        case.body["num_blocks"] = 1 + case.body["num_blocks"] % MOST_BLOCKS
    answer = case.call(timeout=60)
    assert answer.status_code < 500, (case.as_curl_command(), answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        is_anthropic = case.path.startswith("/v1/messages")
        assert {*error} == {"message", "type", "param", *([] if is_anthropic else ["code"])}
        assert error["message"]
        # `param` may be None if the status is not 400, or if the message is about the whole body.
        has_no_field = answer.status_code != 400 or "the body" in error["message"]
        assert error["param"] or has_no_field, (case.as_curl_command(), error)


def fuzz(spec, mode: str, after: Callable[[], None] = lambda: None) -> int:
    """Send generated requests to every operation, and call `after` after each. Return the number of requests."""
    from schemathesis import GenerationMode

    num_sent = 0
    for result in spec.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[*HealthCheck], database=None)
        def send(case):
            nonlocal num_sent
            num_sent += 1
            check(case)
            after()

        try:
            send()
        except Unsatisfiable:  # an operation without parameters has no invalid calls
            assert mode == "negative"
    return num_sent


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_fuzzed_requests_never_get_5xx(spec, mode):
    assert fuzz(spec, mode) >= 3 * EXAMPLES  # at least three operations were tested


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_fuzzed_sleep_and_resize_never_get_5xx(interrupting, mode):
    """Send random requests to the endpoints for sleep, wake-up and resize. After each request, check the state."""
    server, spec = interrupting
    sizes: set[tuple[int, ...]] = set()

    def look() -> None:
        state = server.state()
        assert state["status"] in ("ok", "sleeping")
        assert server.get("/is_sleeping").json() == {"is_sleeping": state["status"] == "sleeping"}
        sizes.add(tuple(tier["num_blocks"] for tier in state["tiers"]))

    assert fuzz(spec, mode, look) >= EXAMPLES
    assert server.post("/wake_up").status_code == 200
    assert len(sizes) > 2 or mode == "negative"  # invalid requests do not resize a tier
    body = {"model": server.model, "prompt": "a", "max_tokens": 1}
    assert server.post("/control/resize", {"tier": "device", "num_blocks": 16}).status_code == 200
    assert server.post("/v1/completions", body).status_code == 200
