"""`kvtier serve`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtier.cli.engine_options import add_engine_options, engine_options
from kvtier.cli.parser import Commands, add_command, suggest
from kvtier.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    from kvtier.server.config import ServerConfig, Tenant

_NEEDED = ("fastapi", "uvicorn", "uvloop", "httptools", "pydantic")
_KINDS = {"str": (str, "a text"), "int": (int, "a whole number"), "bool": (bool, "true or false")}
_LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def add(commands: Commands) -> None:
    """`serve`."""
    text = "Serve a model over HTTP, as OpenAI does, with a dashboard at / and a control API."
    examples = """
    kvtier serve
    kvtier serve --model /models/llama-3-8b --device cuda --dtype bf16 --port 9000
    KVTIER_API_KEY=... KVTIER_ADMIN_KEY=... kvtier serve --host 0.0.0.0
    kvtier serve --config kvtier.toml      (see docs/operating.md)
    """
    command = add_command(commands, "serve", text, examples, run)
    add_option = command.add_argument
    add_option("--host", default="127.0.0.1", help="the address to listen at; one that others can reach needs keys")
    add_option("--port", type=int, default=8000, help="0 for any that is free")
    add_option("--name", default="", help="what the API calls the model, if not its own name")
    add_engine_options(command)
    add_option("--max-rows", type=int, default=64, help="requests in a step of the engine")
    add_option("--max-step-tokens", type=int, default=512, help="tokens in a step; longer prompts take several")
    add_option("--max-waiting", type=int, default=256, help="answers that may wait for a place; more get 429")
    add_option("--max-answers", type=int, default=16, help="n times prompts, of one request")
    add_option("--max-body-bytes", type=int, default=4 << 20, help="of a request")
    add_option("--body-seconds", type=float, default=30.0, help="in which a body must have arrived")
    add_option("--request-seconds", type=float, default=600.0, help="in which an answer must be over")
    add_option("--drain-seconds", type=float, default=30.0, help="for requests to finish after SIGTERM")
    add_option("--prepare-seconds", type=float, default=5.0, help="to tokenize a long prompt, or to compile a schema")
    add_option("--prepare-processes", type=int, default=2, help="worker processes that tokenize and compile")
    add_option("--max-buffered-bytes", type=int, default=64 << 20, help="of all bodies that are being read or prepared")
    add_option("--max-response-bytes", type=int, default=64 << 20, help="size of a response that is not streamed")
    _add_connection_options(command)
    add_option("--record", default="", metavar="FILE", help="a log of keys, lengths and times, for kvtier replay")
    add_option("--log-level", default="info", choices=_LEVELS, help="of the log on standard error")


def _add_connection_options(command: argparse.ArgumentParser) -> None:
    add_option = command.add_argument
    add_option("--max-connections", type=int, default=1024, help="open connections; fewer if ulimit -n is low")
    add_option("--max-connections-per-address", type=int, default=512, help="open connections from one address")
    add_option("--max-url-bytes", type=int, default=8 << 10, help="length of a URL; longer ones get 414")
    add_option("--max-header-bytes", type=int, default=64 << 10, help="size of all headers; larger ones get 431")
    add_option("--header-seconds", type=float, default=10.0, help="time to receive the headers of a request")
    add_option("--idle-seconds", type=float, default=15.0, help="time between two requests of a connection")
    add_option("--send-seconds", type=float, default=60.0, help="time for which a client may read nothing")
    add_option("--engine-reply-seconds", type=float, default=5.0, help="time for the engine process to reply")
    add_option("--engine-step-seconds", type=float, default=120.0, help="longest step of the engine")
    add_option("--control-seconds", type=float, default=120.0, help="longest call of the control API")


def run(options: argparse.Namespace) -> int:
    """Serve until told to end."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(f"serving needs {', '.join(missing)}: pip install 'kvtier[server]'")
    from kvtier.server.serve import serve

    config = _config(options)
    _start_log(options)

    def ready(address: str) -> None:
        told = {"event": "ready", "model": config.model_name, "address": address}
        print(json.dumps(told) if options.json else f"kvtier: serving {config.model_name} at {address}", flush=True)

    return serve(config, ready=ready)


def _config(options: argparse.Namespace) -> ServerConfig:
    from kvtier.server.config import Limits, ServerConfig

    limits = Limits(
        body_bytes=options.max_body_bytes,
        body_seconds=options.body_seconds,
        request_seconds=options.request_seconds,
        waiting=options.max_waiting,
        answers=options.max_answers,
        drain_seconds=options.drain_seconds,
        prepare_seconds=options.prepare_seconds,
        prepare_processes=options.prepare_processes,
        buffered_bytes=options.max_buffered_bytes,
        response_bytes=options.max_response_bytes,
        connections=options.max_connections,
        connections_per_address=options.max_connections_per_address,
        url_bytes=options.max_url_bytes,
        header_bytes=options.max_header_bytes,
        header_seconds=options.header_seconds,
        idle_seconds=options.idle_seconds,
        send_seconds=options.send_seconds,
        engine_reply_seconds=options.engine_reply_seconds,
        engine_step_seconds=options.engine_step_seconds,
        control_seconds=options.control_seconds,
    )
    tenants = _tenants(options.config_file.get("tenants", []), os.environ)
    return ServerConfig(engine_options(options), limits, options.host, options.port, options.name, tenants)


def _tenants(tables: Any, environ: Mapping[str, str]) -> tuple[Tenant, ...]:
    """Of [[tenants]] in the TOML file, and the two that the environment may name."""
    from kvtier.server.config import Tenant

    known = Tenant.__dataclass_fields__
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise ArgumentError("tenants must be tables: [[tenants]]")
    found = []
    for table in tables:
        for key, value in table.items():
            if key not in known:
                raise ArgumentError(f"[[tenants]] has no {key}{suggest(key, known)}")
            kind, what = _KINDS[str(known[key].type)]
            if type(value) is not kind:  # not shown: it may be a key
                raise ArgumentError(f"[[tenants]] {key} must be {what}, got a value of type {type(value).__name__}")
        if "name" not in table or "key" not in table:
            raise ArgumentError("each of [[tenants]] needs a name and a key")
        found.append(Tenant(**table))
    for variable, name, admin in (("KVTIER_API_KEY", "default", False), ("KVTIER_ADMIN_KEY", "admin", True)):
        if environ.get(variable):
            found.append(Tenant(name, environ[variable], admin))
    return tuple(found)


def _start_log(options: argparse.Namespace) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if options.json else logging.Formatter(_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(options.log_level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and stop are told by our own lines


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record, with its traceback if it has one."""
        told = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)
