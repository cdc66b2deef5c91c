"""Many clients on a real server: stability, leaks, and the cost of the front end.

python -m benchmarks.load                        64 clients for 10 minutes, SmolLM2-135M, as `make serve` runs it
python -m benchmarks.load --seconds 120          a shorter run: RSS is compared with that after a fifth of the time
python -m benchmarks.load --tiny                 random weights, 2 layers: hundreds of times more requests

Every client streams one answer after another. A tenth of the streams are aborted. The server is `kvtier serve` in its
own processes, and the clients share this process. The server's processes are sampled every five seconds, and every
fifteenth sample is printed to standard error.

The overhead per streamed token is the CPU time of the front end divided by the number of tokens. Its lower limit is the
CPU time of uvicorn alone for the same number of events. "delivery" is the time from the end of the engine's step until
the front end has the client's event. It is known only as the upper bound of a histogram bucket.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Bar, Row, arguments, at_most, print_table, report
from kvtier.server.load import LoadOptions, LoadReport, run_load

LOOK_SECONDS = 5.0
LOOKS_A_LINE = 3
FLOOR_SECONDS = 10.0
TOKENS = 'kvtier_tokens_total{kind="new"}'
TASKS = "kvtier_tasks"
FLOOR = """
import asyncio, socket, uvicorn, uvloop
EVENT = b'data: ' + b'x' * 190 + b'\\n\\n'
async def app(scope, receive, send):
    while (await receive()).get('more_body'):
        pass
    await send({'type': 'http.response.start', 'status': 200, 'headers': [(b'content-type', b'text/event-stream')]})
    for _ in range(64):
        await send({'type': 'http.response.body', 'body': EVENT, 'more_body': True})
        await asyncio.sleep(0.05)
    await send({'type': 'http.response.body', 'body': b'data: [DONE]\\n\\n', 'more_body': False})
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
config = uvicorn.Config(app, http='httptools', ws='none', lifespan='off', log_level='error', access_log=False)
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(uvicorn.Server(config).serve(sockets=[listener]))
"""


@dataclass(frozen=True)
class Look:
    """A sample of the server's processes."""

    at: float
    front_rss: int
    engine_rss: int
    num_threads: int
    num_files: int
    """Open files without those of the disk tier, whose number grows to a limit."""

    @property
    def rss(self) -> int:
        return self.front_rss + self.engine_rss


class Server:
    """`kvtier serve`, and its engine process."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        with log.open("wb") as file:
            command = [sys.executable, "-m", "kvtier", "serve", "--port", "0", "--json", *options]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)
        assert self.process.stdout is not None
        started = json.loads(self.process.stdout.readline())
        self.url, self.model = started["address"], started["model"]
        self.front = psutil.Process(self.process.pid)
        self.engine = next(child for child in self.front.children() if "spawn_main" in " ".join(child.cmdline()))

    def look(self) -> Look:
        """Sample both processes."""
        both = (self.front, self.engine)
        rss = [each.memory_info().rss for each in both]
        tier = sum("/segment-" in file.path for file in self.engine.open_files())
        threads, files = (sum(found) for found in zip(*((e.num_threads(), e.num_fds()) for e in both), strict=True))
        return Look(time.monotonic(), rss[0], rss[1], threads, files - tier)

    def look_until(self, before: Look) -> Look:
        """Sample after the last connections are closed, or after ten seconds."""
        deadline = time.monotonic() + 10
        while (now := self.look()).num_files > before.num_files and time.monotonic() < deadline:
            time.sleep(0.1)
        return now

    def tasks_until(self, before: float) -> float:
        """Return the number of tasks in the front end's event loop once it is at most `before`, or after ten seconds.

        The heartbeat's tasks come and go, so a single sample may be higher.
        """
        deadline = time.monotonic() + 10
        while (now := self.metrics()[TASKS]) > before and time.monotonic() < deadline:
            time.sleep(0.1)
        return now

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/state", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    def wait_until_idle(self) -> dict[str, Any]:
        """Return the state after all requests and saves have ended, or after a minute."""
        deadline = time.monotonic() + 60
        while _left(state := self.state()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return state

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="a model of 2 layers with random weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        chosen = ["--model", str(_tiny(Path(folder) / "tiny"))] if options.tiny else []
        disk = ("--disk", f"{folder}/kv", "--disk-bytes", "32MiB" if options.tiny else "2GiB")  # 3,000 blocks of either
        server = Server(log, *chosen, "--host-blocks", "1024", *disk)
        load = LoadOptions(server.url, server.model, options.clients, disconnect_share=0.1)
        try:
            asyncio.run(
                run_load(replace(load, requests=options.clients))
            )  # warm up: start all threads and open all files
            server.wait_until_idle()
            before, cpu, counted = server.look(), server.front.cpu_times(), server.metrics()
            done, looks = asyncio.run(_run(server, replace(load, seconds=options.seconds, seed=1)))
            after_cpu = server.front.cpu_times()
            state = server.wait_until_idle()
            counts = {name: value - counted.get(name, 0.0) for name, value in server.metrics().items()}
            after, num_tasks = server.look_until(before), server.tasks_until(counted[TASKS])
        finally:
            code = server.stop()
        front_us = (after_cpu.user + after_cpu.system - cpu.user - cpu.system) / max(1, counts[TOKENS]) * 1e6
        floor_us = _floor(options.clients)
        text = log.read_text()
    early = min(looks, key=lambda look: abs(look.at - looks[0].at - options.seconds / 5))
    row: Row = {
        "model": "tiny" if options.tiny else server.model,
        "clients": options.clients,
        **{name: str(value) if isinstance(value, dict) else value for name, value in done.summary().items()},
        "delivery p50 ms": _quantile(counts, "kvtier_delivery_seconds", 0.5) * 1e3,
        "delivery p99 ms": _quantile(counts, "kvtier_delivery_seconds", 0.99) * 1e3,
        "front end us/token": round(front_us, 1),
        "floor us/token": round(floor_us, 1),
        "front rss early MB": early.front_rss / 1e6,
        "front rss end MB": looks[-1].front_rss / 1e6,
        "engine rss early MB": early.engine_rss / 1e6,
        "engine rss end MB": looks[-1].engine_rss / 1e6,
    }
    print_table([{"what": name, "value": value} for name, value in row.items()])
    num_leaked = _left(state)
    bars: list[Bar] = [
        at_most("5xx", sum(count for status, count in done.statuses.items() if status >= 500), 0),
        at_most("requests without an answer, or cut off", done.statuses[0] + done.num_incomplete, 0),
        at_most("leaked blocks, leases and places", num_leaked, 0),
        at_most("more threads than before", after.num_threads - before.num_threads, 0),
        at_most("more open files than before", after.num_files - before.num_files, 0),
        at_most("more tasks than before", num_tasks - counted[TASKS], 0),
        at_most("rss at the end over that after a fifth", looks[-1].rss / early.rss, 1.02),
        at_most("front end: rss at the end over that after a fifth", looks[-1].front_rss / early.front_rss, 1.02),
        at_most("front end: us of CPU per token", front_us, 75),
        at_most("unhandled exceptions in the log", text.count("Traceback"), 0),
        at_most("exit code", code, 0),
    ]
    report("load", [row], bars, options.results)


def _quantile(counts: dict[str, float], name: str, share: float) -> float:
    """Return the upper bound of the histogram bucket that contains this quantile."""
    target = share * counts[f"{name}_count"]
    bounds = [(float(key.split('"')[1]), value) for key, value in counts.items() if key.startswith(f"{name}_bucket")]
    return min(bound for bound, value in bounds if value >= target)


def _left(state: dict[str, Any]) -> int:
    """Return the number of answers, leases and blocks still in use."""
    blocks = sum(tier["num_pinned"] for tier in state["tiers"])
    return int(blocks + sum(state[name] for name in ("in_flight", "running", "waiting", "holds")))


async def _run(server: Server, load: LoadOptions) -> tuple[LoadReport, list[Look]]:
    looks, so_far = [server.look()], LoadReport()

    def remember(report: LoadReport) -> None:
        nonlocal so_far
        so_far = report

    async def watch() -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            looks.append(server.look())
            if len(looks) % LOOKS_A_LINE == 0:
                _tell(looks[-1].at - looks[0].at, load.seconds, so_far, looks[-1])

    watching = asyncio.create_task(watch())
    done = await run_load(load, remember)
    watching.cancel()
    return done, looks


def _tell(seconds: float, of: float, so_far: LoadReport, look: Look) -> None:
    """Print the progress to standard error."""
    statuses = ", ".join(f"{count} x {status or 'none'}" for status, count in sorted(so_far.statuses.items()))
    print(
        f"{seconds:4.0f} of {of:.0f} s: answers {statuses or 'none yet'}; {so_far.num_tokens} tokens, "
        f"{so_far.num_disconnected} left; {look.rss / 1e6:.0f} MB, {look.num_threads} threads, {look.num_files} files",
        file=sys.stderr,
        flush=True,
    )


def _floor(clients: int) -> float:
    """Return the CPU time per event of uvicorn alone, in us."""
    process = subprocess.Popen([sys.executable, "-c", FLOOR], stdout=subprocess.PIPE)
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    try:
        time.sleep(1)  # it is about to listen
        watched = psutil.Process(process.pid)
        before = watched.cpu_times()
        done = asyncio.run(run_load(LoadOptions(url, "none", clients, seconds=FLOOR_SECONDS)))
        after = watched.cpu_times()
    finally:
        process.kill()
        process.wait()
    return (after.user + after.system - before.user - before.system) / max(1, done.num_tokens) * 1e6


def _tiny(folder: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny_model import make_tiny_model

    return Path(make_tiny_model(folder))


if __name__ == "__main__":
    main()
