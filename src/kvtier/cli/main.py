"""The `kvtier` command: parses the command line and runs a subcommand."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

import kvtier
from kvtier.cli import bench, completion, generate, replay, serve, stores
from kvtier.cli.parser import Commands, Parser, add_command, check_environment, read_config, suggest
from kvtier.errors import KvtierError

_EPILOG = """exit codes:
  0    success
  1    failure, or `verify` found damage
  2    invalid command line
  130  interrupted

Run 'kvtier COMMAND --help' for the options of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print \u escapes for characters that the locale cannot encode
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, because errors at interpreter exit cannot be handled
    except KvtierError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        _drop_output()
        return 1
    except UnicodeError as error:
        return _fail(f"input is not text in the expected encoding: {error}")
    except OSError as error:
        _drop_output()
        return _fail(str(error))


def _run(arguments: list[str]) -> int:
    text = "Tiered KV cache for LLM inference: device, host memory, disk and shared stores."
    parser = Parser(prog="kvtier", usage="kvtier COMMAND [options]", description=text, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"kvtier {kvtier.__version__}", help="show the version")
    commands = parser.add_subparsers(required=True, title="commands", metavar="COMMAND", parser_class=Parser)
    add_commands(commands)
    known: dict[str, Parser] = dict(commands.choices)
    _apply_settings(known, arguments, parser)
    options, rest = parser.parse_known_args(arguments)
    options.parser.refuse_unknown(rest)
    return int(options.run(options))


def _fail(message: str) -> int:
    with contextlib.suppress(OSError):  # standard error may also be full or closed
        print(f"kvtier: {message}", file=sys.stderr)
    return 1


def _drop_output() -> None:
    """Redirect standard output to /dev/null, because the interpreter's flush at exit would fail again."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def add_commands(commands: Commands) -> None:
    serve.add(commands)
    generate.add(commands)
    bench.add(commands)
    stores.add(commands)
    replay.add(commands)
    _add_doctor(commands)
    _add_build_native(commands)
    completion.add(commands)


def _add_build_native(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from kvtier.cli.native import build_native

        return build_native(options)

    text = (
        "Compile the native code for a container image, in variants for several processors. Set KVTIER_NATIVE_DIR to "
        "the folder at run time; then no compiler is needed."
    )
    examples = "kvtier build-native /opt/kvtier/native\nKVTIER_NATIVE_DIR=/opt/kvtier/native kvtier doctor"
    command = add_command(commands, "build-native", text, examples, run, "FOLDER")
    command.add_argument("folder", metavar="FOLDER", help="folder for the libraries; made if it does not exist")


def _apply_settings(known: dict[str, Parser], arguments: Sequence[str], parser: Parser) -> None:
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    if name and name not in known:
        parser.error(f"unknown command {name!r} (commands: {', '.join(known)}){suggest(name, known)}")
    if not name:
        return
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    file, origin = read_config(finder.parse_known_args(arguments)[0].config, known)
    check_environment(os.environ, known)
    known[name].apply_settings(name, os.environ, file, origin)
    known[name].set_defaults(config_file=file)


def _add_doctor(commands: Commands) -> None:
    def run(options: argparse.Namespace) -> int:
        from kvtier.cli.doctor import doctor

        return doctor(options)

    text = "Show the hardware, packages and usable copy paths of this machine."
    command = add_command(commands, "doctor", text, "kvtier doctor\nkvtier doctor --calibrate --json", run)
    help = "measure the copy paths again (about a second per GPU) and save the result"
    command.add_argument("--calibrate", action="store_true", help=help)
