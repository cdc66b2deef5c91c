"""Mutation testing: the mutants of a small project, the reported outcomes, and the entries of tests/mutants.toml."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.mutants import find_mutants
from benchmarks.mutate import Plan

ROOT = Path(__file__).resolve().parents[2]
MODULE = """\
def clip(value: int | None, limit: int) -> int:
    if value is None or not limit:
        return 0
    while True:
        break
    return min(value, limit)


def on_gpu(items):
    items.sort()
    items.count -= 1
    with suppress(KeyError):
        return [item for item in items if item < 5][-1]
"""
CHANGED = [
    ("if value is None or not limit:", "if value is not None or not limit:"),
    ("if value is None or not limit:", "if value is None and not limit:"),
    ("if value is None or not limit:", "if value is None or (limit):"),
    ("if value is None or not limit:", "if not (value is None or not limit):"),
    ("return 0", "return None"),
    ("return 0", "return 1"),
    ("while True:", "while False:"),
    ("break", "continue"),
    ("return min(value, limit)", "return None"),
    ("return min(value, limit)", "return max(value, limit)"),
    ("items.sort()", "pass"),
    ("items.count -= 1", "items.count += 1"),
    ("items.count -= 1", "items.count -= 2"),
    ("with suppress(KeyError):", "if True:"),
    ("return [item for item in items if item < 5][-1]", "return None"),
    ("return [item for item in items if item < 5][-1]", "return [item for item in items if item <= 5][-1]"),
    ("return [item for item in items if item < 5][-1]", "return [item for item in items if item >= 5][-1]"),
    ("return [item for item in items if item < 5][-1]", "return [item for item in items if item < 6][-1]"),
    ("return [item for item in items if item < 5][-1]", "return [item for item in items if item < 5][-2]"),
]
TESTS = """\
from sample.module import clip


def test_clip():
    assert [clip(value, 3) for value in (None, 0, 2, 3, 7)] == [0, 0, 2, 3, 3]
    assert clip(7, 0) == 0
"""
PLAN = """\
[groups.all]
modules = ["src/sample/module.py"]
tests = ["tests/test_module.py"]

[[gpu]]
file = "src/sample/module.py"
function = "on_gpu"
reason = "the sample has no GPU"

[[equivalent]]
file = "src/sample/module.py"
line = "return min(value, limit)"
becomes = "return max(value, limit)"
reason = "the mutant of this entry does not run"

[[equivalent]]
file = "src/sample/module.py"
line = "return 2"
becomes = "return 3"
reason = "an entry without a mutant is reported"
"""


def project(folder: Path) -> Path:
    for name, text in {
        "src/sample/__init__.py": "",
        "src/sample/module.py": MODULE,
        "tests/test_module.py": TESTS,
        "tests/mutants.toml": PLAN,
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\nmarkers = ["gpu: -"]\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_find_mutants_changes_one_line_per_mutant(tmp_path):
    mutants = find_mutants(project(tmp_path), "src/sample/module.py")
    assert sorted((mutant.line, mutant.becomes) for mutant in mutants) == sorted(CHANGED)
    for mutant in mutants:
        ast.parse(mutant.source)
        before, after = MODULE.split("\n"), mutant.source.decode().split("\n")
        assert [k + 1 for k, line in enumerate(after) if line != before[k]] == [mutant.number]


def test_mutate_reports_every_outcome(tmp_path):
    root = project(tmp_path)
    options = ["--sample", "0", "--jobs", "2", "--grace", "4"]
    command = [sys.executable, "-m", "benchmarks.mutate", "--root", str(root), *options]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(ROOT)])}
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "results")], cwd=tmp_path, env=paths, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, row = json.loads(done.stdout.splitlines()[-1])["rows"]
    # The mutant with `continue` times out, because its loop is endless. The mutant with `while False` survives, because
    # the original loop has no effect.
    counts = {name: row[name] for name in ("mutants", "killed", "timeout", "survived", "equivalent", "gpu")}
    assert counts == {"mutants": 19, "killed": 7, "timeout": 1, "survived": 1, "equivalent": 1, "gpu": 9}
    assert "+ while False:" in done.stdout
    assert "has entries without a mutant: src/sample/module.py: return 2 -> return 3" in done.stdout
    assert (root / "src/sample/module.py").read_text() == MODULE


def test_mutants_toml_names_existing_mutants_and_tests():
    plan = Plan(ROOT)
    for group in plan.groups:
        modules = plan.modules(group)
        assert modules
        assert plan.unmatched([mutant for file in modules for mutant in find_mutants(ROOT, file)], set(modules)) == []
        assert all((ROOT / test).exists() for module in modules for test in plan.tests(group, module))
