"""Options of the commands that run a model."""

from __future__ import annotations

import argparse
from typing import Any

from kvtier.cli.parser import Parser
from kvtier.server.config import EngineOptions, TierOptions

_POLICIES = ("lru", "fifo", "arc", "s3fifo", "cost")
_WRITES = ("write_through", "write_through_selective", "write_back")


def add_engine_options(command: Parser) -> None:
    """Add the options of EngineOptions and TierOptions, with their defaults."""
    add = command.add_argument_group("model").add_argument
    add("--model", default="smollm2", help="Hugging Face folder, .gguf file, or the packaged model smollm2")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--dtype", default="f32", help="f32, bf16 or f16")
    add("--tensor-parallel", type=int, default=1, metavar="RANKS", help="processes that share the model's heads")
    add("--invariant", action="store_true", help="make answers independent of the other requests of a batch; slower")
    add("--draft-tokens", type=int, default=0, metavar="N", help="tokens to draft per step by n-gram lookup; 0: off")
    add("--threads", type=int, default=0, metavar="N", help="threads of torch; 0: automatic")
    add = command.add_argument_group("cache").add_argument
    add("--block-tokens", type=int, default=16, metavar="N", help="tokens per block")
    add("--blocks", type=int, default=1024, metavar="N", help="blocks in device memory")
    add("--host-blocks", type=int, default=0, metavar="N", help="blocks in host memory; 0: no host tier")
    add("--disk", default="", metavar="FOLDER", help="folder of the disk tier; it survives restarts")
    add("--disk-bytes", default="8GiB", metavar="SIZE", help="size of the disk tier")
    add("--shared", action="append", default=[], metavar="URL", help="store shared with other servers; repeatable")
    add("--kv-shards", type=int, default=0, metavar="N", help="objects per stored block, by KV heads; 0: one per rank")
    add("--policy", default="lru", choices=_POLICIES, help="eviction policy of the memory tiers")
    add("--write", default=_WRITES[0], choices=_WRITES, help="when to copy blocks to the next tier")
    add("--wait-seconds", type=float, default=5.0, metavar="SECONDS", help="longest wait for blocks from stores")
    add("--always-load", action="store_true", help="load cached blocks even if computing them is faster")


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """Return the options of the engine process."""
    values: dict[str, Any] = {**vars(options), "shared": tuple(options.shared)}
    tiers = TierOptions(**{name: values[name] for name in TierOptions.__dataclass_fields__})
    names = EngineOptions.__dataclass_fields__.keys() & values.keys()
    return EngineOptions(**{name: values[name] for name in names}, tiers=tiers)
