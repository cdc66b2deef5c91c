"""tests/ancestors.toml and tests/claims.toml name existing tests. docs/gaps.md lists the defects in ancestors.toml."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = {name: tomllib.loads((ROOT / "tests" / name).read_text()) for name in ("ancestors.toml", "claims.toml")}
ENTRIES = {f"{name}:{key}": entry for name, table in TABLES.items() for key, entry in table.items()}


@cache
def node_ids(path: str) -> frozenset[str]:
    """Return the pytest node ids of all functions in a test file, without parameters."""
    found: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}::{node.name}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{prefix}::{node.name}")

    if (ROOT / path).is_file():
        walk(ast.parse((ROOT / path).read_text()).body, path)
    return frozenset(found)


@pytest.mark.parametrize("name", ENTRIES)
def test_table_entry_names_existing_tests(name):
    entry = ENTRIES[name]
    assert entry["summary"]
    assert bool(entry.get("tests")) != bool(entry.get("checked_by"))
    assert [test for test in entry.get("tests", ()) if test not in node_ids(test.partition("::")[0])] == []


def test_ancestors_table_contains_every_fastdeploy_number():
    numbered = [key for key in TABLES["ancestors.toml"] if re.fullmatch(r"fastdeploy-(fix-|c)\d+", key)]
    assert numbered == [f"fastdeploy-fix-{n}" for n in range(1, 30)] + [f"fastdeploy-c{n}" for n in range(1, 18)]


@pytest.mark.parametrize(
    "path", ["tests/pure/cache/test_fastdeploy_tiers.py", "tests/pure/index/test_fastdeploy_defects.py"]
)
def test_ancestors_table_names_every_fastdeploy_test(path):
    named = {test for entry in TABLES["ancestors.toml"].values() for test in entry.get("tests", ())}
    tests = {test for test in node_ids(path) if "::test_" in test}
    assert tests
    assert tests - named == set()


def test_gaps_page_lists_every_defect_in_ancestors_table():
    rows = re.findall(r"^\| ([\w-]+-[\w-]+) \| (.*) \|$", (ROOT / "docs" / "gaps.md").read_text(), re.MULTILINE)
    assert rows == [(key, entry["summary"]) for key, entry in TABLES["ancestors.toml"].items()]
