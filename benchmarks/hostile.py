"""A server under attack: latency of another tenant's streams and of /health, memory, and what is released afterwards.

python -m benchmarks.hostile                             every attack for 15 s; 12 minutes on 2 cores
python -m benchmarks.hostile --only url patterns         these attacks
python -m benchmarks.hostile --list                      their names

`kvtier serve` has three tenants: a victim with four streams, an attacker and an admin. The victim, a probe that asks
for /health every 50 ms, and the attacker are processes of their own (benchmarks/hostile_clients.py and
hostile_attacks.py). The model has random weights and SmolLM2's tokenizer: tokenizing costs what it does in practice,
and a step takes 10 to 20 ms on 2 cores. It computes with --invariant, so each stream has one right text.

Gaps are between events of one stream, with the time until a first token. "gap p99" is corrected for coordinated
omission: a gap g counts as g, g - e, g - 2e .. where e is the median of the baseline, as if tokens had been due all the
time. The baseline is measured before and after the attacks and taken together. "others" is the number of cores that
other processes used, and worker processes that the server started during the phase.

Within 30 s after an attack, the server must return to its earlier number of open files, threads and processes. A
server that does not, or does not answer, is replaced before the next attack. On a shared machine give the benchmark a
session of its own with a larger share: setsid bash -c 'echo -10 > /proc/self/autogroup; exec python -m ..'.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.hostile_attacks import ATTACKS, Attack
from benchmarks.hostile_clients import Target
from benchmarks.report import Bar, Row, arguments, at_most, print_table, report

HEALTH_P99_MS, GAP_RATIO, FRONT_RSS_MB = 250, 3, 300  # the bars of issue 19
RETURN_S = 30.0
ANSWER_TOKENS = 400
NUM_STREAMS = 4
KEYS = {"victim": "victim-victim", "attacker": "attacker-attacker", "operator": "operator-operator"}
TENANTS = "\n".join(
    f'[[tenants]]\nname = "{name}"\nkey = "{key}"\nadmin = {str(name == "operator").lower()}\n'
    for name, key in KEYS.items()
)


@dataclass(frozen=True)
class Held:
    """Resources of the front end at one moment."""

    files: int
    threads: int
    processes: int


class Server:
    """`kvtier serve` with three tenants, in separate processes."""

    def __init__(self, folder: Path, model: Path, open_files: int = 0) -> None:
        config = folder / "tenants.toml"
        config.write_text(TENANTS)
        limit = ["prlimit", f"--nofile={open_files}:{open_files}"] if open_files else []
        command = [*limit, sys.executable, "-m", "kvtier", "serve", "--port", "0", "--json", "--model", str(model)]
        command += ["--invariant", "--blocks", "1024", "--config", str(config), "--drain-seconds", "2"]
        with (folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.url: str = ready["address"]
        self.model: str = ready["model"]
        self.open_files = open_files
        self.front = psutil.Process(self.process.pid)
        self.engine = next(child for child in self.front.children() if "spawn_main" in " ".join(child.cmdline()))
        self._warm_up()
        self.before = self._settled()

    def target(self, tenant: str = "") -> Target:
        """Return the address and the key for the clients of a tenant."""
        return Target("127.0.0.1", int(self.url.rsplit(":", 1)[1]), self.model, KEYS.get(tenant, ""))

    def post(self, path: str, body: Mapping[str, Any], tenant: str) -> dict[str, Any]:
        """Post a request; return the parsed answer."""
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        answer = httpx.post(self.url + path, json={"model": self.model, **body}, headers=headers, timeout=120)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def held(self) -> Held:
        """Count the front end's resources."""
        return Held(self.front.num_fds(), self.front.num_threads(), len(self.front.children(recursive=True)))

    def wait_until_released(self) -> Held:
        """Wait up to 30 s until the counts are back at their earlier values. Return the last counts."""
        deadline = time.monotonic() + RETURN_S
        while self.leaked(now := self.held()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return now

    def leaked(self, now: Held) -> int:
        """Return the increase in open files, threads and processes."""
        return sum(max(0, there - before) for there, before in zip(_values(now), _values(self.before), strict=True))

    def is_healthy(self) -> bool:
        """Return True if /health answers 200 within a second."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=1).status_code == 200
        return False

    def reset_peak(self) -> None:
        """Reset the kernel's record of the front end's peak memory."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_mb(self) -> float:
        """Return the peak resident memory of the front end since the last reset."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))

    def stop(self) -> None:
        """Stop the server. Use SIGKILL if SIGTERM has no effect within 20 s."""
        family = [self.front, *self.front.children(recursive=True)] if self.front.is_running() else []
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()

    def _settled(self) -> Held:
        """Count the resources a second after the last connection was closed."""
        time.sleep(1)
        return self.held()

    def _warm_up(self) -> None:
        """Make the server start the processes and threads that it keeps: both tenants ask for costly work at once."""
        text = {"prompt": "word " * 5000}
        kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "response_format": kind}
        with ThreadPoolExecutor(8) as threads:
            posts = [("/tokenize", text), ("/v1/chat/completions", chat)] * 4
            asked = [threads.submit(self.post, *post, tenant) for post in posts for tenant in ("victim", "attacker")]
            for each in asked:
                each.result()


def _values(held: Held) -> tuple[int, ...]:
    return (held.files, held.threads, held.processes)


def make_model(folder: Path) -> Path:
    """Make a Llama of 2 layers with random weights and SmolLM2's tokenizer."""
    import torch
    import transformers

    from kvtier.engine.gguf_header import GgufHeader
    from kvtier.engine.packaged import resolve
    from kvtier.engine.tokenizer import load_tokenizer

    transformers.utils.logging.disable_progress_bar()
    tokenizer, metadata = load_tokenizer("smollm2"), GgufHeader(resolve("smollm2")).metadata
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size + 1,  # no multiple of 16: sampled by torch, as on a GPU, not by native code
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,  # SmolLM2's
        eos_token_id=tokenizer.token_id(tokenizer.special["eos_token"]),
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer.special)))
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])
    return folder


def make_asks(server: Server) -> list[dict[str, Any]]:
    """Request each answer once without an attack. Under attack, the victim's streams must be the same."""
    asks = []
    for number in range(NUM_STREAMS):
        body = {"prompt": f"Once upon a time {number}", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "seed": number}
        expected = server.post("/v1/completions", body, "victim")["choices"][0]["text"]
        asks.append({"body": {"model": server.model, "stream": True, **body}, "expected": expected})
    return asks


# ---- one phase -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Measurements under one attack, or under none."""

    name: str
    gaps: Sequence[float]
    wrong: Mapping[str, int]
    health: Sequence[float]
    health_failures: Mapping[str, int]
    peak_mb: float
    before: Held
    after: Held
    leaked: int
    outcomes: Mapping[str, int]
    engine_alive: bool
    others: float
    """Number of cores that other processes used."""


def measure(
    server: Server, name: str, attack: Attack | None, asks: Sequence[Mapping[str, Any]], seconds: float
) -> Phase:
    """Run the victim, the probe and, if there is an attack, the attacker."""
    victim, probe = asdict(server.target("victim")), asdict(server.target())
    clients = {
        "victim": _start("hostile_clients", {"role": "victim", "target": victim, "asks": asks, "seconds": seconds}),
        "probe": _start("hostile_clients", {"role": "probe", "target": probe, "seconds": seconds}),
    }
    if attack is not None:
        attacker = asdict(server.target("attacker" if attack.with_key else ""))
        clients["attacker"] = _start("hostile_attacks", {"attack": name, "target": attacker, "seconds": seconds})
    try:
        for client in clients.values():
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n", "a client did not start"
        server.reset_peak()
        with _others(server, clients.values()) as others:
            for client in clients.values():
                assert client.stdin is not None
                client.stdin.write("go\n")
                client.stdin.flush()
            time.sleep(seconds)
            peak_mb = server.peak_mb() if server.front.is_running() else float("inf")
        results = {role: json.loads(client.communicate(timeout=120)[0]) for role, client in clients.items()}
    finally:
        for client in clients.values():
            client.kill()
            client.wait()
    after = server.wait_until_released()
    streams, health = results["victim"], results["probe"]
    return Phase(
        name,
        streams["gaps"],
        streams["wrong"],
        health["seconds"],
        health["failures"],
        max(peak_mb, server.peak_mb()),
        server.before,
        after,
        server.leaked(after),
        results.get("attacker", {}),
        server.engine.is_running() and server.engine.status() != psutil.STATUS_ZOMBIE,
        others[0],
    )


def _start(module: str, options: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", json.dumps(options)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def _others(server: Server, clients: Any) -> Iterator[list[float]]:
    """Fill a list with the number of cores that processes outside this benchmark used."""
    ours = [server.front, *server.front.children(recursive=True), *(psutil.Process(each.pid) for each in clients)]
    found: list[float] = []

    def used() -> tuple[float, float]:
        all_of_it, mine = psutil.cpu_times(), 0.0
        for each in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                mine += sum(each.cpu_times()[:2])
        return sum(all_of_it) - all_of_it.idle - all_of_it.iowait, mine

    begin, (busy, mine) = time.monotonic(), used()
    yield found
    now_busy, now_mine = used()
    found.append(max(0.0, (now_busy - busy - now_mine + mine) / (time.monotonic() - begin)))


# ---- judging ---------------------------------------------------------------------------------------------------------


def corrected(gaps: Sequence[float], expected: float) -> np.ndarray[Any, Any]:
    """Add the gaps that tokens due within a long gap would have had."""
    values = np.asarray(gaps)
    counts = np.maximum(1, np.ceil(values / expected).astype(int))
    steps = np.concatenate([np.arange(count) for count in counts])
    return np.repeat(values, counts) - steps * expected


def summary(phase: Phase, baseline: Sequence[float], what: str) -> dict[str, object]:
    """Make a row of the table; times in milliseconds."""
    expected = float(np.median(baseline))
    p99 = float(np.percentile(corrected(phase.gaps, expected), 99))
    health = np.asarray(phase.health) * 1e3
    return {
        "attack": phase.name,
        "what": what,
        "health p50": float(np.median(health)),
        "health p99": float(np.percentile(health, 99)),
        "health max": float(health.max()),
        "failed": sum(phase.health_failures.values()),
        "gaps": len(phase.gaps),
        "gap p50": float(np.median(phase.gaps)) * 1e3,
        "gap p99": p99 * 1e3,
        "gap max": max(phase.gaps) * 1e3,
        "ratio": p99 / float(np.percentile(corrected(baseline, expected), 99)),
        "broken": sum(phase.wrong.values()),
        "rss MB": phase.peak_mb,
        "files": f"{phase.before.files}->{phase.after.files}",
        "threads": f"{phase.before.threads}->{phase.after.threads}",
        "processes": f"{phase.before.processes}->{phase.after.processes}",
        "others": phase.others,
        "answers": " ".join(f"{count}x{outcome}" for outcome, count in sorted(phase.outcomes.items())),
        "why broken": " ".join(f"{count}x{why}" for why, count in sorted(phase.wrong.items())),
    }


def judge(phase: Phase, row: Mapping[str, Any]) -> list[Bar]:
    """Compare one attack with the bars of the issue."""
    return [
        at_most(f"{phase.name}: health p99 ms", row["health p99"], HEALTH_P99_MS),
        at_most(f"{phase.name}: health failures", row["failed"], 0),
        at_most(f"{phase.name}: gap p99 over the baseline's", row["ratio"], GAP_RATIO),
        at_most(f"{phase.name}: broken streams", row["broken"], 0),
        at_most(f"{phase.name}: front end MB", phase.peak_mb, FRONT_RSS_MB),
        at_most(f"{phase.name}: files, threads and processes left", phase.leaked, 0),
        at_most(f"{phase.name}: engine ended", int(not phase.engine_alive), 0),
    ]


class Servers:
    """Keeps one server, and replaces it after an attack that damaged it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._server: Server | None = None

    def get(self, open_files: int = 0) -> Server:
        """Return the server; a new one if the old one leaks, does not answer, or has another limit of open files."""
        old = self._server
        if old is not None and (old.open_files != open_files or old.leaked(old.held()) or not old.is_healthy()):
            self.stop()
        if self._server is None:
            self._server = Server(self._folder, self._model, open_files)
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


def attack_all(servers: Servers, names: Sequence[str], seconds: float) -> list[Phase]:
    """Measure the baseline, every attack, and the baseline again."""
    asks = make_asks(servers.get())
    phases = []
    for name in ("none, before", *names, "none, after"):
        attack = ATTACKS.get(name)
        phase = measure(servers.get(attack.open_files if attack else 0), name, attack, asks, seconds)
        phases.append(phase)
        line = f"{name}: {len(phase.gaps)} gaps, longest {max(phase.gaps):.2f} s, {max(phase.health):.2f} s for /health"
        print(line, file=sys.stderr, flush=True)
    return phases


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--list", action="store_true", help="print the attacks and end")
    parser.add_argument("--log", type=Path, help="keep the server's log here")
    options = parser.parse_args()
    if options.list:
        print_table([{"attack": name, "item": attack.item, "what": attack.what} for name, attack in ATTACKS.items()])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        servers = Servers(folder, make_model(folder / "model"))
        try:
            phases = attack_all(servers, options.only, options.seconds)
        finally:
            servers.stop()
            if options.log:
                options.log.write_bytes((folder / "server.log").read_bytes())
    baseline = [gap for phase in (phases[0], phases[-1]) for gap in phase.gaps]
    what = {name: f"{attack.item}: {attack.what}" for name, attack in ATTACKS.items()}
    rows = [summary(phase, baseline, what.get(phase.name, "")) for phase in phases]
    print_table(rows)
    bars = [bar for phase, row in zip(phases[1:-1], rows[1:-1], strict=True) for bar in judge(phase, row)]
    kept: list[Row] = [{"seconds": options.seconds, **row} for row in rows]
    report("hostile", kept, bars, options.results)


if __name__ == "__main__":
    main()
