"""Invalid requests get a 4xx response. If a field is invalid, the error names the field."""

from __future__ import annotations

import errno
import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tiny_model import CONTEXT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def refused(answer: httpx.Response, status: int = 400) -> dict:
    """Check that a response has this status and an error in OpenAI's format. Return the error."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert {*body} == {"error"}
    assert {*body["error"]} == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


CASES = {
    "temperature": [-1, 101, "hot", [1], True],
    "top_p": [0, -0.1, 1.5, "all"],
    "top_k": [-2, 1.5, 2**40],
    "min_p": [-1, 2],
    "presence_penalty": [3, "x"],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, -1, 10**9],
    "n": [0, -1, 1.5, 129, "1"],
    "seed": [2**63, "x", 1.5],
    "max_tokens": [0, -1, "ten", 2**31],
    "min_tokens": [-1],
    "prompt_logprobs": [-1, 21, "all", True],
    "prompt_logprobs_start": [-1, 2**31],
    "return_token_ids": ["yes"],
    "stop": [[""], "", 5, [["a"]], ["x"] * 17],
    "stop_token_ids": [[-1], "x", ["a"], [259], [5, 10**6]],  # the tiny model has 259 tokens
    "stream": ["yes", 1],
    "cache_salt": ["", 5, "x" * 257],
    "priority": [1001, "high", 1.5],
    "ignore_eos": ["no"],
    "user": [5],
    "model": [5, "", None],
    "messages": [[], "Hello", None, 5],
    "top_logprobs": [21, -1],
    "logprobs": [5],
    "tools": [{}, "x", [{"type": "function"}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "xml"}, "json", {}],
    "stream_options": [{"include_usage": "yes"}, {"other": True}],
    "temperatur": [1],
    "logit_bias": [{"5": 101}, {"x": 1}, [5]],
    "allowed_token_ids": [[], [-1], "x", 5],
    "bad_words": ["x", [5], [""]],
    "guided_regex": [5, "("],
    "structured_outputs": [{"regex": 5}, {"other": 1}, "x"],
    "query": [1],
    "body": [1],
    "path": ["x"],
}


@pytest.mark.parametrize("field", CASES)
def test_error_for_invalid_value_names_the_field(server, field):
    for value in CASES[field]:
        body = {"model": server.model, "messages": MESSAGES, "max_tokens": 1, field: value}
        error = refused(server.post(CHAT, body))
        assert error["param"].split(".")[0] == field, (value, error)
        assert field in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "wizard", "content": "x"}, "messages.0.role"),
        ({"content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "messages.0.content"),
        ({"role": "user"}, "messages.0"),
        ("Hello", "messages.0"),
    ],
)
def test_error_for_invalid_message_names_index_of_message(server, message, where):
    error = refused(server.post(CHAT, {"model": server.model, "messages": [message], "max_tokens": 1}))
    assert error["param"].startswith(where)


PART = {"type": "image_url", "image_url": {"url": "data:"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}


@pytest.mark.parametrize(
    ("path", "fields", "param", "why"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [PART]}]}, "messages.0.content.0.type", "'text'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type", "'type'"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "required",
        ),
        (CHAT, {"messages": [{"role": "user", "content": {}}]}, "messages.0.content", "valid string"),
        (CHAT, {"messages": [*MESSAGES, CALLED]}, "messages.1.tool_calls.0", "function.name"),
        (CHAT, {"tool_choice": "any"}, "tool_choice", "'required'"),
        (CHAT, {"tool_choice": ALLOWED}, "tool_choice.type", "'function'"),
        (CHAT, {"stop": [None]}, "stop.0", "valid string"),
        (CHAT, {"response_format": {"type": "regex"}}, "response_format.type", "'json_schema'"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "",
        ),
        (CHAT, {"structured_outputs": {"cache_salt": "x"}}, "structured_outputs.cache_salt", "unknown field"),
        (CHAT, {"prompt": "x"}, "prompt", "this endpoint does not have the field"),
        (TEXT, {"prompt": "x", "tools": []}, "tools", "this endpoint does not have the field"),
        (
            TEXT,
            {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "regex",
        ),
        (TEXT, {"prompt": "x", "allowed_token_ids": [65], "bad_words": ["b"]}, "allowed_token_ids", "no token"),
        (TEXT, {"prompt": "x", "guided_json": "[]"}, "guided_json", "not a JSON object"),
    ],
)
def test_error_names_the_exact_place_in_the_body(server, path, fields, param, why):
    base = {"messages": MESSAGES} if path == CHAT else {}
    error = refused(server.post(path, {"model": server.model, **base, "max_tokens": 2, **fields}))
    assert (error["param"], why in error["message"]) == (param, True), error


@pytest.mark.parametrize(
    ("value", "param"),
    [("NaN", "temperature"), ("1e999", "temperature"), ("1" * 5000, None), ("-" + "1" * 40, "temperature")],
)
def test_number_out_of_range_is_400(server, value, param):
    data = json.dumps({"model": server.model, "messages": MESSAGES, "temperature": 7}).replace("7", value)
    error = refused(server.post(CHAT, content=data, headers={"content-type": "application/json"}))
    assert error["param"] == param
    assert ("temperature" if param else "too many digits") in error["message"]


def test_lone_surrogate_is_400_and_names_the_field(server):
    data = json.dumps({"model": server.model, "messages": [{"role": "user", "content": "a\ud800"}]})
    error = refused(server.post(CHAT, content=data, headers={"content-type": "application/json"}))
    assert (error["param"], "unicode" in error["message"]) == ("messages.0.content", True)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]})])
def test_tokenizing_with_an_unknown_model_is_404(server, path, body):
    assert refused(server.post(path, {**body, "model": "gpt-5"}), 404)["param"] == "model"


@pytest.mark.parametrize("prompt", [[], [[]], [""], "", [1.5], [[1], "x"], {"a": 1}, [-1], [2**31], None, [10**6]])
def test_invalid_prompt_is_400(server, prompt):
    error = refused(server.post(TEXT, {"model": server.model, "prompt": prompt, "max_tokens": 1}))
    assert "prompt" in error["message"]
    assert error["param"].split(".")[0] == "prompt"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b"\0" * 100,
    ],
    ids=[
        *("empty", "truncated", "list", "null", "string", "utf16", "invalid-utf8", "lone-surrogate"),
        *("nan", "infinity", "deep-objects", "deep-lists", "nul-bytes"),
    ],
)
def test_malformed_body_is_400(server, data):
    refused(server.post(CHAT, content=data, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value at 0"),
        (b'{"model": "tiny",}', "at 17"),
        (b'{"model": "tiny"} x', "Extra data at 18"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"[1]", "valid dictionary"),
        (b'"x"', "valid dictionary"),
    ],
)
def test_error_of_the_whole_body_names_the_body_and_the_cause(server, data, why):
    """The error names no field: `param` is null, as in OpenAI's API."""
    error = refused(server.post(CHAT, content=data, headers={"content-type": "application/json"}))
    assert (error["param"], "the body" in error["message"]) == (None, True)
    assert why in error["message"]


def test_body_with_lone_surrogate_is_400(server):
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": "\ud800"}}}
    for more in ({"tools": [tool]}, {"cache_salt": "\ud800"}, {"user": "\udfff"}):
        data = json.dumps({**body, **more})
        refused(server.post(CHAT, content=data, headers={"content-type": "application/json"}))


DEEP = {
    "tools": '[{"type": "function", "function": {"name": "f", "parameters": DEEP}}]',
    "response_format": '{"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}',
    "messages": '[{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "more": DEEP}]}]',
}


@pytest.mark.parametrize("field", DEEP)
def test_error_for_deeply_nested_json_names_the_field(server, field):
    def send(depth):
        fields = {key: json.dumps(value) for key, value in (("model", server.model), ("messages", MESSAGES))}
        fields[field] = DEEP[field].replace("DEEP", '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1))
        data = ", ".join(f'"{key}": {value}' for key, value in {**fields, "max_tokens": "1"}.items())
        return server.post(CHAT, content=f"{{{data}}}", headers={"content-type": "application/json"})

    inside = 1 if field == "messages" else 0  # the tool call is level 1, so DEEP begins at level 2
    for depth in (101, 300, 900):
        error = refused(send(depth))
        assert error["param"].split(".")[0] == field
        assert "deeper than 100 levels" in error["message"]
    if field != "response_format":  # a schema with the keyword "a" is invalid at any depth
        assert send(100 - inside).status_code == 200


def test_body_with_wrong_content_type_is_400(server):
    data = json.dumps({"model": server.model, "messages": MESSAGES, "max_tokens": 1})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        refused(server.post(CHAT, content=data, headers={"content-type": kind}))


def test_unknown_model_or_path_is_404_and_wrong_method_405(server):
    error = refused(server.post(CHAT, {"model": "gpt-5", "messages": MESSAGES}), 404)
    assert error["param"] == "model"
    assert "tiny" in error["message"]
    refused(server.get("/v1/models/gpt-5"), 404)
    refused(server.get("/v2/everything"), 404)
    refused(server.get(CHAT), 405)


def test_error_for_too_long_prompt_contains_the_limit(server):
    error = refused(server.post(TEXT, {"model": server.model, "prompt": "x" * CONTEXT, "max_tokens": 1}))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert str(CONTEXT) in error["message"]
    error = refused(server.post(TEXT, {"model": server.model, "prompt": "x" * 2000, "max_tokens": 100}))
    assert error["param"] == "max_tokens"
    assert str(CONTEXT - 2000) in error["message"]


def test_conflicting_options_are_400(server):
    def error(path=CHAT, **more):
        base = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
        return refused(server.post(path, {"model": server.model, **base, **more}))

    assert error(top_logprobs=2)["param"] == "top_logprobs"
    assert error(continue_final_message=True)["param"] == "continue_final_message"
    final = [*MESSAGES, {"role": "assistant", "content": "x"}]
    both = {"messages": final, "continue_final_message": True, "add_generation_prompt": True}
    assert error(**both)["param"] == "continue_final_message"
    assert error(stream_options={"include_usage": True})["param"] == "stream_options"
    assert error(max_tokens=5, min_tokens=6)["param"] == "min_tokens"
    assert error(n=2, temperature=0)["param"] == "n"
    assert error(n=17)["param"] == "n"
    assert error(TEXT, prompt=["x"] * 9, n=2, max_tokens=1)["param"] == "n"
    assert error(echo=True)["param"] == "echo"
    assert error(stream=True, prompt_logprobs=1)["param"] == "prompt_logprobs"
    assert error(prompt_logprobs_start=3)["param"] == "prompt_logprobs_start"
    assert error(TEXT, prompt="x", echo=True, prompt_logprobs_start=3)["param"] == "prompt_logprobs_start"
    assert error(TEXT, prompt="x", max_tokens=0)["param"] == "max_tokens"


def test_too_large_body_is_413_with_or_without_content_length(server):
    size = (4 << 20) + 1
    error = refused(server.post(CHAT, content=b"x" * size, headers={"content-type": "application/json"}), 413)
    assert str(size) in error["message"]

    def chunks():
        for _ in range(80):
            yield b"x" * 65536

    answer = server.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
    assert refused(answer, 413)["code"] == "body_too_large"


def test_non_http_bytes_close_only_their_connection(server):
    address = urlsplit(server.url)
    for rubbish in (b"\0\1\2\3\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 100_000, b"\r\n\r\n"):
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            try:
                connection.sendall(rubbish)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except OSError as error:  # the server closed the connection before it had read all bytes
                if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                    raise
    assert server.get("/health").status_code == 200


def test_server_without_keys_rejects_cross_site_requests(server):
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
    assert server.post(CHAT, json=body, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert server.post(CHAT, json=body, headers={"host": "evil.example:8000"}).status_code == 403
    assert server.post(CHAT, json=body, headers={"sec-fetch-site": "same-origin"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 403), ("http://[", 403), (None, 200)],
)
def test_server_without_keys_rejects_foreign_origins(server, origin, status):
    for path in ("/control/wake", "/health"):
        headers = {"origin": origin or server.url}
        method = "POST" if path == "/control/wake" else "GET"
        assert httpx.request(method, server.url + path, headers=headers, timeout=60).status_code == status


@pytest.mark.parametrize("path", ["/state/", "/health/", "/v1/models//", "/v1/completions/", "/control/tiers/"])
def test_trailing_slash_is_404_without_redirect(server, path):
    answer = server.get(path)
    assert "location" not in answer.headers
    refused(answer, 404)


def raw_status(server, head: bytes) -> bytes:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(head + b"Connection: close\r\n\r\n")
        return connection.recv(65536).split(b" ")[1]


@pytest.mark.parametrize("host", [b"[", b"[::1", b"a b", b"x:port", b"", b"a/b", b"user@localhost", b"\xff"])
@pytest.mark.parametrize("path", [b"/health", b"/nope", b"/state/", b"/"])
def test_invalid_host_is_400_on_every_path(server, host, path):
    assert raw_status(server, b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n") == b"400"


def test_missing_or_duplicate_host_header_is_400(server):
    assert raw_status(server, b"GET /health HTTP/1.1\r\n") == b"400"
    assert raw_status(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n") == b"400"
    assert raw_status(server, b"GET /health HTTP/1.1\r\nHost: [::1]:80\r\n") == b"200"


@pytest.mark.parametrize("name", ["self", "messages", "tools", "parse_special", "max_tokens"])
def test_template_variable_with_a_reserved_name_is_400(server, name):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: 1}}
    error = refused(server.post("/v1/chat/completions", body))
    assert error["param"] == "chat_template_kwargs"
    assert name in error["message"]
