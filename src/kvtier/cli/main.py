"""The `kvtier` command: parses arguments and calls the module that does the work."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

import kvtier
from kvtier.cli import bench, completion, generate, replay, serve, stores
from kvtier.cli.parser import Commands, Parser, add_command, check_config, check_environment, read_config, suggest
from kvtier.errors import KvtierError

_EXIT_CODES = """exit codes:
  0  done
  1  could not be done, or `verify` found damage
  2  not understood
  130  interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if it went well, 1 if it could not be done, 2 if it was not understood."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the locale has no letter for is shown as an escape
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where an error can be reported
    except KvtierError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has enough
        _drop_output()
        return 1
    except UnicodeError as error:
        return _fail(f"input that is not text in the expected encoding: {error}")
    except OSError as error:
        _drop_output()
        return _fail(str(error))


def _run(arguments: list[str]) -> int:
    parser = Parser(prog="kvtier", description="A tiered KV-cache runtime for LLM inference.", epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"kvtier {kvtier.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    add_commands(commands)
    known: dict[str, Parser] = dict(commands.choices)
    _settle(known, arguments, parser)
    options, rest = parser.parse_known_args(arguments)
    options.parser.refuse_unknown(rest)
    return int(options.run(options))


def _fail(message: str) -> int:
    with contextlib.suppress(OSError):  # standard error may be full or closed, too
        print(f"kvtier: {message}", file=sys.stderr)
    return 1


def _drop_output() -> None:
    """Send the rest of standard output to /dev/null: the interpreter flushes it at exit, and would fail again."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def add_commands(commands: Commands) -> None:
    """Every command there is. One more is one more line."""
    serve.add(commands)
    generate.add(commands)
    bench.add(commands)
    stores.add(commands)
    replay.add(commands)
    _add_doctor(commands)
    completion.add(commands)


def _settle(known: dict[str, Parser], arguments: Sequence[str], parser: Parser) -> None:
    """Defaults from the TOML file and the environment, for the command that was named."""
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    if name and name not in known:
        parser.error(f"there is no command {name!r} (commands: {', '.join(known)}){suggest(name, known)}")
    if not name:
        return
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    file, origin = read_config(finder.parse_known_args(arguments)[0].config)
    check_config(file, origin, known)
    check_environment(os.environ, known)
    known[name].take_settings(name, os.environ, file, origin)
    known[name].set_defaults(config_file=file)


def _add_doctor(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from kvtier.cli.doctor import doctor

        return doctor(as_json=options.json, recalibrate=options.calibrate)

    text = "Show what this machine has and which copy paths work on it, and why others do not."
    command = add_command(commands, "doctor", text, "kvtier doctor\nkvtier doctor --calibrate --json", run)
    command.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the copy paths anew (about a second per GPU) and keep the result",
    )
