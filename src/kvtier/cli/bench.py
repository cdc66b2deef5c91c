"""`kvtier bench`: put load on a server and say how it bore it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvtier.cli.parser import Commands, ProgressLine, add_command
from kvtier.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    from kvtier.server.load import LoadReport


def add(commands: Commands) -> None:
    """`bench`."""
    text = "Put load on a running server: clients that stream, some of which leave; times to first token and gaps."
    examples = """
    kvtier bench
    kvtier bench --url http://127.0.0.1:8000 --clients 64 --requests 1000 --disconnect 0.1 --json
    """
    command = add_command(commands, "bench", text, examples, bench)
    add_option = command.add_argument
    add_option("--url", default="http://127.0.0.1:8000", help="of the server; its key in $KVTIER_API_KEY")
    add_option("--clients", type=int, default=8, help="at the same time")
    add_option("--requests", type=int, default=64, help="in all")
    add_option("--max-tokens", type=int, default=64, help="of each answer")
    add_option("--prompt-words", type=int, default=64, help="of each prompt")
    add_option("--shared-words", type=int, default=48, help="of these, the same in all prompts")
    add_option("--disconnect", type=float, default=0.0, help="share of the requests that are left in the middle")


def bench(options: argparse.Namespace) -> int:
    """1 unless everybody was answered."""
    from kvtier.server.load import LoadOptions, run_load

    for name in ("clients", "requests", "max_tokens", "prompt_words"):
        if (number := getattr(options, name)) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least 1, got {number}")
    if urlsplit(options.url).scheme != "http":
        raise ArgumentError(f"--url must begin with http://, got {options.url}")
    key = os.environ.get("KVTIER_API_KEY", "")
    load = LoadOptions(
        options.url,
        _model(options.url, key),
        options.clients,
        options.requests,
        max_tokens=options.max_tokens,
        prompt_words=options.prompt_words,
        shared_words=min(options.shared_words, options.prompt_words),
        disconnect_share=options.disconnect,
        key=key,
    )
    with ProgressLine(options.requests, "requests") as bar:
        report = asyncio.run(
            run_load(load, lambda now: bar.update(sum(now.statuses.values()), f"{now.num_tokens} tokens"))
        )
    told = report.summary()
    if options.json:
        print(json.dumps(told))
    else:
        for name, value in told.items():
            print(f"{name:<14}  {value}")
    wrong = _wrong(report)
    if wrong:
        print(f"kvtier: of {options.requests} requests {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _wrong(report: LoadReport) -> list[str]:
    """How many got what instead of an answer."""
    counts = sorted((status, count) for status, count in report.statuses.items() if status != 200)
    told = [f"{count} got {f'status {status}' if status else 'no answer'}" for status, count in counts]
    return told + [f"{report.num_incomplete} were cut off"] * bool(report.num_incomplete)


def _model(url: str, key: str) -> str:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (urllib.error.URLError, OSError, ValueError, KeyError, IndexError) as error:
        raise UnavailableError(f"no kvtier server answers at {url}: {error}") from error
