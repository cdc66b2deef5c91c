"""vLLM on the CPU with and without connectors: conversations larger than its cache, and prompts that never repeat.

.venv-vllm/bin/python -m benchmarks.vllm_cpu             SmolLM2-135M in float32, one thread; needs `make vllm`
.venv-vllm/bin/python -m benchmarks.vllm_cpu --quick     fewer conversations, vLLM alone and kvtier

10 users share a system prompt of 128 tokens. Each has 6 turns of 96 prompt tokens and 12 answer tokens. Two requests
run at a time, from users in random order. vLLM's cache holds a quarter of all blocks, and the memory of a connector
holds all of them. All engines run at the same time and answer each pair of requests one after the other, so that noise
affects all of them. The same requests run with:

    vLLM                        prefix caching in vLLM's own cache
    + ExampleConnector          vLLM's example: one file per layer and prompt, found only for an equal prompt
    + MooncakeStoreConnector    Mooncake's master and a segment in the worker, TCP
    + LMCacheMPConnector        LMCache's server, engine-driven transfers, chunks of one block
    + kvtier                    KvtierConnector with host memory

Then vLLM and vLLM + kvtier answer the same random prompts in turn. CPU time is that of all processes of an engine.
The bar is the median of the ratios of all rounds. The best round of each engine is printed too.

A peer that is not installed or that fails is left out, and the reason is printed and recorded. To install the peers:
pip install --no-deps mooncake-transfer-engine-non-cuda lmcache (their requirements are for GPUs, or older than vLLM's).
A run takes 5 minutes and 10 GB on two cores.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.report import Bar, Row, arguments, at_most, print_table, report
from benchmarks.vllm_conversations import BLOCK_TOKENS, Load, Turn, answer_new_prompts, converse

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import store_servers
import vllm_models
from vllm_support import Template, Vllm, VllmError, connector

ALONE, OURS = "vLLM", "+ kvtier"
BLOCK_BYTES = 46_080 * BLOCK_TOKENS
STEP_TOKENS = 512
QUICK = Load(system_tokens=64, users=8, turns=5, tokens_out=8)
NEW_PROMPTS = {"count": 2, "num_tokens": 256, "tokens_out": 16}
START_SECONDS = 300.0
"""Limit for the start of a peer's server. LMCache needs 13 s on idle cores, and more than 60 s on loaded ones."""


@dataclass(frozen=True)
class Peer:
    """A connector, its environment variables, and the processes and files of its store."""

    connector: dict[str, Any] | None = None
    environment: Mapping[str, str] | None = None
    processes: tuple[psutil.Process, ...] = ()
    folder: Path | None = None
    executor: str = "mp"


@dataclass
class Run:
    """An engine and its measurements."""

    peer: Peer
    engine: Vllm
    turns: list[Turn] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0

    def __post_init__(self) -> None:
        self._hits = external_hits(self.engine)

    def converse(self, load: Load) -> None:
        """Answer the next requests of the conversations."""
        before, start = cpu_seconds(self.engine, self.peer), time.perf_counter()
        self.turns += self.engine.run(converse, load)
        self.wall += time.perf_counter() - start
        self.cpu += cpu_seconds(self.engine, self.peer) - before

    def row(self, name: str, load: Load, alone: Run) -> Row:
        ttfts = [turn.ttft for turn in self.turns]
        prompts = sum(turn.num_prompt for turn in self.turns)
        files = self.peer.folder.rglob("*") if self.peer.folder else ()
        return {
            "conversations": name,
            "requests": len(ttfts),
            "seconds": self.wall,
            "TTFT p50 s": float(np.median(ttfts)),
            "p99 s": float(np.quantile(ttfts, 0.99)),
            "answer p50 s": float(np.median([turn.seconds for turn in self.turns])),
            "tok/s out": len(ttfts) * load.tokens_out / self.wall,
            "CPU s": self.cpu,
            "% cached": 100 * sum(turn.num_cached for turn in self.turns) / prompts,
            "% external": 100 * (external_hits(self.engine) - self._hits) / prompts,
            "memory MB": memory_bytes(self.engine, self.peer) / 1e6,
            "files MB": sum(file.stat().st_size for file in files if file.is_file()) / 1e6,
            "% answers as vLLM": percent_equal(self.turns, alone.turns),
        }


def main() -> None:
    parser = arguments("vLLM on the CPU with and without connectors.")
    parser.add_argument("--quick", action="store_true", help="fewer conversations; vLLM alone and kvtier")
    parser.add_argument("--only", nargs="*", help="run only these peers beside vLLM alone and kvtier")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of prompts that never repeat")
    parser.add_argument("--model", type=Path, help="folder with SmolLM2 for vLLM; default: made in a temporary folder")
    options = parser.parse_args()
    load, rounds = (QUICK, min(options.rounds, 6)) if options.quick else (Load(), options.rounds)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    with tempfile.TemporaryDirectory(prefix="kvtier-vllm-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = options.model or vllm_models.make_smollm2(folder / "smollm2")
        template = stack.enter_context(contextlib.closing(Template(folder, model)))
        bench = Bench(template, load)
        peers = {ALONE: Peer(), OURS: Peer(connector(host_bytes=bench.host_bytes))}
        again, more_bars = bench.run_new_prompts(peers, rounds)
        print_table(again)
        if not options.quick:
            peers |= bench.start_stores(folder, stack, options.only)
        rows = bench.run_conversations(peers)
    print_table(rows)
    left_out: list[Row] = [{"conversations": name, "left out": reason} for name, reason in bench.left_out.items()]
    print_table(left_out)
    report("vllm_cpu", [*rows, *left_out, *again], [*conversation_bars(rows), *more_bars], options.results)


@contextlib.contextmanager
def example(folder: Path, _: int) -> Iterator[Peer]:
    """Make a folder for the files of vLLM's example, which has no limit."""
    files = folder / "example"
    files.mkdir()
    extra = {"shared_storage_path": str(files)}
    fields = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    yield Peer(fields, folder=files)


@contextlib.contextmanager
def mooncake(folder: Path, num_bytes: int) -> Iterator[Peer]:
    """Run a Mooncake master. The segment with the blocks is in vLLM's worker."""
    store_servers.need_module("mooncake", "pip install mooncake-transfer-engine-non-cuda")
    port, metrics, metadata = store_servers.free_ports(3)
    command = [store_servers.program("mooncake_master", "pip install mooncake-transfer-engine-non-cuda")]
    command += ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    command += [f"--metrics_port={metrics}", f"--http_metadata_server_port={metadata}"]
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "mode": "embedded",
        "global_segment_size": num_bytes,
        "local_buffer_size": 64 << 20,
    }
    file = folder / "mooncake.json"
    file.write_text(json.dumps(config))
    fields = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    environment = {"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1"}
    is_up = functools.partial(store_servers.listens, port)
    with store_servers.running(command, folder, "mooncake.log", is_up, START_SECONDS) as master:
        yield Peer(fields, environment, (psutil.Process(master.pid),))


@contextlib.contextmanager
def lmcache(folder: Path, num_bytes: int) -> Iterator[Peer]:
    """Run LMCache's server. Its memory is rounded up to whole GiB."""
    port, http = store_servers.free_ports(2)
    command = [store_servers.program("lmcache", "pip install --no-deps lmcache"), "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-port", str(http), "--chunk-size", str(BLOCK_TOKENS)]
    command += ["--l1-size-gb", str(-(-num_bytes >> 30)), "--supported-transfer-mode", "engine_driven"]
    command += ["--eviction-policy", "LRU", "--disable-observability"]
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    fields = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    environment = {"LMCACHE_TRACK_USAGE": "false"}
    with (
        unittest.mock.patch.dict(os.environ, environment),
        store_servers.running(
            command, folder, "lmcache.log", functools.partial(store_servers.listens, http), START_SECONDS
        ) as server,
    ):
        # In a forked worker LMCache is imported before vLLM looks for Triton kernels, which then raises.
        yield Peer(fields, environment, (psutil.Process(server.pid),), executor="spawn")


class Bench:
    """Runs the same requests with different connectors."""

    def __init__(self, template: Template, load: Load) -> None:
        self._template, self._load = template, load
        self.host_bytes = load.num_blocks * BLOCK_BYTES * 3 // 2
        self.left_out: dict[str, str] = {}
        """Peer -> why it is not measured."""

    @contextlib.contextmanager
    def start(self, peer: Peer) -> Iterator[Vllm]:
        arguments = {
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": self._load.num_blocks // 4 + 1,  # one block is vLLM's null block
            "kv_cache_memory_bytes": 1 << 30,
            "max_model_len": self._load.max_tokens,
            "max_num_batched_tokens": STEP_TOKENS,
        }
        with self._template.start(
            peer.connector, executor=peer.executor, **arguments, **(peer.environment or {})
        ) as engine:
            engine.run(answer_new_prompts, 10**6, 1, 64, 4)  # warm up
            yield engine

    def start_stores(self, folder: Path, stack: contextlib.ExitStack, only: Sequence[str] | None) -> dict[str, Peer]:
        """Start the stores of the other connectors."""
        starts = {"ExampleConnector": example, "MooncakeStoreConnector": mooncake, "LMCacheMPConnector": lmcache}
        peers = {}
        for name in starts if only is None else only:
            try:
                peers[f"+ {name}"] = stack.enter_context(starts[name](folder, self.host_bytes))
            except (store_servers.NotInstalled, RuntimeError, TimeoutError) as error:
                self._leave_out(f"+ {name}", error)
        return peers

    def run_conversations(self, peers: Mapping[str, Peer]) -> list[Row]:
        """Let all engines answer the same requests in turn; the order changes with every pair of requests."""
        with contextlib.ExitStack() as stack:
            runs: dict[str, Run] = {}
            for name, peer in peers.items():
                with self._leaving_out(runs, name):
                    runs[name] = Run(peer, stack.enter_context(self.start(peer)))
            for number in range(len(self._load.order()) // self._load.in_flight):
                for name in list(runs) if number % 2 else list(reversed(runs)):
                    with self._leaving_out(runs, name):
                        runs[name].converse(self._load)
            return [run.row(name, self._load, runs[ALONE]) for name, run in runs.items()]

    @contextlib.contextmanager
    def _leaving_out(self, runs: dict[str, Run], name: str) -> Iterator[None]:
        """Continue without a peer whose engine fails in the `with` block."""
        try:
            yield
        except VllmError as error:
            if name in (ALONE, OURS):
                raise
            runs.pop(name, None)
            self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self.left_out[name] = str(error).splitlines()[0][:300]
        print(f"left out {name}: {error}", flush=True)

    def run_new_prompts(self, peers: Mapping[str, Peer], rounds: int) -> tuple[list[Row], list[Bar]]:
        """Let two engines answer the same new prompts in turn; the order changes with every round."""
        wall: dict[str, list[float]] = {ALONE: [], OURS: []}
        cpu: dict[str, list[float]] = {ALONE: [], OURS: []}
        with self.start(peers[ALONE]) as alone, self.start(peers[OURS]) as ours:
            engines = [(ALONE, alone), (OURS, ours)]
            for number in range(rounds):
                for name, engine in engines if number % 2 else reversed(engines):
                    before = cpu_seconds(engine, peers[name])
                    wall[name].append(engine.run(answer_new_prompts, number, **NEW_PROMPTS))
                    cpu[name].append(cpu_seconds(engine, peers[name]) - before)
        rows: list[Row] = [
            {
                "new prompts": name,
                "rounds": rounds,
                "wall s": min(wall[name]),
                "wall p50 s": statistics.median(wall[name]),
                "CPU s": min(cpu[name]),
                "CPU p50 s": statistics.median(cpu[name]),
                "wall ratio p50": median_ratio(wall[name], wall[ALONE]),
                "CPU ratio p50": median_ratio(cpu[name], cpu[ALONE]),
            }
            for name in wall
        ]
        bars = [
            at_most(f"new prompts, {what}: kvtier over vLLM", median_ratio(times[OURS], times[ALONE]), 1.03)
            for what, times in (("wall", wall), ("CPU", cpu))
        ]
        return rows, bars


def median_ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def cpu_seconds(engine: Vllm, peer: Peer) -> float:
    """Return the CPU time of an engine and of the store of its connector."""
    times = [process.cpu_times() for process in [*engine.processes(), *peer.processes]]
    return sum(each.user + each.system for each in times)


def external_hits(engine: Vllm) -> float:
    """Return the tokens that a connector has provided."""
    return engine.metrics().get("vllm:external_prefix_cache_hits", 0.0)


def memory_bytes(engine: Vllm, peer: Peer) -> int:
    """Return the memory of an engine and of the store of its connector. Shared pages count in part."""
    return sum(process.memory_full_info().pss for process in [*engine.processes(), *peer.processes])


def percent_equal(turns: list[Turn], others: list[Turn]) -> float:
    """Return the percentage of equal answers. Batches of other sizes round differently, so vLLM differs as well."""
    by_user = [sorted(each, key=lambda turn: (turn.user, turn.num_prompt)) for each in (turns, others)]
    equal = [one.answer == other.answer for one, other in zip(*by_user, strict=True)]
    return 100 * sum(equal) / len(equal)


def conversation_bars(rows: list[Row]) -> list[Bar]:
    ttft = {str(row["conversations"]): float(str(row["TTFT p50 s"])) for row in rows}
    return [at_most("conversations, TTFT p50: kvtier over vLLM", ttft[OURS] / ttft[ALONE], 0.5)]


if __name__ == "__main__":
    main()
