"""Stop and restart a server: the time to first token of an old conversation before and after.

python -m benchmarks.restart                     SmolLM2-135M, a conversation of about 1,500 tokens

`kvtier serve --disk` starts with an empty folder and gets a request. SIGTERM saves the cache and ends the server. Then
the server starts again and gets the same conversation with one more turn. Both are the first request of their process.
"cold again" is the second start with an empty folder, which is the cost of a restart without a disk tier.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

import httpx

from benchmarks.load import Server
from benchmarks.report import Row, arguments, at_least, print_table, report

WORDS = "The harbour master wrote the names of ships and the weight of their cargo into a long book every evening. "


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=70, help="sentences of the conversation")
    options = parser.parse_args()
    old = [{"role": "user", "content": WORDS * options.repeat}]
    later = [*old, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "What did he write?"}]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder) / "kv"
        for number in range(options.rounds):
            shutil.rmtree(disk, ignore_errors=True)
            for start, messages in (("first", old), ("second, warm", later)):
                rows.append({"round": number, "start": start, **_ask(folder, disk, messages)})
            shutil.rmtree(disk)
            rows.append({"round": number, "start": "second, cold again", **_ask(folder, disk, later)})
    print_table(rows)
    ttft = {
        start: statistics.median(float(str(row["ttft ms"])) for row in rows if row["start"] == start)
        for start in ("first", "second, warm", "second, cold again")
    }
    bars = [
        at_least("TTFT of the first start over that of the second", ttft["first"] / ttft["second, warm"], 3),
        at_least("TTFT without the disk over that with it", ttft["second, cold again"] / ttft["second, warm"], 3),
    ]
    report("restart", rows, bars, options.results)


def _ask(folder: str, disk: Path, messages: list[dict[str, str]]) -> dict[str, float]:
    """Start a server, send one request, stop the server."""
    server = Server(Path(folder) / "log", "--disk", str(disk), "--disk-bytes", "4GiB")
    try:
        body = {"model": server.model, "messages": messages, "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).raise_for_status()
        usage = answer.json()["usage"]
        recent = server.state()["recent"][0]
    finally:
        server.stop()
    return {
        "tokens": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "ttft ms": round(recent["ttft_seconds"] * 1e3, 1),
    }


if __name__ == "__main__":
    main()
