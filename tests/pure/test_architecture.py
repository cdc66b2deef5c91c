"""ARCHITECTURE.md names existing files, functions and classes. Its diagram equals the import contract."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kvtier"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
MAX_STEPS = 13

_FILE = r"`(src/kvtier/[\w/]+\.py)`"
_METHOD = r"`([A-Z]\w*\.\w+)`"


@cache
def definitions(path: str) -> frozenset[str]:
    """Return the names of all functions, classes and methods in a file. Methods are named `Class.method`."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {node for owner in classes for node in owner.body if isinstance(node, functions)}
    names = {node.name for node in ast.walk(tree) if isinstance(node, functions) and node not in methods}
    names |= {f"{owner.name}.{node.name}" for owner in classes for node in owner.body if isinstance(node, functions)}
    return frozenset(names | {owner.name for owner in classes})


def references(text: str) -> list[tuple[str, str]]:
    """Return every reference as (file, name). A method without a file belongs to the last file named before it."""
    found, path = [], ""
    for match in re.finditer(rf"{_FILE}\s+`([\w.]+)`(?:,\s+`([\w.]+)`)?|{_METHOD}", text):
        path = match[1] or path
        found += [(path, name) for name in match.groups()[1:] if name]
    return found


def section(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}.*?$\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found is not None, f"ARCHITECTURE.md has no section {heading!r}"
    return found[1]


def steps(heading: str) -> list[str]:
    return re.split(r"^\d+\. ", section(heading), flags=re.M)[1:]


def test_references_in_architecture_page_exist():
    found = references(TEXT)
    assert len(found) > 50
    missing = [f"{path} {name}" for path, name in found if not (ROOT / path).is_file() or name not in definitions(path)]
    assert missing == []


def test_every_file_reference_is_followed_by_a_definition():
    assert re.findall(rf"{_FILE}(?!\s+`\w)", TEXT) == []


def test_architecture_paths_and_links_exist():
    paths = re.findall(r"`([\w.]+/[\w./]+|\w+\.toml)`", TEXT) + re.findall(r"\]\(([^)#\s]+)\)", TEXT)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_class_names_without_file_are_defined_in_src():
    defined = {name for path in PACKAGE.rglob("*.py") for name in definitions(str(path.relative_to(ROOT)))}
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)`", TEXT))
    assert named - defined == set()


@pytest.mark.parametrize("heading", ["The life of a request", "The life of a block"])
def test_walkthrough_steps_are_numbered_and_refer_to_code(heading):
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section(heading), re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    without_code = [step for step in steps(heading)[:-1] if not references(step)]  # the last step needs no reference
    assert without_code == []


def test_request_walkthrough_has_8_to_13_steps():
    assert 8 <= len(steps("The life of a request")) <= MAX_STEPS


def test_layer_diagram_equals_import_contract():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [
        [name for name in re.split(r" *[:|] *", layer) if not name.startswith("(")]
        for contract in settings["contracts"]
        if contract["type"] == "layers"
        for layer in contract["layers"]
    ]
    diagram = section("Packages and layers").split("```")[1].strip().splitlines()
    assert [re.split(r" +[:|] +", re.split(r" {3,}", line)[0]) for line in diagram] == layers


def test_layer_diagram_contains_every_package():
    diagram = section("Packages and layers").split("```")[1]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert (packages | modules) - set(re.findall(r"\w+", diagram)) == set()


def test_architecture_lines_fit_in_120_columns():
    assert [line for line in TEXT.splitlines() if len(line) > 120] == []
