"""Shared by all benchmarks: timing, the printed table, the JSON line, and the records in results/."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

Row = Mapping[str, object]


@dataclass(frozen=True)
class Bar:
    """A measured value and its limit."""

    name: str
    value: float
    bar: str
    holds: bool


def at_most(name: str, value: float, limit: float) -> Bar:
    """Return a bar that holds if the value is at most the limit."""
    return Bar(name, round(value, 3), f"<= {limit}", value <= limit)


def at_least(name: str, value: float, limit: float) -> Bar:
    """Return a bar that holds if the value is at least the limit."""
    return Bar(name, round(value, 3), f">= {limit}", value >= limit)


def medians(tasks: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each task. Tasks alternate, so that noise affects all; one warm-up round."""
    return {name: statistics.median(taken) for name, taken in _seconds(tasks, rounds).items()}


def best(tasks: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the best seconds of each task: on a shared machine noise only adds time; one warm-up round."""
    return {name: min(taken) for name, taken in _seconds(tasks, rounds).items()}


def _seconds(tasks: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for attempt in range(rounds + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            if attempt:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def machine() -> str:
    """Describe the machine: the GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}, torch {torch.__version__}"


def commit() -> str:
    """Return the measured commit, with + if the tree has changes; $KVTIER_COMMIT overrides it."""
    override = os.environ.get("KVTIER_COMMIT")
    if override:
        return override
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the common options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder of the records")
    return parser


def report(benchmark: str, rows: Sequence[Row], bars: Sequence[Bar], results: Path) -> None:
    """Print the bars and the JSON line, and append the same to results/<benchmark>.jsonl with the date."""
    print_table([asdict(bar) for bar in bars])
    record = {
        "benchmark": benchmark,
        "commit": commit(),
        "machine": machine(),
        "rows": rows,
        "bars": [asdict(bar) for bar in bars],
    }
    results.mkdir(parents=True, exist_ok=True)
    with open(results / f"{benchmark}.jsonl", "a") as file:
        file.write(json.dumps({"date": datetime.date.today().isoformat(), **record}, default=_plain) + "\n")
    print(json.dumps(record, default=_plain))


def _plain(value: object) -> object:
    """Convert a numpy number for JSON."""
    return value.item()  # type: ignore[attr-defined]


def print_table(rows: Sequence[Row]) -> None:
    """Print rows with aligned columns."""
    if not rows:
        return
    cells = [list(rows[0])] + [[_text(value) for value in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    print()


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
