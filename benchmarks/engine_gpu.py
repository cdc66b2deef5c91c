"""The model on a GPU: prefill compared with the matrix rate, and decode compared with the memory bandwidth.

python -m benchmarks.engine_gpu            random weights of Llama-3-8B's shape: nothing to download

Both limits are measured in the same run. Only the matrix products of a prefill are counted: 2 x weights x tokens, plus
the products of attention. The limit of a decode step is the time to read every weight, and every key and value of the
batch, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from benchmarks.random_weights import random_weights
from benchmarks.report import Bar, Row, arguments, at_least, at_most, print_table, report
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.graph import DecodeGraphs
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.params import SamplingParams
from kvtier.engine.rows import DeviceRows
from kvtier.engine.sampling import RequestSampler

LLAMA3_8B = ModelConfig(
    *("llama", 32, 4096, 14336, 32, 8, 128, 128256, 16384), norm_eps=1e-5, rope=RopeConfig(500000.0)
)
BLOCK_TOKENS, PREFILL, BATCH, CONTEXT, STEPS = 16, 8192, 64, 1024, 24
# Sequences, tokens of each, and the largest time of a captured step compared with the floor.
DECODE = ((1, CONTEXT, 1.32), (BATCH, CONTEXT, 1.32), (256, CONTEXT, 1.32), (16, 32768, 1.1))


def main() -> None:
    options = arguments("The model on the GPU of this machine.").parse_args()
    device = torch.device("cuda")
    config = dataclasses.replace(LLAMA3_8B, max_positions=max(context for _, context, _ in DECODE) + STEPS)
    model = Model(config, random_weights(config, torch.bfloat16, device))
    rows, bars = prefill(model, model.new_cache(PREFILL // BLOCK_TOKENS, BLOCK_TOKENS))
    more_rows, more_bars = decode(model)
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


def decode(model: Model) -> tuple[list[Row], list[Bar]]:
    """Measure decode steps of `DECODE`, and 64 sequences also without a CUDA graph."""
    bandwidth = _bandwidth()
    weights = sum(each.numel() for each in _matrices(model)) * 2
    token_bytes = 2 * LLAMA3_8B.num_layers * LLAMA3_8B.num_kv_heads * LLAMA3_8B.head_dim * 2
    print(f"copying 1 GiB: {bandwidth / 1e9:.0f} GB/s; the weights have {weights / 1e9:.1f} GB")
    rows: list[Row] = []
    bars: list[Bar] = []
    for count, context, limit in DECODE:
        floor = (weights + count * context * token_bytes) / bandwidth
        for name, seconds in _decode_steps(model, count, context).items():
            rows.append({"case": name, "ms": seconds * 1e3, "floor ms": floor * 1e3, "over floor": seconds / floor})
            if name.endswith("CUDA graph"):
                bars.append(at_most(f"decode {count}, {context} tokens, times the floor", seconds / floor, limit))
        torch.cuda.empty_cache()
    print_table(rows)
    return rows, bars


def _bandwidth() -> float:
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    return 2 * source.numel() / _seconds(lambda: source.clone(), 20)


def _decode_steps(model: Model, count: int, context: int) -> dict[str, float]:
    """Return the seconds of steps of `count` sequences with `context` tokens each.

    The captured step also samples and advances its rows, so the context of the last measured step is longer by
    `STEPS` tokens.
    """
    per_sequence = -(-(context + STEPS) // BLOCK_TOKENS)
    cache = model.new_cache(1 + count * per_sequence, BLOCK_TOKENS).normal_()
    tables = torch.arange(count * per_sequence, dtype=torch.int32, device="cuda").view(count, per_sequence) + 1
    rows = DeviceRows(count, per_sequence, count, BLOCK_TOKENS, LLAMA3_8B.vocab_size, cache.device, 1)
    graphs = DecodeGraphs(model, cache, rows, [count])
    greedy = RequestSampler(SamplingParams(temperature=0.0)).resident.tolist()
    rows.tables.front.copy_(tables)
    rows.heads.front.copy_(torch.tensor([[at, context - 1, *greedy] for at in range(count)], device="cuda"))
    inputs = [SequenceInput([at], context - 1, table) for at, table in enumerate(tables.cpu().numpy())]
    batch = _batch(inputs)
    expected = model.logits(model.forward(batch, cache))
    actual, _ = graphs.run(count)
    assert (actual - expected).abs().max() < 0.1, "the captured step computes something else"
    name = f"decode {count}" if context == CONTEXT else f"decode {count}, {context} tokens"
    seconds = {f"{name}, CUDA graph": _seconds(lambda: graphs.run(count), STEPS - 3)}
    if count == BATCH:
        seconds[f"{name}, no graph"] = _seconds(lambda: model.logits(model.forward(batch, cache)), 20)
    return seconds


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
