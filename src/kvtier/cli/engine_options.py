"""Command-line options generated from the fields of a configuration dataclass."""

from __future__ import annotations

import argparse
from dataclasses import Field, fields
from typing import Any

from kvtier.cli.parser import Parser
from kvtier.server.config import EngineOptions, TierOptions


def add_fields(command: Parser, title: str, config: type, names: str = "") -> None:
    """Add the options of a configuration to a command. `names` lists the options to add, or is empty for all."""
    group = command.add_argument_group(title)
    for name, field in _fields(config).items():
        if names and name not in names.split():
            continue
        arguments = {**field.metadata, "dest": name}
        match field.default:
            case bool():
                arguments |= {"action": "store_true"}
            case tuple():
                arguments |= {"action": "append", "default": []}
            case str():
                arguments |= {"default": field.default}
            case number:
                unit = "BYTES" if name.endswith("_bytes") else "SECONDS" if name.endswith("_seconds") else "N"
                arguments = {"type": type(number), "default": number, "metavar": unit, **arguments}
        group.add_argument(f"--{name.replace('_', '-')}", **arguments)


def read_fields(options: argparse.Namespace, config: type) -> dict[str, Any]:
    """Return the parsed values of a configuration's options, by field name."""
    values = {field.name: getattr(options, dest, field.default) for dest, field in _fields(config).items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _fields(config: Any) -> dict[str, Field[Any]]:
    """Return the fields that `kvtier.server.config.option` created, by option name."""
    return {field.metadata["dest"] or field.name: field for field in fields(config) if field.metadata}


def add_engine_options(command: Parser) -> None:
    add_fields(
        command,
        "model",
        EngineOptions,
        "model device dtype tensor_parallel invariant products phases draft_tokens threads",
    )
    add_fields(command, "cache", TierOptions)


def engine_options(options: argparse.Namespace) -> EngineOptions:
    return EngineOptions(**read_fields(options, EngineOptions), tiers=TierOptions(**read_fields(options, TierOptions)))
