"""`kvtier serve`: parses the options and starts the server."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.cli.engine_options import add_engine_options, add_fields, engine_options, read_fields
from kvtier.cli.parser import Commands, Parser, add_command, suggest
from kvtier.errors import ArgumentError, UnavailableError
from kvtier.integrations.ray.config import RayConfig
from kvtier.server.config import EngineOptions, Limits, ServerConfig, Tenant

_NEEDED = ("fastapi", "uvicorn", "uvloop", "httptools", "pydantic", "prometheus_client")
_KINDS = {"str": (str, "a string"), "int": (int, "an integer"), "bool": (bool, "true or false")}
_LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def add(commands: Commands) -> None:
    text = "Serve a model with an OpenAI-compatible HTTP API. The dashboard is at / and the control API is at /control."
    examples = """
    kvtier serve
    kvtier serve --model /models/llama-3-8b --device cuda --dtype bf16 --port 9000
    KVTIER_API_KEY=... KVTIER_ADMIN_KEY=... kvtier serve --host 0.0.0.0
    kvtier serve --config kvtier.toml      (see docs/operating.md)
    kvtier serve --cluster ray --replicas 3      (see docs/fleet.md)
    """
    command = add_command(commands, "serve", text, examples, run)
    add_fields(command, "server", ServerConfig)
    command.add_argument("--log-level", default="info", choices=_LEVELS, help="level of the log on standard error")
    add_engine_options(command)
    add_fields(command, "engine", EngineOptions, "max_rows max_step_tokens events events_replay record")
    add_fields(command, "limits", Limits)
    add_fields(command, "fleet (docs/fleet.md)", RayConfig)


def run(options: argparse.Namespace) -> int:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(f"`kvtier serve` needs {', '.join(missing)}: pip install 'kvtier[server]'")
    from kvtier.server.serve import serve

    config = _config(options)
    fleet = RayConfig(config, **read_fields(options, RayConfig))
    if not fleet.cluster and fleet != RayConfig(config):
        raise ArgumentError("--replicas and the other options of a fleet need --cluster ray")
    _start_log(options)

    def ready(address: str) -> None:
        event = {"event": "ready", "model": config.model_name, "address": address}
        print(json.dumps(event) if options.json else f"kvtier: serving {config.model_name} at {address}", flush=True)

    if fleet.cluster:
        return _serve_fleet(fleet, ready)
    return serve(config, ready=ready)


def _serve_fleet(config: RayConfig, ready: Callable[[str], object]) -> int:
    try:
        from kvtier.integrations.ray.launch import serve_fleet
    except ImportError as error:
        raise UnavailableError(f"--cluster ray needs the extra: pip install 'kvtier[ray]' ({error})") from error
    return serve_fleet(config, ready)


def fleet_config_of(table: Mapping[str, Any]) -> RayConfig:
    """Read a table of `kvtier serve` options and `tenants`. Environment variables override the options."""
    commands = Parser().add_subparsers(parser_class=Parser)
    add(commands)
    command: Parser = commands.choices["serve"]
    settings = {name: value for name, value in table.items() if name != "tenants"}
    command.apply_settings("serve", os.environ, {"serve": settings}, "args")
    command.set_defaults(config_file={"tenants": table.get("tenants", [])})
    options = command.parse_args([])
    return RayConfig(_config(options), **read_fields(options, RayConfig))


def _config(options: argparse.Namespace) -> ServerConfig:
    tenants = _tenants(options.config_file.get("tenants", []), os.environ)
    limits, server = Limits(**read_fields(options, Limits)), read_fields(options, ServerConfig)
    return ServerConfig(engine_options(options), limits, tenants=tenants, **server)


def _tenants(tables: Any, environ: Mapping[str, str]) -> tuple[Tenant, ...]:
    """Return the tenants from [[tenants]] in the TOML file, and from KVTIER_API_KEY and KVTIER_ADMIN_KEY."""
    known = Tenant.__dataclass_fields__
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise ArgumentError("tenants must be tables: [[tenants]]")
    tenants = []
    for table in tables:
        for key, value in table.items():
            if key not in known:
                raise ArgumentError(f"[[tenants]] has no field {key}{suggest(key, known)}")
            kind, what = _KINDS[str(known[key].type)]
            if type(value) is not kind:  # the value is not shown, because it may be a secret
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
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # kvtier logs the start and the stop itself


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row)
