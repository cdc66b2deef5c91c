from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.table import PAGES, table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def first_example() -> re.Match[str]:
    found = re.search(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert found is not None, "the README has no Python block"
    return found


def commands_of_the_readme() -> list[str]:
    """What the README says to type: indented lines and code spans, without their comments."""
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", prose)
    return [command.partition("#")[0].strip() for command in [*lines, *spans]]


def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z][\w -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target for rule in rules for target in rule.split()}


def test_the_first_example_is_on_the_first_screen():
    assert README[: first_example().start()].count("\n") + 1 < 25


def test_the_first_example_runs_as_it_stands():
    command = [sys.executable, "-c", first_example()[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    cached = [int(count) for count in re.findall(r"^(\d+) of \d+ tokens were read before", done.stdout, re.MULTILINE)]
    assert len(cached) == 3
    assert cached[0] == 0
    assert min(cached[1:]) >= 32


def test_the_readme_names_the_two_commands_a_newcomer_needs():
    assert {"make demo", "make test"} <= set(commands_of_the_readme())


def test_every_make_target_the_readme_mentions_is_there():
    mentioned = {
        word
        for command in commands_of_the_readme()
        if command.startswith("make ")
        for word in command.split()[1:]
        if "=" not in word
    }
    assert {"demo", "test"} <= mentioned <= make_targets()


def test_every_command_the_readme_mentions_is_there():
    help_text = subprocess.run(
        [sys.executable, "-m", "kvtier", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    mentioned = {command.split()[1] for command in commands_of_the_readme() if command.startswith("kvtier ")}
    assert {"serve", "generate", "chat", "doctor", "replay", "plan"} <= mentioned
    assert [name for name in mentioned if not re.search(rf"^ +{name} ", help_text, re.MULTILINE)] == []


def test_the_tables_of_results_are_made_from_the_rows():
    command = [sys.executable, "-m", "benchmarks.table", "--check", *PAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_line_of_the_table_is_of_the_newest_record_that_has_its_figures(tmp_path):
    records = [
        {"commit": "old", "machine": "NVIDIA H200, torch 2", "rows": [hit("host hit", 5.0), hit("recompute", 50.0)]},
        {"commit": "new", "machine": "A Xeon, 2 cores, x", "rows": [hit("host hit", 7.0), hit("recompute", 70.0)]},
        {"commit": "newest", "machine": "NVIDIA H200, torch 2", "rows": [hit("recompute", 1.0)]},
    ]
    (tmp_path / "tiers_gpu.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    told = table(PAGES["README.md"], tmp_path).splitlines()[2:]
    assert len(told) == 1
    assert told[0].endswith("| 7 ms | computed 70 ms | Xeon, 2 cores | new |")


def hit(case, seconds):
    return {"case": case, "TTFT ms": seconds}


def test_every_file_the_readme_links_to_is_there():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
