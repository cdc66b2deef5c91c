"""Write traces in Mooncake's format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import zstandard

from kvtier.errors import ArgumentError
from kvtier.replay import TRACE_BLOCK_TOKENS, TraceRequest


def write_trace(requests: Iterable[TraceRequest], path: str | Path) -> int:
    """Write requests in Mooncake's format, compressed if the suffix is .gz or .zst. Return the number of requests."""
    lines = []
    for request in requests:
        if request.block_tokens != TRACE_BLOCK_TOKENS:
            raise ArgumentError(
                f"Mooncake's format needs blocks of {TRACE_BLOCK_TOKENS} tokens, got {request.block_tokens}"
            )
        record = {
            "timestamp": round(request.timestamp_ms),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.hash_ids),
        }
        lines.append(json.dumps(record) + "\n")
    data = "".join(lines).encode()
    match Path(path).suffix:
        case ".gz":
            data = gzip.compress(data)
        case ".zst":
            data = zstandard.ZstdCompressor().compress(data)
    Path(path).write_bytes(data)
    return len(lines)
