"""Generate the tables of results in the README and the docs from the records in results/.

python -m benchmarks.table            print every table
python -m benchmarks.table --write    write them between the markers of the pages
python -m benchmarks.table --check    exit code 1 if a page is out of date

Each row uses the newest record that has its figures. A page marks a table with
`<!-- results: NAME -->` and `<!-- end of results -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/benchmarks.md", "docs/storage.md", "docs/stores.md", "docs/planner.md")
MARKED = re.compile(r"<!-- results: (\w+) -->.*?<!-- end of results -->", re.DOTALL)
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Cells:
    """Our figure and its baseline, measured in the same run."""

    ours: str
    baseline: str


@dataclass(frozen=True)
class Line:
    """One row of a table. `cells` raises LookupError if a record lacks the figures."""

    title: str
    benchmark: str
    cells: Callable[[Rows], Cells]


def row_of(rows: Rows, **wanted: object) -> Mapping[str, Any]:
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return row
    raise LookupError(f"no row with {wanted}")


def index(rows: Rows) -> Cells:
    """CPU time per prompt of the conversation trace (12,000 tokens on average), 16 tokens per block."""
    ours, hashed = (row_of(rows, block=16, case=case)["us"] for case in ("arrays", "bare hashlib chain"))
    peers = [row for row in rows if row.get("block") == 16 and "peer" in row]
    baseline = ", ".join(f"{row['peer']} {row['us']:,.0f} us" for row in peers)
    return Cells(f"{ours:.0f} us", baseline or f"SHA-256 of the blocks {hashed:.0f} us")


def engine(case: str) -> Callable[[Rows], Cells]:
    """SmolLM2-135M on the CPU, tokens per second."""

    def cells(rows: Rows) -> Cells:
        row = row_of(rows, case=case)
        rates = {name.removesuffix(" tok/s"): value for name, value in row.items() if name.endswith(" tok/s")}
        others = {name: value for name, value in rates.items() if not isinstance(value, str)}  # without "not installed"
        ours = others.pop("kvtier")
        return Cells(f"{ours:.0f} tok/s", ", ".join(f"{name} {value:.0f}" for name, value in others.items()))

    return cells


def conversations(cache: str, figure: str) -> Callable[[Rows], Cells]:
    """The same conversations with more or fewer tiers, and without a cache."""

    def value(row: Mapping[str, Any]) -> str:
        if figure == "tok/s":
            return f"{row['tok/s out']:.1f}"
        if figure == "TTFT p50":
            return f"{row['TTFT p50 s']:.1f} s"
        return f"{sum(row[f'% from {tier}'] for tier in ('device', 'host', 'disk')):.0f} %"

    def cells(rows: Rows) -> Cells:
        baselines = {"device only": "device", "transformers": "transformers"}
        others = (f"{name} {value(row_of(rows, cache=other))}" for name, other in baselines.items())
        return Cells(value(row_of(rows, cache=cache)), ", ".join(others))

    return cells


def restart(rows: Rows) -> Cells:
    """The slowest warm start and the fastest cold one."""
    warm = max(row["ttft ms"] for row in rows if row["start"] == "second, warm")
    cold = min(row["ttft ms"] for row in rows if row["start"] != "second, warm")
    return Cells(f"{warm / 1e3:.2f} s", f"recompute {cold / 1e3:.2f} s")


def disk(call: str) -> Callable[[Rows], Cells]:
    """Medians, 1 MiB objects, O_DIRECT."""

    def cells(rows: Rows) -> Cells:
        row = row_of(rows, setting="O_DIRECT, sync at close", call=call, beside="fio")
        return Cells(f"{row['median GB/s']:.2f} GB/s", f"fio {row['its median']:.2f} GB/s")

    return cells


def disk_setting(setting: str, call: str) -> Callable[[Rows], Cells]:
    """Medians, and the median over rounds of our share of the baseline. fio does not measure the page cache."""

    def cells(rows: Rows) -> Cells:
        found = [row for row in rows if (row.get("setting"), row.get("call")) == (setting, call)]
        if not found:
            raise LookupError(f"no {call} with {setting}")
        names = {"raw": "system calls", "fio": "fio", "plain": "unencrypted"}
        others = (f"{names[row['beside']]} {row['its median']:.2f} ({100 * row['share']:.0f} %)" for row in found)
        return Cells(f"{found[0]['median GB/s']:.2f} GB/s", ", ".join(others))

    return cells


def checksums(rows: Rows) -> Cells:
    """One core, 1 MiB that is in its cache."""
    ours, twin = (row_of(rows, checksum=name)["GB/s"] for name in ("in C", "twin (zlib, numpy)"))
    return Cells(f"{ours:.1f} GB/s", f"zlib and numpy {twin:.1f} GB/s")


def opening(rows: Rows) -> Cells:
    for row in rows:
        if "open s" in row:
            return Cells(f"{row['open s']:.2f} s", f"{row['objects']:,} objects")
    raise LookupError("no store was opened")


def crash(kind: str) -> Callable[[Rows], Cells]:
    """Objects reported as stored and then missing, corrupt objects, and space that no object owns."""

    def cells(rows: Rows) -> Cells:
        row = row_of(rows, crash=kind)
        ours = f"{row['lost']} lost, {row['corrupt']} corrupt, {row['bytes leaked']} bytes leaked"
        return Cells(ours, f"{row['times']:,} times")

    return cells


def store(name: str, call: str) -> Callable[[Rows], Cells]:
    """Medians, 1 MiB objects, 32 per call; the median of our share of the raw client; the load average."""

    def cells(rows: Rows) -> Cells:
        row = row_of(rows, store=name, call=call)
        share, load = 100 * row["share"], row["load of the machine"]
        return Cells(f"{row['MB/s']:.0f} MB/s", f"raw client {row['raw']:.0f} MB/s ({share:.0f} %), load {load}")

    return cells


def first_token(name: str, prompt: int) -> Callable[[Rows], Cells]:
    """SmolLM2 on one core; the prompt is in the store and in no memory tier."""

    def cells(rows: Rows) -> Cells:
        row = row_of(rows, store=name, prompt=prompt)
        return Cells(f"{row['hit ms']:.0f} ms", f"recompute {row['compute ms']:.0f} ms")

    return cells


def decisions(rows: Rows) -> Cells:
    """A decision is correct if it takes at most a tenth longer than the alternative."""
    found = [row for row in rows if "right" in row]
    if not found:
        raise LookupError("no decisions")
    lengths, latencies = (len({row[name] for row in found}) for name in ("prompt", "latency ms"))
    right, count = (sum(row[name] for row in found) for name in ("right", "of"))
    return Cells(f"{right} of {count} correct", f"{lengths} prompt lengths, {latencies} latencies, both forced")


def stores(rows: Rows) -> Cells:
    """Medians of reading 1 MiB objects, 32 per call."""
    found = [(name, row_of(rows, store=name, call="read")) for name in ("redis", "s3", "mooncake")]
    ours = " / ".join(f"{row['MB/s']:.0f}" for _, row in found)
    return Cells(f"{ours} MB/s", "raw clients " + " / ".join(f"{row['raw']:.0f}" for _, row in found))


def crashes(rows: Rows) -> Cells:
    killed, cut = row_of(rows, crash="kill -9"), row_of(rows, crash="power failure")
    lost = killed["lost"] + killed["corrupt"] + cut["lost"] + cut["corrupt"]
    return Cells(f"{lost} objects lost or corrupt", f"{killed['times']} kills, {cut['times']} power failures")


def front_end(rows: Rows) -> Cells:
    """CPU time of the front end per streamed token."""
    row = rows[0]
    clients = f"{row['clients']} clients, {row['requests']} requests"
    return Cells(f"{row['front end us/token']:.0f} us", f"uvicorn {row['floor us/token']:.0f} us ({clients})")


def sweep(rows: Rows) -> Cells:
    row = row_of(rows, trace="conversation")
    return Cells(f"{row['seconds']:.0f} s, {row['MiB']:.0f} MiB", f"{row['requests']:,} requests, 60 simulations")


def longer(rows: Rows) -> Cells:
    """The sweep of a generated trace, and of one with ten times the sessions."""
    found = [row for row in rows if row.get("trace") == "generated"]
    if not found:
        raise LookupError("no generated traces")
    few, many = (pick(found, key=lambda row: row["requests"]) for pick in (min, max))
    times = many["seconds"] / few["seconds"]
    return Cells(
        f"{many['seconds']:.0f} s ({times:.1f} times), {many['MiB']:.0f} MiB",
        f"{few['requests']:,} requests {few['seconds']:.0f} s",
    )


def reference(rows: Rows) -> Cells:
    """Largest error of a hit rate of the conversation trace."""
    found = [row for row in rows if "reference" in row]
    if not found:
        raise LookupError("no hit rates")
    off = max(abs(row["hit rate"] - row["reference"]) for row in found) * 100
    policies = ", ".join(dict.fromkeys(row["policy"] for row in found))
    sizes = len({row["blocks"] for row in found})
    return Cells(f"{off:.3f} points", f"second implementation: {policies}; {sizes} sizes")


def simulation(*figures: str, unit: str) -> Callable[[Rows], Cells]:
    """The worse of two comparisons of a real run with its simulation, and the difference of the two real runs."""

    def off(ours: float, run: float) -> float:
        return abs(ours - run) if unit == "points" else abs(ours / run - 1) * 100

    def cells(rows: Rows) -> Cells:
        found = [row_of(rows, figure=figure) for figure in figures]
        ours = max(
            max(off(row["simulated"], row["run"]), off(row["simulated again"], row["run again"])) for row in found
        )
        runs = max(off(row["run again"], row["run"]) for row in found)
        return Cells(f"{ours:.1f} {unit}", f"difference of two real runs {runs:.1f} {unit}")

    return cells


def simulated_ttft(rows: Rows) -> Cells:
    p50, p99 = (simulation(f"TTFT {share}, s", unit="%")(rows) for share in ("p50", "p99"))
    runs = " / ".join(cells.baseline.removeprefix("difference of two real runs ") for cells in (p50, p99))
    return Cells(f"{p50.ours} / {p99.ours}", f"two real runs differ by {runs}")


def transfers(direction: str) -> Callable[[Rows], Cells]:
    """1 GiB of scattered blocks, the slowest shape; `ancestor` is one warp per block."""

    def cells(rows: Rows) -> Cells:
        found = [row for row in rows if row.get("of") == "alone" and (row["way"], row["moved"]) == (direction, "1 GiB")]
        if not found:
            raise LookupError("no transfers of 1 GiB")
        worst = min(found, key=lambda row: row["of limit"])
        warp, driver = (100 * min(row[name] for row in found) for name in ("ancestor", "raw batch"))
        return Cells(
            f"{worst['GB/s']:.1f} GB/s ({100 * worst['of limit']:.0f} %)",
            f"driver batch {driver:.0f} %, warp per block {warp:.0f} %",
        )

    return cells


def during_compute(rows: Rows) -> Cells:
    """Block-first caches, during matrix products (GEMM) and matrix-vector products (GEMV)."""
    found = [row for row in rows if row.get("of") == "beside" and row["form"] == "block-first"]
    if not found:
        raise LookupError("no transfers during compute")
    lost = {kind: max(0.0, *(row["lost"] for row in found if row["compute"] == kind)) for kind in ("GEMM", "GEMV")}
    return Cells(
        f"{100 * min(row['of limit'] for row in found):.0f} %",
        "compute loses " + ", ".join(f"{100 * share:.1f} % ({kind})" for kind, share in lost.items()),
    )


def prefill_rate(rows: Rows) -> Cells:
    """Share of the sustained rate of a bf16 matrix product, by number of tokens; Llama-3-8B with random weights."""
    found = [row for row in rows if "of rate" in row]
    if not found:
        raise LookupError("no prefills")
    shares = " / ".join(f"{100 * row['of rate']:.0f}" for row in found)
    return Cells(f"{shares} %", "sustained bf16 product 100 %")


def vllm_worker(rows: Rows) -> Cells:
    """1 GiB of scattered blocks in four layouts of vLLM, the slowest one."""
    found = [row for row in rows if "of link" in row]
    if not found:
        raise LookupError("no transfers")
    save, load = (100 * min(row["of link"] for row in found if row["route"] == route) for route in ("save", "load"))
    return Cells(f"{save:.0f} / {load:.0f} %", "one contiguous copy 100 %")


def hit(tier: str) -> Callable[[Rows], Cells]:
    """32,768 tokens, random weights in the shape of Llama-3-8B."""

    def cells(rows: Rows) -> Cells:
        ours, computed = row_of(rows, case=f"{tier} hit"), row_of(rows, case="recompute")
        return Cells(f"{ours['TTFT ms']:.0f} ms", f"recompute {computed['TTFT ms']:.0f} ms")

    return cells


def decode(rows: Rows) -> Cells:
    """64 rows, the shape of Llama-3-8B, bf16. The floor is one read of weights and KV."""
    row = row_of(rows, case="decode 64, CUDA graph")
    return Cells(f"{row['ms']:.1f} ms", f"memory bandwidth floor {row['floor ms']:.1f} ms")


def disturbed(rows: Rows) -> Cells:
    ours, alone = (row_of(rows, case=f"decode 64, {case}")["step ms"] for case in ("loads and saves", "alone"))
    return Cells(f"{ours:.1f} ms", f"without transfers {alone:.1f} ms")


INDEX = Line("Prefix index, CPU time for a prompt of 12,000 tokens", "index", index)
RESTART = Line("TTFT of a 1,500-token conversation after a restart", "restart", restart)
HOST_HIT = Line("TTFT, 32,768 tokens cached in host memory", "tiers_gpu", hit("host"))
DISK_HIT = Line("TTFT, 32,768 tokens cached on disk", "tiers_gpu", hit("disk"))
SAVE = Line("GPU to host, scattered (% of link)", "transfer_gpu", transfers("d2h"))
LOAD = Line("Host to GPU, scattered (% of link)", "transfer_gpu", transfers("h2d"))
DECODE = Line("Decode of 64 sequences, forward pass", "engine_gpu", decode)
DISTURBED = Line("Decode of 64 sequences during loads and saves, engine", "tiers_gpu", disturbed)
CONVERSATIONS = tuple(
    Line(f"Conversations, {tiers}: {figure}", "serve", conversations(cache, figure))
    for tiers, cache in (("host tier", "+ host"), ("small host and disk", "+ disk"))
    for figure in ("TTFT p50", "tok/s", "hit rate")
)
DISK = tuple(Line(f"Disk tier, {call} 1 MiB blocks", "tiers", disk(call)) for call in ("write", "read"))
SWEEP = Line("Planner: sweep of the conversation trace", "replay", sweep)
PLANNED_TTFT = Line("Planner: TTFT error, p50 / p99", "replay", simulated_ttft)

TABLES: dict[str, tuple[Line, ...]] = {
    "gpu_summary": (HOST_HIT, DISK_HIT, SAVE, LOAD, DECODE, DISTURBED),
    "cpu_summary": (
        CONVERSATIONS[0],
        RESTART,
        Line("Decode, 16 rows, SmolLM2-135M", "engine", engine("decode 16")),
        INDEX,
        DISK[1],
        PLANNED_TTFT,
    ),
    "gpu": (
        HOST_HIT,
        DISK_HIT,
        SAVE,
        LOAD,
        Line("Both directions during compute (% of link)", "transfer_gpu", during_compute),
        DECODE,
        DISTURBED,
        Line("Prefill of 512 / 2k / 8k / 32k tokens, rate", "prefill_gpu", prefill_rate),
        Line("Worker side of vLLM's connector: save / load", "vllm_worker_cuda", vllm_worker),
    ),
    "engine": (
        *(
            Line(f"SmolLM2-135M: {case}", "engine", engine(case))
            for case in ("prefill 512", "prefill 2048", "decode 1", "decode 16")
        ),
        *CONVERSATIONS,
        RESTART,
    ),
    "parts": (
        INDEX,
        *DISK,
        Line("Disk tier, crashes", "crash", crashes),
        Line("Redis, S3, Mooncake: read 1 MiB blocks", "stores", stores),
        Line("HTTP front end, CPU per streamed token", "load", front_end),
        SWEEP,
        PLANNED_TTFT,
    ),
    "storage": (
        *(
            Line(f"{io}, sync at {when}: {call}", "tiers", disk_setting(f"{io}, sync at {when}", call))
            for io in ("O_DIRECT", "page cache")
            for when in ("close", "write")
            for call in ("write", "read")
        ),
        *(
            Line(f"Encrypted, {io}: {call}", "tiers", disk_setting(f"encrypted, {io}", call))
            for io in ("O_DIRECT", "page cache")
            for call in ("write", "read")
        ),
        Line("Checksum in C", "tiers", checksums),
        Line("Opening a store", "tiers", opening),
        Line("Process killed", "crash", crash("kill -9")),
        Line("Power failure, simulated", "crash", crash("power failure")),
    ),
    "stores": (
        *(
            Line(f"{name}: {call}", "stores", store(name, call))
            for name in ("redis", "redis, AES-GCM", "redis cluster of 3", "s3", "mooncake")
            for call in ("write", "read")
        ),
        *(
            Line(f"{name}: TTFT, {prompt:,} tokens", "stores", first_token(name, prompt))
            for name in ("redis", "s3")
            for prompt in (128, 512, 1024)
        ),
        Line("Load or recompute", "stores", decisions),
    ),
    "planner": (
        Line("Error of hit rates", "replay", reference),
        Line(
            "Simulation error: hits by tier",
            "replay",
            simulation(*(f"hits, {tier}, %" for tier in ("device", "host", "disk")), unit="points"),
        ),
        *(
            Line(f"Simulation error: TTFT {share}{what}", "replay", simulation(f"TTFT {share}, s{what}", unit="%"))
            for what in ("", ", 2 phases")
            for share in ("p50", "p90", "p99")
        ),
        SWEEP,
        Line("Generated trace, ten times the requests", "replay", longer),
    ),
}


def table(lines: Sequence[Line], results: Path = RESULTS) -> str:
    """Format a table in Markdown, without the lines that no record has figures for."""
    rows = ["| | kvtier | baseline in the same run | machine, commit |", "|---|---|---|---|"]
    for line in lines:
        for record in reversed(_records(results / f"{line.benchmark}.jsonl")):
            try:
                cells = line.cells(record["rows"])
            except LookupError:
                continue
            origin = f"{_machine(record['machine'])}, {record['commit']}"
            rows.append(f"| {line.title} | {cells.ours} | {cells.baseline} | {origin} |")
            break
    return "\n".join(rows)


def render(page: str) -> str:
    """Return the text of a page with current tables."""
    text = (ROOT / page).read_text()
    if not MARKED.search(text):
        raise SystemExit(f"{page} has no table; add <!-- results: NAME --> and <!-- end of results -->")
    return MARKED.sub(
        lambda match: f"<!-- results: {match[1]} -->\n\n{table(TABLES[match[1]])}\n\n<!-- end of results -->", text
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the pages")
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    options = parser.parse_args()
    if options.write:
        for page in PAGES:
            (ROOT / page).write_text(render(page))
    if options.check:
        stale = [page for page in PAGES if render(page) != (ROOT / page).read_text()]
        for page in stale:
            print(f"{page} is out of date; run python -m benchmarks.table --write", file=sys.stderr)
        return int(bool(stale))
    if not options.write:
        print("\n\n".join(f"{name}\n\n{table(lines)}" for name, lines in TABLES.items()))
    return 0


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _machine(description: str) -> str:
    """Shorten the description of a record: `2x Xeon`, `H200`."""
    name = description.split(",")[0].removeprefix("NVIDIA ").removeprefix("AMD ")
    cores = re.search(r"(\d+) cores", description)
    if cores is None:
        return name
    return f"{cores[1]}x {'Xeon' if 'Xeon' in description else name}"


if __name__ == "__main__":
    sys.exit(main())
