"""Options of the commands that run a model, and the engine made from them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvtier.cli.parser import Parser

if TYPE_CHECKING:
    from kvtier.server.config import EngineOptions

_POLICIES = ("lru", "fifo", "arc", "s3fifo", "cost")
_WRITES = ("write_through", "write_through_selective", "write_back")


def add_engine_options(command: Parser) -> None:
    """Which model, where, and how large its cache is."""
    add = command.add_argument
    add("--model", default="smollm2", help="a Hugging Face folder, a .gguf file, or smollm2, which a package carries")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ..")
    add("--dtype", default="f32", help="f32, bf16 or f16")
    add("--block-tokens", type=int, default=16, help="tokens in a block")
    add("--blocks", type=int, default=1024, help="blocks of KV in the cache")
    add("--host-blocks", type=int, default=0, help="blocks of KV in host memory, for what is evicted")
    add("--disk", default="", metavar="FOLDER", help="keep blocks in this folder, too, also over restarts")
    add("--disk-bytes", default="8GiB", help="of all files in it")
    add("--shared", action="append", default=[], metavar="URL", help="a store that others use, too; may be repeated")
    add("--kv-shards", type=int, default=0, help="objects of a stored block, by KV heads; 0: as many as ranks")
    add("--policy", default="lru", choices=_POLICIES, help="whose blocks are evicted first, in the memory tiers")
    add("--write", default=_WRITES[0], choices=_WRITES, help="when blocks are copied to the tier below")
    add("--wait-seconds", type=float, default=5.0, help="the most that a request waits for its blocks from stores")
    add("--always-load", action="store_true", help="load cached blocks also where computing them is faster")
    add("--tensor-parallel", type=int, default=1, metavar="RANKS", help="processes that share the model's heads")
    add("--invariant", action="store_true", help="the same answer, bit for bit, whatever else is asked; slower")
    add("--draft-tokens", type=int, default=0, help="guess so many tokens from what was written before")
    add("--threads", type=int, default=0, help="of torch; 0 leaves the choice to the command")


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """As the engine process takes them."""
    from kvtier.server.config import EngineOptions, TierOptions

    given = {**vars(options), "shared": tuple(options.shared)}
    tiers = TierOptions(**{name: given[name] for name in TierOptions.__dataclass_fields__})
    names = EngineOptions.__dataclass_fields__.keys() & given.keys()
    return EngineOptions(**{name: given[name] for name in names}, tiers=tiers)
