"""The figures of docs/planner.md: its commands are run on the conversation trace, their JSON is kept beside it.

python docs/make_planner.py --trace conversation_trace.jsonl   run, keep, draw and write (minutes)
python docs/make_planner.py                                    write the page from what was kept
python docs/make_planner.py --check                            exit code 1 if it is another one

Kept are docs/planner.json and the plots in docs/images; the page has the commands, tables and figures between markers.
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
        "blocks": _blocks(kept["plan"]["trace"]),
        "rates": _rates(kept["rates"]),
        "commands": _code(f"{COMMANDS['replay']} --html report.html\n{COMMANDS['plan']} --html plan.html"),
        "plan command": _code(COMMANDS["plan"] + " --html plan.html"),
        "replay command": _code(COMMANDS["replay"]),
        "trace": _trace(kept["plan"]),
        "curve": _curve(kept["plan"]["curve"]),
        "device": _device(kept["plan"]),
        "hosts": _hosts(kept["plan"]),
        "disk hits": _disk_hits(kept["plan"]),
        "disks": _disks(kept["plan"]),
        "disk costs": _disk_costs(kept["plan"]),
        "advice": "\n>\n".join(f"> {line}" for line in kept["plan"]["advice"]["text"]),
        "policies": _policies(kept["replay"]),
        "origins": _origins(kept["plan"]),
        "links": _links(kept["plan"]),
        "target": _target(kept["plan"]),
        "grain commands": _code(f"{COMMANDS['fine']}\n{COMMANDS['coarse']}"),
        "grain": _grain(kept["fine"], kept["coarse"]),
    }
    for name, text in parts.items():
        found = [*re.finditer(rf"(?<=<!-- made: {name} -->\n).*?(?=<!-- end -->)", page, re.DOTALL)]
        if len(found) != 1:
            raise SystemExit(f"docs/planner.md needs the marker <!-- made: {name} --> once, has it {len(found)} times")
        page = f"{page[: found[0].start()]}{text}\n{page[found[0].end() :]}"
    return page


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in rows])


def _rates(rates: Json) -> str:
    rows = [[f"{size:,}", *(f"{rates[policy][i]:.4f}"[1:] for policy in POLICIES)] for i, size in enumerate(SIZES)]
    return _table(["blocks", *POLICIES], rows)


def _blocks(trace: Json) -> str:
    return (
        f"The conversation trace of Mooncake has {trace['num_requests']:,} requests with {trace['num_blocks']:,} full "
        f"blocks of {trace['block_tokens']} tokens, {trace['num_distinct_blocks']:,} of them different."
    )


def _trace(plan: Json) -> str:
    trace, token_bytes = plan["trace"], plan["setup"]["token_bytes"]
    count = trace["num_requests"]
    different = trace["num_distinct_blocks"] * trace["block_tokens"] * token_bytes
    return (
        f"The conversation trace of Mooncake: {count:,} requests in {trace['seconds'] / 60:.0f} minutes, "
        f"{trace['prompt_tokens'] / count:,.0f} prompt tokens and {trace['answer_tokens'] / count:,.0f} answer tokens "
        f"on average. With {plan['setup']['model']} a token takes {token_bytes / 1024:g} KiB, so all different blocks "
        f"take {_about(different)}."
    )


def _curve(curve: list[Json]) -> str:
    most = max(point["hit_rate"] for point in curve)

    def size(policy: str, share: float) -> str:
        reached = (p["capacity_bytes"] for p in curve if p["policy"] == policy and p["hit_rate"] >= share * most)
        return _about(min(reached))

    least = min((point for point in curve if point["policy"] == "lru"), key=lambda point: point["capacity_bytes"])
    return (
        f"The smallest size, {_about(least['capacity_bytes'])}, finds {least['hit_rate']:.1%} of the blocks with LRU, "
        f"little but the system prompt; no size finds more than {most:.1%}. Of the sizes drawn, LRU needs "
        f"{size('lru', 0.5)} to find half of that and {size('lru', 0.9)} to find nine tenths; the optimum needs "
        f"{size('optimum', 0.5)} and {size('optimum', 0.9)}."
    )


def _device(plan: Json) -> str:
    alone = next(run for run in plan["results"] if not run["host_bytes"] and not run["disk_bytes"])
    return (
        f"Each replica has {_about(plan['setup']['device_bytes'])} of KV on its GPU, and finds "
        f"{alone['hit_rates']['device']:.0%} of its prompts there."
    )


def _disk_and_host(plan: Json) -> tuple[Json, Json]:
    """The cheapest setup with a disk, and the one with as much host memory and no disk."""
    disk = min((run for run in plan["results"] if run["disk_bytes"]), key=lambda run: run["price"])
    hosts = (run for run in plan["results"] if not run["disk_bytes"])
    return disk, next(run for run in hosts if run["host_bytes"] == disk["disk_bytes"])


def _disk_hits(plan: Json) -> str:
    disk, host = _disk_and_host(plan)
    return (
        f"{_size(disk['disk_bytes'])} of NVMe below only {_size(disk['host_bytes'])} of host memory find "
        f"{disk['hit_rate']:.1%}, {_size(host['host_bytes'])} of host memory {host['hit_rate']:.1%}:"
    )


def _disk_costs(plan: Json) -> str:
    disk, host = _disk_and_host(plan)
    p50, p99 = (disk["ttft"][share] - host["ttft"][share] for share in ("p50", "p99"))
    return (
        f"Against {_size(host['host_bytes'])} of host memory and no disk, the cheapest of these costs {p50:.2f} s at "
        f"the median and {p99:.2f} s at p99, for ${disk['price']:,.0f} instead of ${host['price']:,.0f} a replica."
    )


def _target(plan: Json) -> str:
    best = min(run["ttft"]["p99"] for run in plan["results"])
    return (
        f"Asked for a TTFT p99 below {best:.2f} s, it says that no size holds that: the slowest requests have long "
        "prompts, and what is new in them takes seconds to compute."
    )


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
        for name, result in (("each by itself", fine), (f"{coarse['setup']['quantum'] * 1e3:g} ms together", coarse))
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
