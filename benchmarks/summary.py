"""Print the bars of the newest records of some benchmarks in one table.

python -m benchmarks.summary copy_gpu engine_gpu     exit code 1 if a bar does not hold
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.report import Row, print_table


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the bars of the newest records.")
    parser.add_argument("benchmarks", nargs="+")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = [row for name in options.benchmarks for row in bars_of(options.results / f"{name}.jsonl")]
    print_table(rows)
    return 0 if all(row["holds"] for row in rows) else 1


def bars_of(path: Path) -> list[Row]:
    """Return a row for each bar of the last record in a file. Without records, return one row that does not hold."""
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        return [{"benchmark": path.stem, "figure": "no record", "value": "", "bar": "", "holds": False, "date": ""}]
    record = json.loads(lines[-1])
    return [
        {
            "benchmark": path.stem,
            "figure": bar["name"],
            "value": bar["value"],
            "bar": bar["bar"],
            "holds": bar["holds"],
            "date": record["date"],
        }
        for bar in record["bars"]
    ]


if __name__ == "__main__":
    sys.exit(main())
