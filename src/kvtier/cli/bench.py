"""`kvtier bench`: load test of a running server."""

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
    text = "Measure a running server under load. Reports times to first token and between tokens."
    examples = """
    kvtier bench
    kvtier bench --url http://127.0.0.1:8000 --clients 64 --requests 1000 --disconnect 0.1 --json
    """
    command = add_command(commands, "bench", text, examples, bench)
    option = command.add_argument
    option("--url", default="http://127.0.0.1:8000", help="address of the server; $KVTIER_API_KEY is its key")
    option("--clients", type=int, default=8, metavar="N", help="concurrent clients")
    option("--requests", type=int, default=64, metavar="N", help="total requests")
    option("--max-tokens", type=int, default=64, metavar="N", help="tokens per answer")
    option("--prompt-words", type=int, default=64, metavar="N", help="words per prompt")
    option("--shared-words", type=int, default=48, metavar="N", help="words that all prompts begin with")
    option("--disconnect", type=float, default=0.0, metavar="SHARE", help="share of requests to abandon midway")


def bench(options: argparse.Namespace) -> int:
    """Run the load and print a report. Returns 1 unless all requests succeeded."""
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
    summary = report.summary()
    if options.json:
        print(json.dumps(summary))
    else:
        for name, value in summary.items():
            print(f"{name:<14}  {value}")
    failures = _failures(report)
    if failures:
        print(f"kvtier: of {options.requests} requests, {', '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0


def _failures(report: LoadReport) -> list[str]:
    counts = sorted((status, count) for status, count in report.statuses.items() if status != 200)
    failures = [f"{count} got {f'status {status}' if status else 'no response'}" for status, count in counts]
    return failures + [f"{report.num_incomplete} ended early"] * bool(report.num_incomplete)


def _model(url: str, key: str) -> str:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (urllib.error.URLError, OSError, ValueError, KeyError, IndexError) as error:
        raise UnavailableError(f"no kvtier server at {url}: {error}") from error
