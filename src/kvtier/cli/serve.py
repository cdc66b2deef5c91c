"""`kvtier serve`."""

from __future__ import annotations

import argparse
import logging
import sys


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`serve`."""
    command = commands.add_parser("serve", help="serve a model over HTTP, as OpenAI does")
    command.add_argument("--model", default="smollm2")
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=int, default=8000)
    command.add_argument("--device", default="cpu")
    command.add_argument("--dtype", default="f32")
    command.add_argument("--blocks", type=int, default=1024)
    command.add_argument("--host-blocks", type=int, default=0)
    command.add_argument("--block-tokens", type=int, default=16)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until told to end."""
    from kvtier.server.config import EngineOptions, ServerConfig
    from kvtier.server.serve import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    engine = EngineOptions(
        options.model, options.device, options.dtype, options.block_tokens, options.blocks, options.host_blocks
    )
    config = ServerConfig(engine, host=options.host, port=options.port)
    return serve(config, ready=lambda address: print(f"kvtier: serving {config.model_name} at {address}", flush=True))
