"""Sessions over HTTP: hints in requests, and the end of a session."""

from __future__ import annotations

import uuid

import pytest

from server_support import ServerProcess

CONFIG = """
[[tenants]]
name = "one"
key = "key-of-tenant-one"

[[tenants]]
name = "two"
key = "key-of-tenant-two"
"""


@pytest.fixture(scope="module")
def tenants(tiny_model, tmp_path_factory):
    """Yield a server with the learned eviction policy and two tenants."""
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "kvtier.toml").write_text(CONFIG)
    options = ("--policy", "learned", "--blocks", "64", "--config", str(folder / "kvtier.toml"))
    process = ServerProcess(folder / "log", "--model", str(tiny_model), "--threads", "1", *options)
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log, process.log


def ask(server, key, **fields):
    body = {"model": server.model, "prompt": uuid.uuid4().hex * 4, "max_tokens": 1, **fields}
    answer = server.post("/v1/completions", body, key)
    assert answer.status_code == 200, answer.text


def close(server, session, key):
    answer = server.post("/v1/sessions/close", {"session_id": session}, key)
    assert answer.status_code == 200, answer.text
    return answer.json()["blocks"]


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
def test_session_close_returns_block_count_once_to_its_tenant(tenants, field):
    ask(tenants, "key-of-tenant-one", **{field: "chat"}, session_over=False, expects_return_seconds=12.5)
    assert close(tenants, "chat", "key-of-tenant-two") == 0
    assert close(tenants, "chat", "key-of-tenant-one") > 0
    assert close(tenants, "chat", "key-of-tenant-one") == 0


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
def test_response_belongs_to_its_session(tenants, field):
    key = "key-of-tenant-one"
    body = {"model": tenants.model, "input": uuid.uuid4().hex * 4, "max_output_tokens": 1, field: "agent"}
    assert tenants.post("/v1/responses", body, key).status_code == 200
    assert close(tenants, "agent", key) > 0


def test_close_of_unknown_session_returns_0_blocks(tenants):
    assert close(tenants, "never seen", "key-of-tenant-one") == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expects_return_seconds": -1}, "expects_return_seconds"),
        ({"expects_return_seconds": 1e12}, "expects_return_seconds"),
        ({"session_over": "perhaps"}, "session_over"),
        ({"session_id": ""}, "session_id"),
    ],
)
def test_invalid_hint_is_400_with_its_name(tenants, fields, param):
    body = {"model": tenants.model, "prompt": "a", "max_tokens": 1, **fields}
    answer = tenants.post("/v1/completions", body, "key-of-tenant-one")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_close_without_session_id_is_400(tenants):
    answer = tenants.post("/v1/sessions/close", {}, "key-of-tenant-one")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "session_id"
