"""Prefill on a GPU: the whole model per length, with bars, and the kernels for the attention of prompt chunks.

python -m benchmarks.prefill_gpu                  also the attention kernels, to choose LONG_LIMITS
python -m benchmarks.prefill_gpu --only default   the model and the bars

The attention is that of Llama-3-8B: 32 heads, 8 KV heads, head_dim 128, blocks of 16 tokens, bfloat16. Rates count the
matrix products of visible keys only, and are compared with a large bf16 matrix product.

The GPU lowers its clock after about 60 ms of matrix products, to stay within its power limit: the rate of the product
falls from 780 to 670 TFLOP/s (H200, measured on 2026-11-20). Product and forward passes are therefore both measured
after half a second of the same work. The share of the product's rate after a pause is printed for comparison.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.engine_gpu import LLAMA3_8B
from benchmarks.random_weights import random_weights
from benchmarks.report import Bar, Row, arguments, at_least, print_table, report
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model import Model
from kvtier.engine.ops import Heads, paged_attention
from kvtier.engine.ops_triton import triton_paged_attention
from kvtier.engine.ops_triton_long import long_attention

CONFIG = dataclasses.replace(LLAMA3_8B, max_positions=32768)
BLOCK_TOKENS, CHUNK, PRODUCT = 16, 2048, 8192
PRODUCT_FLOPS = 2 * PRODUCT**3
WARM_UP_S = 0.5
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BARS = {512: 0.80, 2048: 0.80, 8192: 0.75, 32768: 0.70}
# New tokens and context. The first two are for the check: the keys of the chunk do not begin at a multiple of a tile.
CHECKS = ((700, 2748), (333, 333))
CASES = (
    *((64, 32768), (256, 32768), (512, 512), (512, 2048), (512, 8192), (512, 32768), (2048, 2048), (2048, 8192)),
    *((2048, 32768), (8192, 8192), (8192, 32768), (32768, 32768)),
)


def main() -> None:
    parser = arguments("Prefill of a model, and the attention kernels.")
    parser.add_argument("--only", choices=["default"], help="the model and the bars")
    options = parser.parse_args()
    rows = measure_model()
    bars: list[Bar] = [
        at_least(f"prefill {row['tokens']}, share of the bf16 matrix rate", float(str(row["of rate"])), bar)
        for row, bar in zip(rows, BARS.values(), strict=True)
    ]
    print_table(rows)
    if options.only is None:
        attention = measure_attention()
        print_table(attention)
        rows += attention
    report("prefill_gpu", rows, bars, options.results)


def measure_model() -> list[Row]:
    """Return one row per length: a prompt in one chunk, and in chunks of 2,048 tokens."""
    model = Model(CONFIG, random_weights(CONFIG, DTYPE, DEVICE))
    cache = model.new_cache(CONFIG.max_positions // BLOCK_TOKENS + 1, BLOCK_TOKENS)
    left, right = torch.randn(2, PRODUCT, PRODUCT, device=DEVICE, dtype=DTYPE)
    time.sleep(1)
    peak, rate = (PRODUCT_FLOPS / seconds(lambda: left @ right, 20, warm_up) for warm_up in (0.0, WARM_UP_S))
    print(f"bf16 matrix product: {peak / 1e12:.0f} TFLOP/s after a pause, {rate / 1e12:.0f} sustained\n")
    rows: list[Row] = []
    for length in BARS:
        row: dict[str, object] = {"tokens": length}
        for column, chunk in (("", length), (" in 2k chunks", min(CHUNK, length))):
            batches = chunks(length, chunk)
            rounds = 20 if length <= 2048 else 5 if length <= 8192 else 3
            taken = seconds(lambda: [model.forward(each, cache) for each in batches], rounds, WARM_UP_S)  # noqa: B023
            row |= {f"ms{column}": taken * 1e3, f"of rate{column}": model_flops(length) / taken / rate}
            row |= {f"of rate after a pause{column}": model_flops(length) / taken / peak}
        rows.append(row)
    return rows


def measure_attention() -> list[Row]:
    """Check both kernels against the reference, and measure them. Returns a row per case, in TFLOP/s."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    longest = max(context for _, context in CASES)
    blocks = longest // BLOCK_TOKENS
    shape = (blocks, 2, 2, BLOCK_TOKENS, CONFIG.num_kv_heads, CONFIG.head_dim)
    cache = torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE)[:, 1]
    width = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim
    qkv = torch.randn(longest, width, generator=generator, device=DEVICE, dtype=DTYPE)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    kernels: dict[str, Callable[[Tensor, ForwardBatch], Tensor]] = {
        "paged": lambda q, batch: triton_paged_attention(q, cache, batch),
        "long": lambda q, batch: long_attention(q, cache, batch.block_tables[0], batch.contexts[0]),
    }

    def case(count: int, context: int) -> tuple[Tensor, ForwardBatch]:
        batch = one(SequenceInput([0] * count, context - count, table[: -(-context // BLOCK_TOKENS)]))
        return Heads.split(qkv[:count], CONFIG.num_heads, CONFIG.num_kv_heads).q, batch

    for q, batch in (case(*each) for each in CHECKS):
        expected = paged_attention(q, cache, batch)
        for attend in kernels.values():
            torch.testing.assert_close(attend(q, batch), expected, rtol=3e-2, atol=3e-2)
    rows: list[Row] = []
    for count, context in CASES:
        row: dict[str, object] = {"queries": count, "keys": context}
        q, batch = case(count, context)
        for name, attend in kernels.items():
            taken = seconds(lambda: attend(q, batch), 5)  # noqa: B023
            row[f"{name} TFLOP/s"] = attention_flops(count, context) / taken / 1e12
        rows.append(row)
    return rows


def chunks(length: int, chunk: int) -> list[ForwardBatch]:
    tokens = torch.arange(length).remainder(CONFIG.vocab_size).tolist()
    table = list(range(1, 1 + length // BLOCK_TOKENS))
    return [one(SequenceInput(tokens[at : at + chunk], at, table)) for at in range(0, length, chunk)]


def one(sequence: SequenceInput) -> ForwardBatch:
    return ForwardBatch.build([sequence], BLOCK_TOKENS, DEVICE)


def attention_flops(count: int, context: int) -> float:
    """Return the FLOP of the products with visible keys."""
    return 4.0 * CONFIG.num_heads * CONFIG.head_dim * (count * (context - count) + count * (count + 1) / 2)


def model_flops(tokens: int) -> float:
    attention_dim = 2 * (CONFIG.num_heads + CONFIG.num_kv_heads) * CONFIG.head_dim  # q, k, v and the output
    per_layer = CONFIG.hidden_dim * (attention_dim + 3 * CONFIG.ffn_dim)
    return CONFIG.num_layers * (2.0 * per_layer * tokens + attention_flops(tokens, tokens))


def seconds(task: Callable[[], object], rounds: int, warm_up_s: float = 0.0) -> float:
    """Return the median by CUDA events, after one round and at least `warm_up_s` of warm-up."""
    taken = [_round(task)]
    while sum(taken) < warm_up_s:
        taken.append(_round(task))
    return statistics.median(_round(task) for _ in range(rounds))


def _round(task: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    task()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


if __name__ == "__main__":
    main()
