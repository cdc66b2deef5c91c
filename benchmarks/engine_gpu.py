"""The model on a GPU: prefill compared with the matrix rate, and decode compared with the memory bandwidth.

python -m benchmarks.engine_gpu            random weights of Llama-3-8B's shape: nothing to download

Both limits are measured in the same run. Only the matrix products of a prefill are counted: 2 x weights x tokens, plus
the products of attention. The limit of a decode step is the time to read every weight, and every key and value of the
batch, once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.random_weights import random_weights
from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.graph import DecodeGraphs
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig

LLAMA3_8B = ModelConfig(
    *("llama", 32, 4096, 14336, 32, 8, 128, 128256, 16384), norm_eps=1e-5, rope=RopeConfig(500000.0)
)
BLOCK_TOKENS, PREFILL, BATCH, CONTEXT = 16, 8192, 64, 1024


def main() -> None:
    options = arguments("The model on the GPU of this machine.").parse_args()
    device = torch.device("cuda")
    model = Model(LLAMA3_8B, random_weights(LLAMA3_8B, torch.bfloat16, device))
    cache = model.new_cache(BATCH * CONTEXT // BLOCK_TOKENS + 1, BLOCK_TOKENS)
    rows, bars = prefill(model, cache)
    more_rows, more_bars = decode(model, cache)
    report("engine_gpu", rows + more_rows, bars + more_bars, options.results)


def prefill(model: Model, cache: torch.Tensor) -> tuple[list[Row], list[Bar]]:
    """Measure one prompt of 8k tokens, whole and in chunks of 2k, and a bf16 matrix product."""
    tokens = torch.arange(PREFILL).remainder(LLAMA3_8B.vocab_size).tolist()
    table = list(range(PREFILL // BLOCK_TOKENS))
    whole = [_batch([SequenceInput(tokens, 0, table)])]
    chunk = 2048
    chunks = [_batch([SequenceInput(tokens[at : at + chunk], at, table)]) for at in range(0, PREFILL, chunk)]
    left, right = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / _seconds(lambda: left @ right, 20)
    rows: list[Row] = [{"case": "bf16 matrix product", "ms": 0.0, "TFLOP/s": rate / 1e12, "of matrix rate": 1.0}]
    for name, batches in (("prefill 8k", whole), ("prefill 8k in 2k chunks", chunks)):
        seconds = _seconds(lambda batches=batches: [model.forward(each, cache) for each in batches], 5)
        reached = _prefill_flops(PREFILL) / seconds
        rows.append({"case": name, "ms": seconds * 1e3, "TFLOP/s": reached / 1e12, "of matrix rate": reached / rate})
    print_table(rows)
    return rows, [at_least("prefill 8k, share of the bf16 matrix rate", float(str(rows[1]["of matrix rate"])), 0.5)]


def decode(model: Model, cache: torch.Tensor) -> tuple[list[Row], list[Bar]]:
    """Measure a decode step of 64 sequences of 1,024 tokens, with and without a CUDA graph."""
    per_sequence = CONTEXT // BLOCK_TOKENS
    tables = [list(range(1 + i * per_sequence, 1 + (i + 1) * per_sequence)) for i in range(BATCH)]
    batch = _batch([SequenceInput([i], CONTEXT - 1, table) for i, table in enumerate(tables)])
    graphs = DecodeGraphs(model, cache, per_sequence, [BATCH])
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    bandwidth = 2 * source.numel() / _seconds(lambda: source.clone(), 20)
    weights = sum(each.numel() for each in _matrices(model)) * 2
    token_bytes = 2 * LLAMA3_8B.num_layers * LLAMA3_8B.num_kv_heads * LLAMA3_8B.head_dim * 2
    read = weights + BATCH * CONTEXT * token_bytes
    floor = read / bandwidth
    expected = model.logits(model.forward(batch, cache))
    actual = graphs.logits(batch)
    assert (actual - expected).abs().max() < 0.1, "the captured step computes something else"
    seconds = {
        "decode 64, CUDA graph": _seconds(lambda: graphs.logits(batch), 20),
        "decode 64, no graph": _seconds(lambda: model.logits(model.forward(batch, cache)), 20),
    }
    rows: list[Row] = [
        {"case": name, "ms": value * 1e3, "floor ms": floor * 1e3, "over floor": value / floor}
        for name, value in seconds.items()
    ]
    print_table(rows)
    print(f"copying 1 GiB: {bandwidth / 1e9:.0f} GB/s; a step reads {read / 1e9:.1f} GB")
    over = seconds["decode 64, CUDA graph"] / floor
    return rows, [at_most("decode 64, times the bandwidth floor", over, 1.3)]


def _prefill_flops(tokens: int) -> float:
    config = LLAMA3_8B
    attention_dim = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim  # q, k, v and the output
    per_layer = config.hidden_dim * (attention_dim + 3 * config.ffn_dim)
    attention = 4 * config.num_heads * config.head_dim * tokens * (tokens + 1) / 2
    return config.num_layers * (2.0 * per_layer * tokens + attention)


def _matrices(model: Model) -> list[torch.Tensor]:
    weights = model.weights
    layers = [each.weight for layer in weights.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [*layers, weights.head.weight]


def _batch(sequences: list[SequenceInput]) -> ForwardBatch:
    return ForwardBatch.build(sequences, BLOCK_TOKENS, torch.device("cuda"))


def _seconds(task: Callable[[], object], rounds: int) -> float:
    """Return the median by CUDA events, after two warm-up rounds."""
    taken = []
    for attempt in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        task()
        end.record()
        end.synchronize()
        if attempt >= 2:
            taken.append(begin.elapsed_time(end) / 1e3)
    return sorted(taken)[len(taken) // 2]


if __name__ == "__main__":
    main()
