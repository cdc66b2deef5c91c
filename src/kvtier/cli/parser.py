"""A command line parser that also reads settings from a file and the environment. Also a progress bar.

Precedence: flag > environment (KVTIER_PORT) > TOML file ([serve] port = 8001) > default
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.errors import ArgumentError


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar if standard error is a terminal. Yield `update(num_done, note)`."""
    is_shown, last = sys.stderr.isatty(), 0.0

    def update(num_done: int, note: str) -> None:
        nonlocal last
        # Redraw at most ten times a second until the work is done.
        if is_shown and (time.monotonic() - last > 0.1 or num_done >= total):
            last = time.monotonic()
            filled = 30 * num_done // max(1, total)
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r[{bar}] {num_done}/{total} {unit} {note}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield update
    finally:
        if is_shown:
            print(file=sys.stderr)


PREFIX = "KVTIER_"
# Variables other than those of `Parser.options`. Secrets are not options, because all users can see command lines.
_OTHER_VARIABLES = (
    *("KVTIER_CONFIG", "KVTIER_API_KEY", "KVTIER_ADMIN_KEY", "KVTIER_CACHE_DIR", "KVTIER_NATIVE_DIR", "KVTIER_SOAK"),
    "KVTIER_CPU_ISA",
)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Appends the default value to the help text of each option, unless the value is empty or 0."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)
        # Minimum width of the first column. argparse computes the width, but ignores the indentation of commands.
        self._action_max_length = 14

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or not default or default == argparse.SUPPRESS:
            return text
        return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"


class Parser(argparse.ArgumentParser):
    """Parser for the whole command line or for one command. Options cannot be abbreviated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", _HelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    @property
    def options(self) -> dict[str, argparse.Action]:
        """The options that the environment and the TOML file can set, by name."""
        names = ("help", "version", "config")
        return {action.dest: action for action in self._actions if action.option_strings and action.dest not in names}

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message. Raise OSError if the write fails. The method of argparse would ignore the error."""
        if message and (stream := file or sys.stderr) is not None:
            stream.write(message)

    def refuse_unknown(self, arguments: Iterable[str]) -> None:
        for argument in arguments:
            known = [name for action in self.options.values() for name in action.option_strings]
            name = argument.partition("=")[0]
            what = f"unknown option {name}" if name.startswith("-") else f"unexpected argument {argument!r}"
            self.error(what + suggest(name, known))

    def apply_settings(self, name: str, environ: Mapping[str, str], file: Mapping[str, Any], origin: str) -> None:
        table = file.get(name, {})
        if not isinstance(table, Mapping):
            self.error(f"{origin}: {name} must be a table, [{name}]")
        for key, value in table.items():
            known = self.options.get(key.replace("-", "_"))
            if known is None:
                self.error(f"{origin}: [{name}] has no option {key}{suggest(key, self.options)}")
            known.default = self._converted(known, value, f"{origin}: {name}.{key}")
        for key, action in self.options.items():
            variable = PREFIX + key.upper()
            if variable in environ:
                action.default = self._converted(action, environ[variable], variable)

    def _converted(self, action: argparse.Action, value: Any, where: str) -> Any:
        if action.nargs == 0:  # a switch
            if isinstance(value, bool):
                return value
            if str(value).lower() in (*_TRUE, *_FALSE):
                return str(value).lower() in _TRUE
            self.error(f"{where} must be true or false, got {value!r}")
        if isinstance(action, argparse._AppendAction):
            return [str(item) for item in value] if isinstance(value, list) else [str(value)]
        convert: Callable[[str], Any] = action.type if callable(action.type) else str
        try:
            converted = convert(str(value))
        except argparse.ArgumentTypeError as error:
            self.error(f"{where}: {error}")
        except ValueError:
            self.error(f"{where} must be of type {convert.__name__}, got {value!r}")
        if action.choices is not None and converted not in action.choices:
            self.error(f"{where} must be one of {', '.join(map(str, action.choices))}, got {value!r}")
        return converted


Commands = Any
"""Type of the result of `Parser.add_subparsers`. argparse does not export this type."""


def add_command(
    commands: Commands, name: str, text: str, examples: str, run: Callable[..., int], operands: str = ""
) -> Parser:
    """Add a command with the common options. The first sentence of `text` is the command's short help."""
    epilog = "examples:\n" + "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines())
    short = text[0].lower() + text[1:].partition(".")[0]
    usage = " ".join(filter(None, ("kvtier", name, "[options]", operands)))
    parser: Parser = commands.add_parser(name, help=short, description=text, epilog=epilog, usage=usage)
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")
    parser.add_argument("--config", metavar="FILE", help="read settings from a TOML file ($KVTIER_CONFIG)")
    parser.set_defaults(run=run, parser=parser)
    return parser


def read_config(path: str | None, commands: Mapping[str, Parser]) -> tuple[dict[str, Any], str]:
    """Return the contents and path of the TOML file. Both are empty if no file is given. Reject unknown tables."""
    path = path or os.environ.get("KVTIER_CONFIG")
    if not path:
        return {}, ""
    try:
        file = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:  # ValueError: NUL in the path
        raise ArgumentError(f"{path} cannot be read as TOML: {error}") from error
    known = [*commands, "tenants"]
    for key in file:
        if key not in known:
            raise ArgumentError(f"{path}: unknown table [{key}]{suggest(key, known)}")
    return file, path


def check_environment(environ: Mapping[str, str], commands: Mapping[str, Parser]) -> None:
    """Raise ArgumentError for a variable that looks like a misspelled option. Other unknown variables are ignored."""
    known = {PREFIX + key.upper() for parser in commands.values() for key in parser.options} | {*_OTHER_VARIABLES}
    for name in environ:
        if name.startswith(PREFIX) and name not in known and (near := suggest(name, known, cutoff=0.85)):
            raise ArgumentError(f"unknown environment variable {name}{near}")


def suggest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean ...?" with the closest known name, or an empty string if none is close."""
    near = difflib.get_close_matches(name, [*known], 1, cutoff)
    return f"; did you mean {near[0]}?" if near else ""
