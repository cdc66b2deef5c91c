"""Command line parser and progress line.

A progress bar on standard error, only where somebody watches.

Parser: argparse, with settings from a file and the environment, and a suggestion for what is misspelt.

flag  >  environment (KVTIER_PORT)  >  TOML file ([serve] port = 8001)  >  default
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ArgumentError


class ProgressLine:
    """One line that says how far it is; nothing unless standard error is a terminal."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit = total, unit
        self._show = sys.stderr.isatty()
        self._last = 0.0

    def update(self, num_done: int, note: str = "") -> None:
        """Rewrite the line, ten times a second at most."""
        now = time.monotonic()
        if self._show and (now - self._last > 0.1 or num_done >= self._total):
            self._last = now
            filled = 30 * num_done // max(1, self._total)
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\r[{bar}] {num_done}/{self._total} {self._unit} {note}\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._show:
            sys.stderr.write("\n")


PREFIX = "KVTIER_"
# Read elsewhere, or not an option of any command. Secrets are never options: every user of a machine can see those.
_OTHER_VARIABLES = ("KVTIER_CONFIG", "KVTIER_API_KEY", "KVTIER_ADMIN_KEY", "KVTIER_CACHE_DIR", "KVTIER_SOAK")
_OTHER_TABLES = ("tenants",)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class Parser(argparse.ArgumentParser):
    """Of the whole command line, or of one command. Options are never abbreviated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.options: dict[str, argparse.Action] = {}
        """Those that have a value elsewhere, too, by name."""
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """As argparse's."""
        action = super().add_argument(*names, **options)
        if action.option_strings and action.dest not in ("help", "version", "config"):
            self.options[action.dest] = action
        return action

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, which hides that help could not be written."""
        if message and (stream := file or sys.stderr) is not None:
            stream.write(message)

    def refuse_unknown(self, arguments: Iterable[str]) -> None:
        """Exit with code 2 if something is left that nobody knows."""
        for argument in arguments:
            known = [name for action in self._known() for name in action.option_strings]
            name = argument.partition("=")[0]
            what = f"unknown option {name}" if name.startswith("-") else f"unexpected argument {argument!r}"
            self.error(what + suggest(name, known))

    def take_settings(self, name: str, environ: Mapping[str, str], file: Mapping[str, Any], origin: str) -> None:
        """Let the options of command `name` default to what the environment and the TOML file say."""
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

    def _known(self) -> Iterable[argparse.Action]:
        return [*self.options.values()]

    def _converted(self, action: argparse.Action, value: Any, where: str) -> Any:
        """A value of the file or the environment as the flag would have given it."""
        if action.nargs == 0:  # a switch
            if isinstance(value, bool):
                return value
            if str(value).lower() in (*_TRUE, *_FALSE):
                return str(value).lower() in _TRUE
            self.error(f"{where} must be true or false, got {value!r}")
        if isinstance(action, argparse._AppendAction):
            return [str(each) for each in value] if isinstance(value, list) else [str(value)]
        convert: Callable[[str], Any] = action.type if callable(action.type) else str
        try:
            found = convert(str(value))
        except argparse.ArgumentTypeError as error:
            self.error(f"{where}: {error}")
        except ValueError:
            self.error(f"{where} must be {convert.__name__}, got {value!r}")
        if action.choices is not None and found not in action.choices:
            self.error(f"{where} must be one of {', '.join(map(str, action.choices))}, got {value!r}")
        return found


Commands = Any
"""What `Parser.add_subparsers` gives: argparse keeps its type to itself."""


def add_command(commands: Commands, name: str, text: str, examples: str, run: Callable[..., int]) -> Parser:
    """A command with what all have: a sentence, examples, --json and --config. `run` gets the options."""
    epilog = "examples:\n" + "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines())
    short = text[0].lower() + text[1:].partition(".")[0]
    parser: Parser = commands.add_parser(name, help=short, description=text, epilog=epilog)
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line, and nothing else")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with settings ($KVTIER_CONFIG)")
    parser.set_defaults(run=run, parser=parser)
    return parser


def read_config(path: str | None) -> tuple[dict[str, Any], str]:
    """The TOML file and its name; nothing if there is none."""
    path = path or os.environ.get("KVTIER_CONFIG")
    if not path:
        return {}, ""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8")), path
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:  # ValueError: a NUL in the path
        raise ArgumentError(f"{path} cannot be read as TOML: {error}") from error


def check_config(file: Mapping[str, Any], origin: str, commands: Mapping[str, Parser]) -> None:
    """Refuse tables that belong to nobody."""
    for key in file:
        if key not in commands and key not in _OTHER_TABLES:
            raise ArgumentError(f"{origin}: there is no [{key}]{suggest(key, [*commands, *_OTHER_TABLES])}")


def check_environment(environ: Mapping[str, str], commands: Mapping[str, Parser]) -> None:
    """Refuse variables that look like a misspelt option. Others that begin with KVTIER_ may be somebody else's."""
    known = {PREFIX + key.upper() for parser in commands.values() for key in parser.options} | {*_OTHER_VARIABLES}
    for name in environ:
        if name.startswith(PREFIX) and name not in known and (near := suggest(name, known, cutoff=0.85)):
            raise ArgumentError(f"the environment has {name}, which is no setting{near}")


def suggest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean ..?`, or nothing."""
    near = difflib.get_close_matches(name, [*known], 1, cutoff)
    return f"; did you mean {near[0]}?" if near else ""
