"""docs/security.md names existing tests and states the default limits of the server and of `kvtier serve`."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvtier.cli.main import add_commands
from kvtier.cli.parser import Parser
from kvtier.server.config import Limits

ROOT = Path(__file__).resolve().parents[2]
SECURITY, OPERATING = ((ROOT / "docs" / name).read_text() for name in ("security.md", "operating.md"))
NAMED = re.findall(r"^\| (\d+) \| `([^`:]+)::(\w+)` \|$", SECURITY, re.MULTILINE)
LIMITS = {limit.name: limit.default for limit in fields(Limits)}


def format_default(name, value):
    """Format a default value in the notation of docs/security.md."""
    if name.endswith("_seconds"):
        return f"{value:g} s"
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if name.endswith("_bytes") and value % size == 0:
            return f"{value // size} {unit}"
    return f"{value}"


@pytest.fixture(scope="module")
def options():
    """Return the default of each option of `kvtier serve`."""
    commands = Parser().add_subparsers(parser_class=Parser)
    add_commands(commands)
    return {flag: action.default for action in commands.choices["serve"]._actions for flag in action.option_strings}


@pytest.mark.parametrize(("path", "name"), sorted({(path, name) for _, path, name in NAMED}))
def test_security_page_names_existing_test(path, name):
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_security_promise_has_a_test():
    promises = re.findall(r"^(\d+)\. ", SECURITY, re.MULTILINE)
    assert promises == [str(number) for number in range(1, len(promises) + 1)]
    assert sorted({number for number, _, _ in NAMED}, key=int) == promises


def test_every_row_of_security_test_table_is_parsed():
    section = SECURITY.partition("| promise | test |")[2].partition("\n\n")[0]
    assert len(section.splitlines()) - 2 == len(NAMED)


def test_limits_on_security_page_equal_server_defaults(options):
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \| (?:`(--[a-z-]+)`)? *\|", SECURITY, re.MULTILINE)
    assert {name: default for name, default, _ in rows} == {name: format_default(name, LIMITS[name]) for name in LIMITS}
    assert {flag: options[flag] for _, _, flag in rows if flag} == {
        flag: LIMITS[name] for name, _, flag in rows if flag
    }


def test_operating_guide_and_security_page_state_same_defaults(options):
    limits = re.findall(r"^\| `\w+` \| ([^|]+?) \| `(--[a-z-]+)` *\|", SECURITY, re.MULTILINE)
    defaults = {flag: default for default, flag in limits}
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+?) \|", OPERATING.partition("## Limits")[2], re.MULTILINE)
    documented = {flag: default for flag, default in rows if flag in options}
    assert documented
    assert documented == {flag: defaults[flag].removesuffix(" s") for flag in documented}
