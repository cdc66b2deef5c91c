"""Test strength: change one operator at a time in a copy of src, run the module's tests, and count surviving mutants.

python -m benchmarks.mutate --group transfer --sample 40 --jobs 2
python -m benchmarks.mutate --module transfer/layers.py --sample 0        every mutant of one module

tests/mutants.toml maps modules to tests, and lists equivalent mutants, with reasons, and functions that run on a GPU
only. mutmut and cosmic-ray are not used: they cannot be installed on the GPU machines, and mutmut patches functions
inside one process, which sub-processes of tests do not see. This script imports torch and pytest once and forks for
every mutant (an import takes 3 s here, 2026-11-16).
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from benchmarks.mutants import Mutant, find_mutants
from benchmarks.report import arguments, at_least, print_table, report

BAR = 90.0
OUTCOMES = ("killed", "timeout", "survived", "equivalent", "gpu")
PASSED, FAILED, WRONG_SOURCE = 0, 1, 99
SLOWER = 3.0  # limit for a mutant, in unmutated runs, plus --grace seconds
PYTEST = ["-x", "-q", "--no-header", "--tb=short", "-m", "not gpu", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
PLUGINS = ["no:cacheprovider", "_hypothesis_pytestplugin"]  # only these: they take longer than most tests


@dataclass(frozen=True)
class Task:
    """A mutant, or the unmutated source, and the tests it must pass."""

    mutant: Mutant | None
    tests: tuple[str, ...]
    seconds: float


class Runner:
    """Runs tasks in copies of `src`, several at once. The work tree is only read."""

    def __init__(self, root: Path, folder: Path, jobs: int, *, gpu: bool) -> None:
        self._root = root
        self._gpu = gpu
        self._slots = [folder / str(number) for number in range(jobs)]
        for slot in self._slots:
            shutil.copytree(root / "src", slot / "src", ignore=shutil.ignore_patterns("__pycache__"))
            mode = py_compile.PycInvalidationMode.CHECKED_HASH  # a mutant may have the size and mtime of the source
            compileall.compile_dir(slot / "src", quiet=2, invalidation_mode=mode)

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, int | None, float, str]]:
        """Yield each finished task with its exit status (None: timeout), seconds and output."""
        waiting, free = iter(tasks), list(self._slots)
        running: dict[int, tuple[Task, Path, float]] = {}
        try:
            while True:
                while free and (task := next(waiting, None)) is not None:
                    slot = free.pop()
                    running[self._start(task, slot)] = (task, slot, time.monotonic())
                if not running:
                    return
                for pid, (task, slot, start) in list(running.items()):
                    seconds = time.monotonic() - start
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if not ended and seconds < task.seconds:
                        continue
                    _kill(pid)  # also processes that the tests left behind
                    if not ended:
                        os.waitpid(pid, 0)
                    del running[pid]
                    free.append(slot)
                    if task.mutant is not None:
                        shutil.copyfile(self._root / task.mutant.file, slot / task.mutant.file)
                    output = (slot / "output").read_text(errors="replace")
                    yield task, os.waitstatus_to_exitcode(status) if ended else None, seconds, output
                time.sleep(0.02)
        finally:
            for pid in running:
                _kill(pid)

    def _start(self, task: Task, slot: Path) -> int:
        if task.mutant is not None:
            (slot / task.mutant.file).write_bytes(task.mutant.source)
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            status = FAILED
            try:
                status = self._child(task, slot)
            finally:  # pytest itself may raise: a warning from a late destructor is an error
                os._exit(status)
        return pid

    def _child(self, task: Task, slot: Path) -> int:
        os.setsid()
        with open(slot / "output", "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        source = str(slot / "src")
        sys.path = [source, *(each for each in sys.path if Path(each or ".").resolve() != self._root / "src")]
        sys.dont_write_bytecode = True
        os.environ.update(
            PYTHONPATH=os.pathsep.join([source, str(self._root)]),
            PYTHONDONTWRITEBYTECODE="1",
            OMP_NUM_THREADS="1",
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            HYPOTHESIS_STORAGE_DIRECTORY=str(slot / "hypothesis"),
        )
        torch.set_num_threads(1)
        os.chdir(self._root)
        package = next((slot / "src").glob("*/__init__.py")).parent.name
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None or not found.origin.startswith(source):
            sys.stderr.write(f"{package} would be imported from {found and found.origin}, not from {source}\n")
            return WRONG_SOURCE
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # the first failure is enough: no shrinking
        hypothesis.settings.register_profile("mutate", derandomize=True, database=None, deadline=None, phases=phases)
        hypothesis.settings.load_profile("mutate")
        plugins = [part for name in PLUGINS for part in ("-p", name)]
        status = pytest.main([*PYTEST, *plugins, f"--basetemp={slot / 'tmp'}", *task.tests])
        sys.stdout.flush()
        return int(status)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class Plan:
    """The contents of tests/mutants.toml."""

    def __init__(self, root: Path, *, quick: bool = False) -> None:
        self._root = root
        self._quick = quick
        table: dict[str, Any] = tomllib.loads((root / "tests/mutants.toml").read_text())
        self.groups: dict[str, dict[str, Any]] = table["groups"]
        self.equivalent = {(each["file"], each["line"], each["becomes"]) for each in table.get("equivalent", [])}
        self.on_gpu: list[dict[str, Any]] = table.get("gpu", [])

    def modules(self, group: str) -> list[str]:
        """Return the files of a group."""
        found = {path for pattern in self.groups[group]["modules"] for path in self._root.glob(pattern)}
        return sorted(str(path.relative_to(self._root)) for path in found)

    def tests(self, group: str, module: str) -> tuple[str, ...]:
        """Return the test files of a module, the most specific first."""
        first = self.groups[group].get("first", {}).get(Path(module).name, [])
        others = [] if first and self._quick else self.groups[group]["tests"]
        return tuple(dict.fromkeys([*first, *others]))

    def unmatched(self, mutants: Sequence[Mutant], files: set[str]) -> list[str]:
        """Return entries for these files that match no mutant."""
        keys = {each.key for each in mutants}
        lost = [f"{file}: {line} -> {new}" for file, line, new in self.equivalent - keys if file in files]
        for entry in (each for each in self.on_gpu if each["file"] in files):
            found = [each for each in mutants if _is_inside(each, entry)]
            texts = {each.line for each in found} | {each.becomes for each in found}
            missing = [*entry.get("lines", []), *entry.get("becomes", [])]
            lost += [f"{entry['file']}: {text}" for text in missing if text not in texts]
            lost += [] if found else [f"{entry['file']}: {entry['function']}"]
        return sorted(lost)

    def outcome(self, mutant: Mutant, *, gpu: bool) -> str | None:
        """Return the reason not to run a mutant, or None."""
        if mutant.key in self.equivalent:
            return "equivalent"
        return "gpu" if not gpu and any(_needs_gpu(mutant, entry) for entry in self.on_gpu) else None


def _is_inside(mutant: Mutant, entry: dict[str, Any]) -> bool:
    inside = f"{mutant.function}.".startswith(f"{entry['function']}.")
    return bool(mutant.file == entry["file"] and inside)


def _needs_gpu(mutant: Mutant, entry: dict[str, Any]) -> bool:
    lines, becomes = entry.get("lines"), entry.get("becomes")
    named = lines is becomes is None or mutant.line in (lines or []) or mutant.becomes in (becomes or [])
    return named and _is_inside(mutant, entry)


def run_group(group: str, plan: Plan, runner: Runner, options: argparse.Namespace) -> list[dict[str, object]]:
    """Print a table row per module and the survivors; return the rows."""
    modules = [each for each in plan.modules(group) if options.module in each]
    mutants = [mutant for each in modules for mutant in find_mutants(options.root, each)]
    chosen = sorted(mutants, key=lambda each: each.rank(options.seed))[: options.sample or None]
    limits: dict[tuple[str, ...], float] = {}
    unmutated = {plan.tests(group, each.file) for each in chosen}
    for task, status, seconds, output in runner.run(Task(None, tests, 3600.0) for tests in sorted(unmutated)):
        if status != PASSED:
            sys.exit(f"{output}\nthe tests of {group} fail without a mutant (status {status})")
        limits[task.tests] = SLOWER * seconds + options.grace
    outcomes = {each: found for each in chosen if (found := plan.outcome(each, gpu=options.gpu)) is not None}
    tests = {each: plan.tests(group, each) for each in modules}
    tasks = [Task(each, tests[each.file], limits[tests[each.file]]) for each in chosen if each not in outcomes]
    print(
        f"{group}: {len(tasks)} of {len(mutants)} mutants to run, at most {max(limits.values(), default=0):.0f} s each"
    )
    for number, (task, status, seconds, output) in enumerate(runner.run(tasks), 1):
        assert task.mutant is not None
        outcomes[task.mutant] = "timeout" if status is None else "survived" if status == PASSED else "killed"
        if status == WRONG_SOURCE:
            sys.exit(output)
        where = f"{task.mutant.file}:{task.mutant.number}"
        print(f"[{number}/{len(tasks)}] {outcomes[task.mutant]} {where} in {seconds:.1f} s", flush=True)
    counts = Counter((mutant.file, outcome) for mutant, outcome in outcomes.items())
    rows = [_row(group, each, [counts[each, name] for name in OUTCOMES]) for each in modules]
    rows.append(_row(group, "all", [sum(counts[each, name] for each in modules) for name in OUTCOMES]))
    print_table(rows)
    for mutant in (each for each in chosen if outcomes[each] == "survived"):
        print(f"survived {mutant.file}:{mutant.number}\n    - {mutant.line}\n    + {mutant.becomes}")
    for line in plan.unmatched(mutants, set(modules)):
        print(f"tests/mutants.toml has entries without a mutant: {line}")
    return rows


def _row(group: str, module: str, counts: Sequence[int]) -> dict[str, object]:
    killed, run = sum(counts[:2]), sum(counts[:3])
    row = {"group": group, "module": module, "mutants": sum(counts), **dict(zip(OUTCOMES, counts, strict=True))}
    return {**row, "percent": round(100 * killed / run, 1) if run else 100.0}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--group", default="", help="groups of tests/mutants.toml, separated by commas; default: all")
    parser.add_argument("--module", default="", help="only modules whose path contains this")
    parser.add_argument("--sample", type=int, default=40, help="mutants per group; 0: all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants in flight")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds a mutant may take beyond 3 unmutated runs")
    parser.add_argument("--quick", action="store_true", help="only the tests that are listed first for a module")
    parser.add_argument(
        "--gpu", action="store_true", help="make the GPU visible to the tests, and mutate only code that runs on it"
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    options = parser.parse_args()
    if not options.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    plan = Plan(options.root, quick=options.quick)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-mutate-") as folder:
        runner = Runner(options.root, Path(folder), options.jobs, gpu=options.gpu)
        for group in options.group.split(",") if options.group else plan.groups:
            rows += run_group(group, plan, runner, options)
    totals = [row for row in rows if row["module"] == "all"]
    details = {"sample": options.sample, "seed": options.seed, "only": options.module}
    bars = [at_least(f"{row['group']}: killed, %", float(str(row["percent"])), BAR) for row in totals]
    report("mutate", [{**row, **details} for row in rows], bars, options.results)


if __name__ == "__main__":
    main()
