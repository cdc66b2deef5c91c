"""Fill in the figures of docs/planner.md from the results of its commands.

python docs/make_planner.py --trace conversation_trace.jsonl   run the commands (minutes), then write the page
python docs/make_planner.py                                    write the page from docs/planner.json
python docs/make_planner.py --check                            exit code 1 if the page is out of date

The JSON output of the commands is kept in docs/planner.json, the plots in docs/images. Generated parts of the page are
between `<!-- made: NAME -->` and `<!-- end -->`. The trace is conversation_trace.jsonl of Mooncake's FAST25 release
(github.com/kvcache-ai/Mooncake).
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
import textwrap
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE, RESULTS, IMAGES = FOLDER / "planner.md", FOLDER / "planner.json", FOLDER / "images"
NAME = "conversation_trace.jsonl"
GRAIN = f"kvtier replay {NAME} --limit 3000 --replicas 6 --host 256GiB --capacities 0 --phases 1"
COMMANDS = {
    "plan": f"kvtier plan {NAME} --model llama-3-8b --gpu h200 --replicas 6 --disk-type nvme-gen5 --ttft-p99 8s "
    "--phases 1",
    "replay": f"kvtier replay {NAME} --model llama-3-8b --gpu h200 --replicas 6 --disk-type nvme-gen5 --host 256GiB "
    "--disk 1TiB --policy lru,arc,s3fifo --capacities 0 --phases 1",
    "fine": f"{GRAIN} --quantum 0",
    "coarse": f"{GRAIN} --quantum 0.05",
}
SIZES = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)
POLICIES = ("lru", "fifo", "arc", "s3fifo", "cost", "optimum")
CHARTS = ("curve", "host-hits", "host-ttft", "disk-hits", "disk-ttft")
GIB = 1 << 30
Json = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--only", choices=("rates", *COMMANDS), help="run only this command and keep the other results")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.trace:
        names = [options.only] if options.only else ["rates", *COMMANDS]
        results = json.loads(RESULTS.read_text()) if options.only else {}
        results |= {name: rates(options.trace) if name == "rates" else run(options.trace, name) for name in names}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    old = PAGE.read_text()
    new = write(old, json.loads(RESULTS.read_text()))
    if options.check:
        return int(new != old)
    PAGE.write_text(new)
    return 0


# ---- running -------------------------------------------------------------------------------------------------------


def rates(trace: Path) -> Json:
    """Return the hit rates of SIZES by policy."""
    from kvtier.replay import read_trace, sweep

    points = sweep(read_trace(trace).requests, SIZES, POLICIES, jobs=2)
    return {policy: [point.hit_rate for point in points if point.policy == policy] for policy in POLICIES}


def run(trace: Path, name: str) -> Json:
    """Return the JSON output of a command; `plan` also draws the plots."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / f"{name}.html"
        arguments = shlex.split(COMMANDS[name].replace(NAME, shlex.quote(str(trace))))[1:]
        command = [sys.executable, "-m", "kvtier", *arguments, "--json", "--html", str(report)]
        result: Json = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        if name == "plan":
            draw(report)
    result["trace"]["files"] = [NAME]
    return result


def draw(report: Path) -> None:
    """Save the plots of a report as PNG files."""
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


def write(page: str, results: Json) -> str:
    """Return the page with its generated parts replaced."""
    plan, replay = results["plan"], results["replay"]
    html = {name: f"{COMMANDS[name]} --html {name}.html" for name in ("plan", "replay")}
    parts = {
        "blocks": _fill(_blocks(plan["trace"])),
        "rates": _rates(results["rates"]),
        "commands": _code(html["replay"], html["plan"]),
        "plan command": _code(html["plan"]),
        "replay command": _code(COMMANDS["replay"]),
        "trace": _fill(_trace(plan)),
        "curve": _fill(_curve(plan["curve"])),
        "device": _fill(_device(plan)),
        "hosts": _hosts(plan),
        "disk hits": _fill(_disk_hits(plan)),
        "disks": _disks(plan),
        "disk costs": _fill(_disk_costs(plan)),
        "advice": "\n>\n".join(_fill(line, "> ", "> ") for line in plan["advice"]["text"]),
        "policies": _policies(replay),
        "origins": _origins(plan),
        "links": _fill(_links(plan)),
        "target": _fill(_target(plan)),
        "grain commands": _code(COMMANDS["fine"], COMMANDS["coarse"]),
        "grain": _grain(results["fine"], results["coarse"]),
    }
    for name, text in parts.items():
        marked = re.compile(rf"<!-- made: {name} -->\n.*?<!-- end -->", re.DOTALL)
        count = len(marked.findall(page))
        if count != 1:
            raise SystemExit(
                f"docs/planner.md must have the marker <!-- made: {name} --> once, it has it {count} times"
            )
        page = marked.sub(f"<!-- made: {name} -->\n{text}\n<!-- end -->".replace("\\", r"\\"), page)
    return page


def _fill(text: str, first: str = "", following: str = "") -> str:
    return textwrap.fill(
        text, 120, initial_indent=first, subsequent_indent=following, break_long_words=False, break_on_hyphens=False
    )


def _code(*commands: str) -> str:
    """Format commands as a code block, broken before an option where a line is too long."""
    glued = (re.sub(r"(--\S+) (?!--)", "\\1\0", command) for command in commands)
    lines = (" \\\n    ".join(textwrap.wrap(command, 114, break_on_hyphens=False)) for command in glued)
    return "\n".join(("```", *lines, "```")).replace("\0", " ")


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in rows])


def _rates(rates: Json) -> str:
    rows = [[f"{size:,}", *(f"{rates[policy][i]:.4f}"[1:] for policy in POLICIES)] for i, size in enumerate(SIZES)]
    return _table(["blocks", *POLICIES], rows)


def _blocks(trace: Json) -> str:
    return (
        f"The conversation trace of Mooncake has {trace['num_requests']:,} requests with {trace['num_blocks']:,} full "
        f"blocks of {trace['block_tokens']} tokens, {trace['num_distinct_blocks']:,} of them distinct."
    )


def _trace(plan: Json) -> str:
    trace, token_bytes = plan["trace"], plan["setup"]["token_bytes"]
    count = trace["num_requests"]
    distinct = trace["num_distinct_blocks"] * trace["block_tokens"] * token_bytes
    return (
        f"The conversation trace of Mooncake: {count:,} requests in {trace['seconds'] / 60:.0f} minutes, "
        f"{trace['prompt_tokens'] / count:,.0f} prompt tokens and {trace['answer_tokens'] / count:,.0f} answer tokens "
        f"on average. With {plan['setup']['model']} a token takes {token_bytes / 1024:g} KiB, and all distinct blocks "
        f"take {_about(distinct)}."
    )


def _curve(curve: list[Json]) -> str:
    most = max(point["hit_rate"] for point in curve)

    def size(policy: str, share: float) -> str:
        reached = (p["capacity_bytes"] for p in curve if p["policy"] == policy and p["hit_rate"] >= share * most)
        return _about(min(reached))

    least = min((point for point in curve if point["policy"] == "lru"), key=lambda point: point["capacity_bytes"])
    return (
        f"With LRU, the smallest size, {_about(least['capacity_bytes'])}, has a hit rate of {least['hit_rate']:.1%}, "
        f"mostly the system prompt. No size exceeds {most:.1%}. LRU reaches half of that with {size('lru', 0.5)} and "
        f"nine tenths with {size('lru', 0.9)}, the optimum with {size('optimum', 0.5)} and {size('optimum', 0.9)}."
    )


def _device(plan: Json) -> str:
    alone = next(run for run in plan["results"] if not run["host_bytes"] and not run["disk_bytes"])
    return (
        f"Each replica has {_about(plan['setup']['device_bytes'])} of KV on its GPU and a hit rate "
        f"of {alone['hit_rates']['device']:.0%} there."
    )


def _disk_and_host(plan: Json) -> tuple[Json, Json]:
    """Return the cheapest setup with a disk, and the one with the same amount of host memory and no disk."""
    disk = min((run for run in plan["results"] if run["disk_bytes"]), key=lambda run: run["price"])
    hosts = (run for run in plan["results"] if not run["disk_bytes"])
    return disk, next(run for run in hosts if run["host_bytes"] == disk["disk_bytes"])


def _disk_hits(plan: Json) -> str:
    disk, host = _disk_and_host(plan)
    return (
        f"{_size(disk['disk_bytes'])} of NVMe with {_size(disk['host_bytes'])} of host memory have a hit rate of "
        f"{disk['hit_rate']:.1%}, {_size(host['host_bytes'])} of host memory have {host['hit_rate']:.1%}:"
    )


def _disk_costs(plan: Json) -> str:
    disk, host = _disk_and_host(plan)
    p50, p99 = (disk["ttft"][share] - host["ttft"][share] for share in ("p50", "p99"))
    return (
        f"Compared with {_size(host['host_bytes'])} of host memory and no disk, the cheapest of these adds {p50:.2f} s "
        f"to the median and {p99:.2f} s to p99, for ${disk['price']:,.0f} instead of ${host['price']:,.0f} per replica."
    )


def _target(plan: Json) -> str:
    best = min(run["ttft"]["p99"] for run in plan["results"])
    return (
        f"No size reaches a TTFT p99 below {best:.2f} s: the slowest requests have long prompts, and their new part "
        "takes seconds to compute."
    )


def _hosts(plan: Json) -> str:
    runs = [run for run in plan["results"] if not run["disk_bytes"]]
    rows = [[_size(run["host_bytes"]), _hits(run, "device", "host"), *_ttft(run), _share(run)] for run in runs]
    return _table(
        ["host memory", "hits: device + host", "TTFT p50", "p90", "p99", "blocks never reused"],
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
    return _table(["host + disk", "hits: device + host + disk", "TTFT p50", "p90", "p99", "disk busy"], rows)


def _policies(replay: Json) -> str:
    rows = [
        [run["policy"], f"{_hits(run, 'device', 'host', 'disk')} = {run['hit_rate']:.1%}", *_ttft(run)]
        for run in replay["results"]
    ]
    return _table(["policy", "hits: device + host + disk", "TTFT p50", "p90", "p99"], rows)


def _origins(plan: Json) -> str:
    sources = {**plan["setup"]["sources"], "prices": plan["prices"]["source"]}
    return "\n".join(_fill(f"{name}: {source}", "- ", "  ") for name, source in sources.items())


def _links(plan: Json) -> str:
    busy: dict[str, float] = {}
    for run in plan["results"]:
        for link in run["links"]:
            busy[link["name"]] = max(busy.get(link["name"], 0.0), link["busy"])
    shares = ", ".join(f"{name} {share:.1%}" for name, share in busy.items())
    return f"No link is a limit. The largest share of time that each is busy: {shares}."


def _grain(fine: Json, coarse: Json) -> str:
    rows = [
        [name, _hits(run, "device", "host"), *_ttft(run)]
        for name, result in (("one by one", fine), (f"in groups of {coarse['setup']['quantum'] * 1e3:g} ms", coarse))
        for run in result["results"]
    ]
    first = f"steps of the first {fine['trace']['num_requests']:,} requests"
    return _table([first, "hits: device + host", "TTFT p50", "p90", "p99"], rows)


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


def _about(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.0f} GiB" if num_bytes < 1024 * GIB else f"{num_bytes / GIB / 1024:.1f} TiB"


if __name__ == "__main__":
    sys.exit(main())
