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
    "plan": f"kvtier plan {NAME} --model llama-3-8b --gpu h200 --replicas 6 --disk-type nvme-gen5 --ttft-p99 8s",
    "replay": f"kvtier replay {NAME} --model llama-3-8b --gpu h200 --replicas 6 --disk-type nvme-gen5 --host 256GiB "
    "--disk 1TiB --policy lru,arc,s3fifo --capacities 0",
    "fine": f"kvtier replay {NAME} --limit 3000 --replicas 6 --host 256GiB --capacities 0 --quantum 0",
    "coarse": f"kvtier replay {NAME} --limit 3000 --replicas 6 --host 256GiB --capacities 0 --quantum 0.05",
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
    parser.add_argument("--only", choices=("rates", *COMMANDS), help="run one of them, and keep the others as they are")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.trace:
        wanted = [options.only] if options.only else ["rates", *COMMANDS]
        kept = json.loads(KEPT.read_text()) if options.only else {}
        kept |= {name: rates(options.trace) if name == "rates" else run(options.trace, name) for name in wanted}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    page = PAGE.read_text()
    made = write(page, json.loads(KEPT.read_text()))
    if options.check:
        return int(made != page)
    PAGE.write_text(made)
    return 0


# ---- running -------------------------------------------------------------------------------------------------------


def rates(trace: Path) -> Json:
    """Hit rates of some sizes, by policy."""
    from kvtier.replay import read_trace, sweep

    points = sweep(read_trace(trace).requests, SIZES, POLICIES, jobs=2)
    return {policy: [point.hit_rate for point in points if point.policy == policy] for policy in POLICIES}


def run(trace: Path, name: str) -> Json:
    """What a command says of a trace; draws the plots of the plan."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / f"{name}.html"
        arguments = shlex.split(COMMANDS[name].replace(NAME, shlex.quote(str(trace))))[1:]
        command = [sys.executable, "-m", "kvtier", *arguments, "--json", "--html", str(report)]
        told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        if name == "plan":
            draw(report)
    told["trace"]["files"] = [NAME]
    return told  # type: ignore[no-any-return]


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
        "advice": "\n>\n".join(f"> {line}" for line in kept["plan"]["advice"]["text"]),
        "policies": _policies(kept["replay"]),
        "origins": _origins(kept["plan"]),
        "links": _links(kept["plan"]),
        "grain": _grain(kept["fine"], kept["coarse"]),
    }
    for name, text in parts.items():
        pattern = rf"(<!-- made: {name} -->\n).*?(<!-- end -->)"
        made = f"{text}\n"
        page, count = re.subn(pattern, lambda found, made=made: found[1] + made + found[2], page, flags=re.DOTALL)
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


def _links(plan: Json) -> str:
    busy: dict[str, float] = {}
    for run in plan["results"]:
        for link in run["links"]:
            busy[link["name"]] = max(busy.get(link["name"], 0.0), link["busy"])
    told = ", ".join(f"{name} {share:.1%}" for name, share in busy.items())
    return f"Links are not the limit anywhere. Of the time they are busy, at most: {told}."


def _grain(fine: Json, coarse: Json) -> str:
    rows = [
        [name, _hits(run, "device", "host"), *_ttft(run)]
        for name, result in (("each by itself", fine), ("50 ms together", coarse))
        for run in result["results"]
    ]
    return _table(["steps of the first 3,000 requests", "hits: device + host", "TTFT p50", "p90", "p99"], rows)


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
