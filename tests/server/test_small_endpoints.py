"""Probes, endpoints with vLLM's names, request ids, names of the model, CORS and the options of /tokenize."""

from __future__ import annotations

import httpx
import pytest

import kvtier
from kvtier.errors import ArgumentError
from kvtier.server.config import EngineOptions, ServerConfig
from server_support import VERIFY

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Will it rain?"}
TOOL = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {"type": "object"}}}
KEYS = {"KVTIER_API_KEY": "key-of-a-user", "KVTIER_ADMIN_KEY": "key-of-an-admin"}
SITE = "https://chat.example.com"


def ask(server, key: str = "", headers: dict[str, str] | None = None, **fields) -> httpx.Response:
    body = {"model": server.model, "messages": [USER], "max_tokens": 2, **fields}
    return server.post(CHAT, json=body, headers=headers or {}, key=key)


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    """Yield a server with API keys, two model names and one allowed site."""
    from server_support import ServerProcess

    log = tmp_path_factory.mktemp("guarded") / "log"
    options = ("--model", str(tiny_model), "--threads", "1", "--name", "first", "--name", "second")
    server = ServerProcess(log, *options, "--allow-origin", SITE, env=KEYS)
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.log, server.log


def test_version_ping_livez_and_load_return_expected_values(server):
    assert server.get("/version").json() == {"version": kvtier.__version__}
    assert server.get("/load").json()["server_load"] >= 0
    for path in ("/ping", "/livez", "/health"):
        assert server.get(path).json() == {"status": "ok"}


def test_livez_of_sleeping_server_is_200_and_health_503(guarded):
    admin, user = KEYS["KVTIER_ADMIN_KEY"], KEYS["KVTIER_API_KEY"]
    assert guarded.get("/is_sleeping", user).json() == {"is_sleeping": False}
    assert guarded.post("/sleep?level=1", key=admin).status_code == 200
    try:
        assert guarded.get("/is_sleeping", user).json() == {"is_sleeping": True}
        statuses = {path: guarded.get(path).status_code for path in ("/livez", "/health", "/ping")}
        assert statuses == {"/livez": 200, "/health": 503, "/ping": 503}
        assert ask(guarded, user).status_code == 503
    finally:
        assert guarded.post("/wake_up?tags=weights", key=admin).status_code == 200
    assert guarded.get("/is_sleeping", user).json() == {"is_sleeping": False}
    assert ask(guarded, user).status_code == 200


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/reset_prefix_cache"])
def test_alias_of_control_endpoint_needs_an_admin_key(guarded, path):
    assert guarded.post(path).status_code == 401
    assert guarded.post(path, key=KEYS["KVTIER_API_KEY"]).status_code == 403


def test_reset_prefix_cache_clears_the_cache(server):
    prompt = {"model": server.model, "prompt": "some words " * 20, "max_tokens": 1}
    for _ in range(2):
        usage = server.post("/v1/completions", prompt).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    server.wait_for(lambda state: state["in_flight"] == 0)
    assert server.post("/reset_prefix_cache").status_code == 200
    usage = server.post("/v1/completions", prompt).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "param"), [("/sleep?level=5", "level"), ("/reset_prefix_cache?reset_external=maybe", "reset_external")]
)
def test_invalid_argument_in_url_is_400_with_its_name(server, path, param):
    answer = server.post(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_request_id_of_client_is_returned_and_explained(server):
    answers = {
        "from-header-1": ask(server, headers={"x-request-id": "from-header-1"}),
        "from-body-1": ask(server, headers={"x-request-id": "other"}, request_id="from-body-1"),
    }
    for name, answer in answers.items():
        assert answer.headers["x-request-id"] == name
        explained = server.get(f"/control/explain/{name}").json()
        assert explained["request_id"] == answer.json()["id"] != name
    again = ask(server, headers={"x-request-id": "from-header-1"})  # a retry with the same id
    assert server.get("/control/explain/from-header-1").json()["request_id"] == again.json()["id"]


def test_request_id_is_returned_with_errors_if_it_is_valid(server):
    assert ask(server, headers={"x-request-id": "abc"}, max_tokens=-1).headers["x-request-id"] == "abc"
    assert "x-request-id" not in ask(server, headers={"x-request-id": "a b" * 100}, max_tokens=-1).headers
    assert ask(server, headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("chatcmpl-")
    assert ask(server, request_id="a b").json()["error"]["param"] == "request_id"


def test_smaller_of_two_token_limits_applies(server):
    for limits in ({"max_tokens": 2, "max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 2}):
        assert ask(server, **limits, ignore_eos=True).json()["usage"]["completion_tokens"] == 2


def test_model_has_several_names(guarded):
    key = KEYS["KVTIER_API_KEY"]
    assert [model["id"] for model in guarded.get("/v1/models", key).json()["data"]] == ["first", "second"]
    assert guarded.get("/v1/models/second", key).json()["id"] == "second"
    for name in ("first", "second"):
        assert ask(guarded, key, model=name).json()["model"] == name
    error = ask(guarded, key, model="third").json()["error"]
    assert ("'first', 'second'" in error["message"], error["param"]) == (True, "model")


def test_cors_allows_requests_of_allowed_site(guarded):
    wanted = {
        "origin": SITE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    preflight = httpx.options(guarded.url + CHAT, headers=wanted, verify=VERIFY)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, SITE)
    answer = ask(guarded, KEYS["KVTIER_API_KEY"], {"origin": SITE, "sec-fetch-site": "cross-site"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, SITE)
    other = httpx.options(guarded.url + CHAT, headers={**wanted, "origin": "https://evil.example"}, verify=VERIFY)
    assert "access-control-allow-origin" not in other.headers


def test_allowed_site_may_use_a_server_without_keys(start):
    server = start("--allow-origin", SITE)
    statuses = [
        ask(server, headers={"origin": origin, "sec-fetch-site": "cross-site"}).status_code
        for origin in (SITE, "https://evil.example")
    ]
    assert statuses == [200, 403]


def test_allowing_all_sites_without_keys_raises():
    with pytest.raises(ArgumentError, match="has no API keys"):
        ServerConfig(EngineOptions(), allow_origin=("*",))


@pytest.mark.parametrize(
    ("options", "step_tokens"),
    [
        (EngineOptions(), 128),
        (EngineOptions(max_rows=200), 200),  # a step has room for a token of each request
        (EngineOptions(max_step_tokens=64), 64),
        (EngineOptions(device="cuda:1"), 512),
    ],
)
def test_tokens_per_step_depend_on_device_and_options(options, step_tokens):
    assert options.step_tokens == step_tokens


def test_detokenize_reverses_tokenize(server):
    text = "Gr\u00fc\u00dfe <|im_start|> \u96ea"
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens, "model": server.model}).json() == {"prompt": text}
    for body in ({"tokens": [999]}, {"tokens": "x"}, {"tokens": []}, {"tokens": [-1]}, {}):
        answer = server.post("/detokenize", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens"), answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"messages": [USER, {"role": "assistant", "content": "It"}], "continue_final_message": True},
    ],
)
def test_tokenize_of_messages_equals_tokens_of_chat(server, fields):
    body = {"messages": [USER], **fields}
    tokens = server.post("/tokenize", body).json()["tokens"]
    chat = ask(server, **body, return_token_ids=True, tool_choice="auto").json()
    assert chat["prompt_token_ids"] == tokens
    assert chat["usage"]["prompt_tokens"] == len(tokens)


def test_tokenize_returns_the_texts_of_tokens(server):
    answer = server.post("/tokenize", {"prompt": "a<|im_end|>", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "<|im_end|>"]


def test_enable_thinking_is_a_variable_of_the_template():
    from kvtier.server.protocol import ChatRequest

    chat = {"model": "tiny", "messages": [USER]}
    assert ChatRequest(**chat).template_variables == {}
    assert ChatRequest(**chat, enable_thinking=False).template_variables == {"enable_thinking": False}
    both = ChatRequest(**chat, enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    assert both.template_variables == {"enable_thinking": True}
