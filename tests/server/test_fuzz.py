"""Send valid and invalid requests that schemathesis generates from the OpenAPI spec. None may cause a 5xx status."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from server_support import ServerProcess

EXAMPLES = 20 * int(os.environ.get("KVTIER_SOAK", "1"))
# sleep and wake interrupt the service by design, and resize could allocate all memory of the machine.
EXCLUDED_PATHS = r"^/(sleep|wake_up|control/(sleep|wake|resize))"


@pytest.fixture(scope="module")
def fuzzed(tiny_model, tmp_path_factory) -> Iterator[ServerProcess]:
    """Yield a server whose cache holds 256 tokens, so that answers are short."""
    log = tmp_path_factory.mktemp("fuzzed") / "log"
    process = ServerProcess(log, "--model", str(tiny_model), "--threads", "1", "--blocks", "16")
    yield process
    state = process.wait_for(lambda state: state["in_flight"] == 0)
    assert (state["running"], state["waiting"], state["holds"]) == (0, 0, 0)
    assert process.stop() == 0
    assert "Traceback" not in process.log, process.log
    assert "status=5" not in process.log, process.log


@pytest.fixture(scope="module")
def spec(fuzzed):
    import schemathesis

    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json").exclude(path_regex=EXCLUDED_PATHS)


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_fuzzed_requests_never_get_5xx(spec, mode):
    from schemathesis import GenerationMode

    num_sent = 0
    for result in spec.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[*HealthCheck], database=None)
        def send(case):
            nonlocal num_sent
            num_sent += 1
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"  # otherwise few requests would reach the engine
            answer = case.call(timeout=60)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                is_anthropic = case.path.startswith("/v1/messages")
                assert {*error} == {"message", "type", "param", *([] if is_anthropic else ["code"])}
                assert error["message"]
                # Two kinds of errors name no field: a body that is not an object, and an error caused by the state of
                # the server.
                has_no_field = answer.status_code != 400 or "the body" in error["message"]
                assert error["param"] or has_no_field, (case.as_curl_command(), error)

        try:
            send()
        except Unsatisfiable:  # without parameters, there are no invalid calls
            assert mode == "negative"
    assert num_sent >= 3 * EXAMPLES
