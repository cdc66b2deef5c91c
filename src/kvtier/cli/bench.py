"""`kvtier bench`: load test for a running server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from kvtier.cli.parser import Commands, add_command, progress_bar
from kvtier.errors import ArgumentError, UnavailableError


def add(commands: Commands) -> None:
    text = "Measure a running server under load. Reports the time to first token and the time between tokens."
    examples = """
    kvtier bench
    kvtier bench --url http://127.0.0.1:8000 --clients 64 --requests 1000 --disconnect 0.1 --json
    """
    command = add_command(commands, "bench", text, examples, bench)
    option = command.add_argument
    option("--url", default="http://127.0.0.1:8000", help="server address; $KVTIER_API_KEY contains its API key")
    option("--clients", type=int, default=8, metavar="N", help="concurrent clients")
    option("--requests", type=int, default=64, metavar="N", help="total requests")
    option("--max-tokens", type=int, default=64, metavar="N", help="tokens per answer")
    option("--prompt-words", type=int, default=64, metavar="N", help="words per prompt")
    option("--shared-words", type=int, default=48, metavar="N", help="initial words that are the same in all prompts")
    option("--disconnect", type=float, default=0.0, metavar="SHARE", help="share of requests to cancel midway")


def bench(options: argparse.Namespace) -> int:
    from kvtier.server.load import LoadOptions, run_load

    names = ("clients", "requests", "max_tokens", "prompt_words")
    for name in names:
        if (number := getattr(options, name)) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least 1, got {number}")
    if urlsplit(options.url).scheme != "http":
        raise ArgumentError(f"--url must begin with http://, got {options.url}")
    key = os.environ.get("KVTIER_API_KEY", "")
    load = LoadOptions(
        options.url,
        _model(options.url, key),
        shared_words=min(options.shared_words, options.prompt_words),
        disconnect_share=options.disconnect,
        key=key,
        **{name: getattr(options, name) for name in names},
    )
    with progress_bar(options.requests, "requests") as update:
        report = asyncio.run(run_load(load, lambda now: update(now.statuses.total(), f"{now.num_tokens} tokens")))
    summary = report.summary()
    if options.json:
        print(json.dumps(summary))
    else:
        for name, value in summary.items():
            print(f"{name:<14}  {value}")
    counts = sorted((status, count) for status, count in report.statuses.items() if status != 200)
    failures = [f"{count} got {f'status {status}' if status else 'no response'}" for status, count in counts]
    if report.num_incomplete:
        failures.append(f"{report.num_incomplete} ended early")
    if failures:
        print(f"kvtier: of {options.requests} requests, {', '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0


def _model(url: str, key: str) -> str:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        hint = "; set KVTIER_API_KEY to the API key of the server" if error.code == 401 else ""
        raise UnavailableError(f"{request.full_url} returned status {error.code} ({error.reason}){hint}") from error
    except (urllib.error.URLError, OSError, ValueError, KeyError, IndexError) as error:
        raise UnavailableError(f"no kvtier server at {url}: {error}") from error
