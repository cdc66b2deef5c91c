"""Exclusive and inclusive host tier: hit rates of two tiers, compared with one cache of the sum, and link traffic.

python -m benchmarks.exclusive --trace conversation_trace.jsonl

The real manager serves one request at a time in chunks of 8,192 tokens, like the scheduler. A simulated worker, which
copies nothing, reports every plan as done before the next chunk.
"""

from __future__ import annotations

from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.cache.config import CacheConfig, HostConfig
from kvtier.cache.manager import CacheManager
from kvtier.index import Chain, Namespace, Outcome
from kvtier.messages import Report, Route, TransferResult
from kvtier.replay import SyntheticTrace, generate, read_trace, sweep
from kvtier.replay.curves import Accesses

DEVICE = 1_650
HOSTS = (1_024, 2_048, 4_096, 8_192)
CHUNK_TOKENS = 8_192
MAX_LOSS = 0.005


def main() -> None:
    parser = arguments("Hit rates and link traffic of an exclusive and an inclusive host tier.")
    parser.add_argument("--trace", help="Mooncake JSONL; default: a generated trace")
    options = parser.parse_args()
    trace = read_trace(options.trace).requests if options.trace else tuple(generate(SyntheticTrace(sessions=2000)))
    accesses = Accesses(trace)
    sums = {
        host: point.hit_rate
        for host, point in zip(HOSTS, sweep(trace, [DEVICE + h for h in HOSTS], ["lru"]), strict=True)
    }
    rows: list[Row] = []
    bars: list[Bar] = []
    for host in HOSTS:
        runs = {
            name: TwoTiers(host, policy, exclusive=exclusive).run(accesses)
            for name, policy, exclusive in (
                ("inclusive", "lru", False),
                ("exclusive", "lru", True),
                ("learned", "learned", True),
            )
        }
        rates = {name: run.num_hits / len(accesses.paths) for name, run in runs.items()}
        moved = {name: run.num_moved for name, run in runs.items()}
        duplicates = runs["exclusive"].manager.stats.num_duplicates_evicted
        rows.append(
            {
                "host blocks": host,
                "one cache of the sum": sums[host],
                **rates,
                "moved, inclusive": moved["inclusive"],
                "moved, exclusive": moved["exclusive"],
                "extra saves at most": duplicates,
                "traffic": moved["exclusive"] / moved["inclusive"],
            }
        )
        loss = (sums[host] - rates["exclusive"]) * 100
        bars.append(at_most(f"{host} host blocks: points below one cache of the sum", loss, MAX_LOSS * 100))
        bars.append(at_least(f"{host} host blocks: hit rate, learned / lru", rates["learned"] / rates["exclusive"], 1))
    print_table(rows)
    report("exclusive", rows, bars, options.results)


class TwoTiers:
    """A manager with device and host. One token stands for a block, which saves memory."""

    def __init__(self, host: int, policy: str, *, exclusive: bool) -> None:
        tier = HostConfig(host, policy=policy, exclusive=exclusive)
        config = CacheConfig(DEVICE, policy=policy, host=tier, partial_scan=0, always_load=True)
        self.manager = CacheManager(Namespace("replay", block_tokens=1), config)
        self.num_hits = 0

    @property
    def num_moved(self) -> int:
        counts = self.manager.transfers.counts
        return sum(counts[route].num_blocks for route in (Route.DEVICE_TO_HOST, Route.HOST_TO_DEVICE))

    def run(self, accesses: Accesses) -> TwoTiers:
        manager, chunk = self.manager, max(1, CHUNK_TOKENS // accesses.block_tokens)
        if manager.tree.tracker is not None:
            manager.tree.tracker.block_tokens = accesses.block_tokens
        for request, paths in zip(accesses.requests, accesses, strict=True):
            if len(paths):
                chain = Chain(manager.namespace, paths)
                chain.append([0])  # the last token of a prompt never matches
                self._serve(chain, chunk, request.timestamp_ms / 1000, Outcome(request.output_tokens))
        manager.check()
        return self

    def _serve(self, chain: Chain, chunk: int, now: float, outcome: Outcome) -> None:
        manager, num_blocks = self.manager, chain.num_tokens - 1
        allocation = manager.match(chain, now=now)
        done = allocation.lease.num_matched
        self.num_hits += done
        while True:
            done = min(done + chunk, num_blocks)
            if manager.allocate(allocation, done) is not None:
                self._move(now)  # saves in flight hold device blocks
                if manager.allocate(allocation, done) is not None:
                    manager.abort(allocation, now=now)
                    return
            self._move(now)
            assert manager.is_ready(allocation)
            manager.on_scheduled(allocation, now=now)
            manager.publish(allocation, done, now=now)
            if done == num_blocks:
                manager.finish(allocation, now=now, outcome=outcome)
                return

    def _move(self, now: float) -> None:
        plan = self.manager.plan(now=now)
        if plan.transfers:
            results = tuple(TransferResult(each.id, True, each.num_blocks, 1e-3) for each in plan.transfers)
            self.manager.apply(Report(plan.epoch, 0, results))


if __name__ == "__main__":
    main()
