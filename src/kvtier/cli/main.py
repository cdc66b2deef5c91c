"""The `kvtier` command: parses arguments and calls the module that does the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import kvtier
from kvtier.cli import serve
from kvtier.cli.doctor import doctor
from kvtier.cli.generate import add_commands
from kvtier.errors import KvtierError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if it went well, 1 if it could not be done, 2 if it was not understood."""
    parser = argparse.ArgumentParser(prog="kvtier", description="A tiered KV-cache runtime for LLM inference.")
    parser.add_argument("--version", action="version", version=f"kvtier {kvtier.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "doctor",
        help="show what this machine has and which copy paths work on it",
        description="Show what this machine has, which copy paths work on it, and why the others do not.",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the copy paths anew (about a second per GPU) and keep the result",
    )
    command.set_defaults(run=lambda options: doctor(as_json=options.json, recalibrate=options.calibrate))
    add_commands(commands)
    serve.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except KvtierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 1
