"""`kvtier serve`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from kvtier.cli.engine_options import add_engine_options, engine_options
from kvtier.cli.parser import Commands, Parser, add_command, suggest
from kvtier.errors import ArgumentError, UnavailableError
from kvtier.server.config import Limits, ServerConfig, Tenant

_NEEDED = ("fastapi", "uvicorn", "uvloop", "httptools", "pydantic")
_KINDS = {"str": (str, "a string"), "int": (int, "an integer"), "bool": (bool, "true or false")}
_LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
# Field of Limits: option, help. Defaults are those of Limits.
_REQUEST_LIMITS = {
    "waiting": ("--max-waiting", "answers that may wait for the engine; more get 429"),
    "answers": ("--max-answers", "answers per request (n times prompts)"),
    "body_bytes": ("--max-body-bytes", "size of a body; larger ones get 413"),
    "body_seconds": ("--body-seconds", "time to receive a body"),
    "request_seconds": ("--request-seconds", "time to complete a request"),
    "drain_seconds": ("--drain-seconds", "time for requests to finish after SIGTERM"),
    "prepare_seconds": ("--prepare-seconds", "time to tokenize a long prompt or to compile a schema"),
    "prepare_processes": ("--prepare-processes", "worker processes that tokenize and compile"),
    "buffered_bytes": ("--max-buffered-bytes", "size of all bodies that are being read or prepared"),
    "response_bytes": ("--max-response-bytes", "size of a response that is not streamed"),
    "engine_reply_seconds": ("--engine-reply-seconds", "time for the engine process to reply"),
    "engine_step_seconds": ("--engine-step-seconds", "time for a step of the engine"),
    "control_seconds": ("--control-seconds", "time for a call of the control API"),
}
_CONNECTION_LIMITS = {
    "connections": ("--max-connections", "open connections; fewer if ulimit -n is low"),
    "connections_per_address": ("--max-connections-per-address", "open connections from one address"),
    "url_bytes": ("--max-url-bytes", "length of a URL; longer ones get 414"),
    "header_bytes": ("--max-header-bytes", "size of all headers; larger ones get 431"),
    "header_seconds": ("--header-seconds", "time to receive the headers of a request"),
    "idle_seconds": ("--idle-seconds", "time between two requests of a connection"),
    "send_seconds": ("--send-seconds", "time for which a client may not read"),
}


def add(commands: Commands) -> None:
    text = "Serve a model with an OpenAI-compatible HTTP API. The dashboard is at /, the control API at /control."
    examples = """
    kvtier serve
    kvtier serve --model /models/llama-3-8b --device cuda --dtype bf16 --port 9000
    KVTIER_API_KEY=... KVTIER_ADMIN_KEY=... kvtier serve --host 0.0.0.0
    kvtier serve --config kvtier.toml      (see docs/operating.md)
    """
    command = add_command(commands, "serve", text, examples, run)
    option = command.add_argument_group("server").add_argument
    option("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on; non-local ones need API keys")
    option("--port", type=int, default=8000, help="port to listen on; 0: any free port")
    option("--name", default="", help="name of the model in the API (default: name of the folder or file)")
    option("--record", default="", metavar="FILE", help="record keys, lengths and times of requests for kvtier replay")
    option("--log-level", default="info", choices=_LEVELS, help="level of the log on standard error")
    add_engine_options(command)
    option = command.add_argument_group("batches").add_argument
    option("--max-rows", type=int, default=64, metavar="N", help="requests per step")
    option("--max-step-tokens", type=int, default=512, metavar="N", help="tokens per step; longer prompts are split")
    _add_limits(command, "request limits", _REQUEST_LIMITS)
    _add_limits(command, "connection limits", _CONNECTION_LIMITS)


def _add_limits(command: Parser, title: str, table: Mapping[str, tuple[str, str]]) -> None:
    group, defaults = command.add_argument_group(title), Limits()
    for name, (flag, text) in table.items():
        default = getattr(defaults, name)
        unit = "BYTES" if name.endswith("_bytes") else "SECONDS" if name.endswith("_seconds") else "N"
        group.add_argument(flag, type=type(default), default=default, metavar=unit, help=text)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(f"`kvtier serve` needs {', '.join(missing)}: pip install 'kvtier[server]'")
    from kvtier.server.serve import serve

    config = _config(options)
    _start_log(options)

    def ready(address: str) -> None:
        event = {"event": "ready", "model": config.model_name, "address": address}
        print(json.dumps(event) if options.json else f"kvtier: serving {config.model_name} at {address}", flush=True)

    return serve(config, ready=ready)


def _config(options: argparse.Namespace) -> ServerConfig:
    flags = {**_REQUEST_LIMITS, **_CONNECTION_LIMITS}
    limits = {name: getattr(options, flag[2:].replace("-", "_")) for name, (flag, _) in flags.items()}
    tenants = _tenants(options.config_file.get("tenants", []), os.environ)
    return ServerConfig(engine_options(options), Limits(**limits), options.host, options.port, options.name, tenants)


def _tenants(tables: Any, environ: Mapping[str, str]) -> tuple[Tenant, ...]:
    """Return the tenants of [[tenants]] in the TOML file and of the two environment variables."""
    known = Tenant.__dataclass_fields__
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise ArgumentError("tenants must be tables: [[tenants]]")
    tenants = []
    for table in tables:
        for key, value in table.items():
            if key not in known:
                raise ArgumentError(f"[[tenants]] has no field {key}{suggest(key, known)}")
            kind, what = _KINDS[str(known[key].type)]
            if type(value) is not kind:  # the value is not shown: it may be a key
                raise ArgumentError(f"[[tenants]] {key} must be {what}, got a value of type {type(value).__name__}")
        if "name" not in table or "key" not in table:
            raise ArgumentError("every tenant in [[tenants]] needs a name and a key")
        tenants.append(Tenant(**table))
    for variable, name, admin in (("KVTIER_API_KEY", "default", False), ("KVTIER_ADMIN_KEY", "admin", True)):
        if environ.get(variable):
            tenants.append(Tenant(name, environ[variable], admin))
    return tuple(tenants)


def _start_log(options: argparse.Namespace) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if options.json else logging.Formatter(_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(options.log_level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # our own log lines report start and stop


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        row = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row)
