"""The README is short, its first example runs, its commands exist, and its tables are current."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks.table import PAGES, TABLES, table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def first_example() -> re.Match[str]:
    example = re.search(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert example is not None, "the README has no Python block"
    return example


def readme_commands() -> list[str]:
    """Return the indented lines and the code spans outside fenced blocks, without comments. Some are not commands."""
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", prose)
    return [command.partition("#")[0].strip() for command in [*lines, *spans]]


def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z][\w -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target for rule in rules for target in rule.split()}


def test_readme_has_at_most_90_lines():
    lines = README.splitlines()
    assert len(lines) <= 90
    assert [line for line in lines if len(line) > 120] == []


def test_readme_first_example_starts_before_line_25():
    assert README[: first_example().start()].count("\n") + 1 < 25


def test_readme_first_example_runs():
    command = [sys.executable, "-c", first_example()[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    cached = [int(count) for count in re.findall(r"^(\d+) of \d+ prompt tokens cached", done.stdout, re.MULTILINE)]
    assert len(cached) == 3
    assert cached[0] == 0
    assert min(cached[1:]) >= 32


def test_readme_make_targets_exist():
    commands = [command for command in readme_commands() if command.startswith("make ")]
    mentioned = {word for command in commands for word in command.split()[1:] if "=" not in word}
    assert {"serve", "test"} <= mentioned <= make_targets()


def test_readme_pip_extras_exist():
    extras = re.search(r'pip install "\.\[([\w,]+)\]"', README)
    assert extras is not None
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(extras[1].split(",")) <= set(settings["project"]["optional-dependencies"])


def test_readme_kvtier_commands_exist():
    help_text = subprocess.run(
        [sys.executable, "-m", "kvtier", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    mentioned = {command.split()[1] for command in readme_commands() if command.startswith("kvtier ")}
    assert {"serve", "generate", "chat", "doctor", "replay", "plan"} <= mentioned
    assert [name for name in mentioned if not re.search(rf"^ +{name} ", help_text, re.MULTILINE)] == []


def test_readme_link_targets_exist():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_result_tables_are_current():
    command = [sys.executable, "-m", "benchmarks.table", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_result_tables_named_in_pages_are_defined(page):
    names = re.findall(r"<!-- results: (\w+) -->", (ROOT / page).read_text())
    assert names
    assert set(names) <= set(TABLES)


@pytest.mark.parametrize("name", [name for name in TABLES if name.endswith("_summary")])
def test_readme_tables_have_at_most_six_rows(name):
    assert f"<!-- results: {name} -->" in README
    assert len(TABLES[name]) <= 6


def test_result_table_uses_the_newest_complete_record(tmp_path):
    records = [
        {"commit": "old", "machine": "NVIDIA H200, torch 2", "rows": [hit("host hit", 5.0), hit("recompute", 50.0)]},
        {"commit": "new", "machine": "A Xeon, 2 cores, x", "rows": [hit("host hit", 7.0), hit("recompute", 70.0)]},
        {"commit": "newest", "machine": "NVIDIA H200, torch 2", "rows": [hit("recompute", 1.0)]},
    ]
    (tmp_path / "tiers_gpu.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = table(TABLES["gpu"], tmp_path).splitlines()[2:]
    assert len(rows) == 1
    assert rows[0].endswith("| 7 ms | recompute 70 ms | 2x Xeon, new |")


def hit(case, milliseconds):
    return {"case": case, "TTFT ms": milliseconds}
