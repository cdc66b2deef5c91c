"""The figures of docs/planner.md: its commands are run on the conversation trace, their JSON is kept beside it.

python docs/make_planner.py --trace ../shared/traces/conversation_trace.jsonl    run, keep, draw and write (minutes)
python docs/make_planner.py                                                      write the page from what was kept
python docs/make_planner.py --check                                              exit code 1 if it is another one

Kept are docs/planner.json and the plots in docs/images; the page has the commands, and tables between markers.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE, KEPT, IMAGES = FOLDER / "planner.md", FOLDER / "planner.json", FOLDER / "images"
NAME = "conversation_trace.jsonl"
COMMANDS = {
    "plan": f"kvtier plan {NAME} --model llama-3-8b --gpu h200 --replicas 6 --disk-type nvme-gen5 --ttft-p99 6s",
    "replay": f"kvtier replay {NAME} --model llama-3-8b --gpu h200 --replicas 6 --disk-type nvme-gen5 --host 256GiB "
    "--disk 1TiB --policy lru,arc,s3fifo --capacities 0",
}
SIZES = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)
POLICIES = ("lru", "fifo", "arc", "s3fifo", "cost", "optimum")
CHARTS = ("curve", "host-hits", "host-ttft", "disk-hits", "disk-ttft")
GIB = 1 << 30
Json = dict[str, Any]


def main() -> int:
    """Run, write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.trace:
        KEPT.write_text(json.dumps(run(options.trace), indent=1) + "\n")
    page = PAGE.read_text()
    made = write(page, json.loads(KEPT.read_text()))
    if options.check:
        return int(made != page)
    PAGE.write_text(made)
    return 0


# ---- running -------------------------------------------------------------------------------------------------------


def run(trace: Path) -> Json:
    """What the commands say of a trace, and hit rates of some sizes; draws the plots of the plan."""
    from kvtier.replay import read_trace, sweep

    points = sweep(read_trace(trace).requests, SIZES, POLICIES, jobs=2)
    kept: Json = {"rates": {policy: [p.hit_rate for p in points if p.policy == policy] for policy in POLICIES}}
    with tempfile.TemporaryDirectory() as folder:
        for name, command in COMMANDS.items():
            report = Path(folder) / f"{name}.html"
            arguments = shlex.split(command.replace(NAME, shlex.quote(str(trace))))[1:]
            told = subprocess.run(
                [sys.executable, "-m", "kvtier", *arguments, "--json", "--html", str(report)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            kept[name] = json.loads(told.stdout)
            kept[name]["trace"]["files"] = [NAME]
        draw(Path(folder) / "plan.html")
    return kept


def draw(report: Path) -> None:
    """Pictures of a report's plots."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 800}, device_scale_factor=1.5)
        page.goto(report.as_uri())
        for chart in CHARTS:
            page.locator(f"#chart-{chart}").screenshot(path=IMAGES / f"planner-{chart}.png")
        browser.close()


# ---- writing -------------------------------------------------------------------------------------------------------


def write(page: str, kept: Json) -> str:
    """The page with what is between its markers made anew."""
    parts = {
        "rates": _rates(kept["rates"]),
        "plan command": _code(COMMANDS["plan"] + " --html plan.html"),
        "replay command": _code(COMMANDS["replay"]),
        "hosts": _hosts(kept["plan"]),
        "disks": _disks(kept["plan"]),
        "advice": "\n".join(f"> {line}" for line in kept["plan"]["advice"]["text"]),
        "policies": _policies(kept["replay"]),
        "origins": _origins(kept["plan"]),
    }
    for name, text in parts.items():
        pattern = rf"(<!-- made: {name} -->\n).*?(\n<!-- end -->)"
        page, count = re.subn(pattern, lambda found, text=text: found[1] + text + found[2], page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"docs/planner.md needs the marker <!-- made: {name} --> once, has it {count} times")
    return page


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in rows])


def _rates(rates: Json) -> str:
    rows = [[f"{size:,}", *(f"{rates[policy][i]:.4f}"[1:] for policy in POLICIES)] for i, size in enumerate(SIZES)]
    return _table(["blocks", *POLICIES], rows)


def _hosts(plan: Json) -> str:
    runs = [run for run in plan["results"] if not run["disk_bytes"]]
    rows = [[_size(run["host_bytes"]), _hits(run, "device", "host"), *_ttft(run), _share(run)] for run in runs]
    return _table(
        ["host memory a replica", "hits: device + host", "TTFT p50", "p90", "p99", "dead on arrival"],
        rows,
    )


def _disks(plan: Json) -> str:
    runs = [run for run in plan["results"] if run["disk_bytes"]]
    rows = [
        [
            f"{_size(run['host_bytes'])} + {_size(run['disk_bytes'])}",
            _hits(run, "device", "host", "disk"),
            *_ttft(run),
            f"{next(link['busy'] for link in run['links'] if link['name'] == 'disk'):.0%}",
        ]
        for run in runs
    ]
    return _table(["host + disk a replica", "hits: device + host + disk", "TTFT p50", "p90", "p99", "disk busy"], rows)


def _policies(replay: Json) -> str:
    rows = [
        [run["policy"], f"{_hits(run, 'device', 'host', 'disk')} = {run['hit_rate']:.1%}", *_ttft(run)]
        for run in replay["results"]
    ]
    return _table(["policy", "hits: device + host + disk", "TTFT p50", "p90", "p99"], rows)


def _origins(plan: Json) -> str:
    told = [f"- {what}: {source}" for what, source in plan["setup"]["sources"].items()]
    return "\n".join([*told, f"- prices: {plan['prices']['source']}"])


def _hits(run: Json, *tiers: str) -> str:
    return " + ".join(f"{run['hit_rates'].get(tier, 0.0) * 100:.1f}" for tier in tiers) + " %"


def _ttft(run: Json) -> list[str]:
    return [f"{run['ttft'][share]:.2f} s" for share in ("p50", "p90", "p99")]


def _share(run: Json) -> str:
    return f"{run['dead_on_arrival']:.0%}"


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return "none"
    return f"{num_bytes / GIB:g} GiB" if num_bytes < 1024 * GIB else f"{num_bytes / GIB / 1024:g} TiB"


if __name__ == "__main__":
    sys.exit(main())
