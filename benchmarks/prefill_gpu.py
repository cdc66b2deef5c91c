"""Prefill on a GPU with each kernel for the attention of prompt chunks, and the whole model, per length.

python -m benchmarks.prefill_gpu                  every variant: use it to choose the constants of the kernels
python -m benchmarks.prefill_gpu --only default   the model as it is by default, and the bars
python -m benchmarks.prefill_gpu --kernels gluon  the experiment of prefill_gluon; a mistake in it can hang the GPU

The attention is that of Llama-3-8B: 32 heads, 8 KV heads, head_dim 128, blocks of 16 tokens, bfloat16. Rates count the
matrix products of visible keys only, and are compared with a bf16 matrix product of the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.engine_gpu import LLAMA3_8B
from benchmarks.random_weights import random_weights
from benchmarks.report import Bar, Row, arguments, at_least, print_table, report
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model import Model
from kvtier.engine.ops import Heads, Ops, paged_attention
from kvtier.engine.ops_triton import TritonOps, triton_paged_attention
from kvtier.engine.ops_triton_long import LongAttention, gather

CONFIG = dataclasses.replace(LLAMA3_8B, max_positions=32768)
BLOCK_TOKENS, CHUNK = 16, 2048
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BARS = {512: 0.80, 2048: 0.80, 8192: 0.75, 32768: 0.70}
LENGTHS = tuple(BARS)
# New tokens and context. The first two are for the check: the keys of the chunk do not begin at a multiple of a tile.
CHECKS = ((700, 2748), (333, 333))
CASES = (
    *((512, 512), (512, 2048), (512, 8192), (512, 32768), (2048, 2048), (2048, 8192), (2048, 32768)),
    *((8192, 8192), (8192, 32768), (32768, 32768)),
)
PAGED = ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2))  # the first is the present tile
KERNELS = ("paged", "tma", "cudnn", "flash")
GLUON = ((64, 128, 2), (64, 64, 4))  # rows of a group, keys, stages
TMA = ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3))
Attend = Callable[[Tensor, Tensor, ForwardBatch], Tensor]


class Variant(TritonOps):
    """The operations on CUDA with one variant of attention for every step."""

    def __init__(self, name: str, tile: tuple[int, ...] | None, granule: int = 512) -> None:
        super().__init__()
        self.name = " ".join([name, *([] if tile is None else ["x".join(map(str, tile))])])
        self.kind = name
        self._tile = tile
        if name in ("tma", "cudnn", "flash"):
            self._dense = LongAttention(name, 1, 1, granule=granule)  # type: ignore[arg-type]
            if tile is not None:
                self._dense = dataclasses.replace(self._dense, tile=tile)  # type: ignore[arg-type]

    def attention(self, q: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
        if self.kind == "paged":
            return triton_paged_attention(q, cache, batch, self._tile)  # type: ignore[arg-type]
        if self.kind == "gluon":
            from benchmarks.prefill_gluon import gluon_attention

            context = batch.contexts[0]
            return gluon_attention(q, *gather(cache, batch.block_tables[0], context, context), *(self._tile or ()))
        return self._dense.attend(q, cache, batch.block_tables[0], batch.contexts[0])

    def attend(self, heads: Heads, cache: Tensor, batch: ForwardBatch) -> Tensor:
        return self.attention(heads.q, cache, batch).flatten(1)


def variants(kernels: Iterable[str]) -> Iterator[Variant]:
    tiles: dict[str, Iterable[tuple[int, ...] | None]] = {"paged": PAGED, "tma": TMA, "gluon": GLUON}
    return (Variant(kernel, tile) for kernel in kernels for tile in tiles.get(kernel, (None,)))


def main() -> None:
    parser = arguments("Prefill with each attention kernel.")
    parser.add_argument("--only", choices=["attention", "default", "model"], help="one part of the benchmark")
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS, "gluon"], default=KERNELS)
    options: argparse.Namespace = parser.parse_args()
    rate = matrix_rate()
    rows: list[Row] = []
    chosen: list[Variant] = []
    if options.only in (None, "attention"):
        found = measure_attention(rate, options.kernels)
        rows += found
        chosen = fastest(found, options.kernels)
    bars: list[Bar] = []
    if options.only != "attention":
        model = Model(CONFIG, random_weights(CONFIG, DTYPE, DEVICE))
        cache = model.new_cache(LENGTHS[-1] // BLOCK_TOKENS + 1, BLOCK_TOKENS)
        found = measure_model(model, cache, rate, chosen if options.only is None else [])
        bars = [
            at_least(f"prefill {row['tokens']}, share of the bf16 matrix rate", float(str(row["of rate"])), bar)
            for row, bar in zip(found, BARS.values(), strict=False)
        ]
        rows += found
        if options.only is None:
            rows += short_prefill(model, cache, rate)
    report("prefill_gpu", rows, bars, options.results)


def matrix_rate() -> float:
    """Return the FLOP per second of a bf16 matrix product."""
    left, right = torch.randn(2, 8192, 8192, device=DEVICE, dtype=DTYPE)
    rate = 2 * 8192**3 / seconds(lambda: left @ right, 20)
    print(f"bf16 matrix product: {rate / 1e12:.0f} TFLOP/s\n")
    return rate


def measure_attention(rate: float, kernels: Iterable[str]) -> list[Row]:
    """Check every variant against the reference, and measure it for every case. Returns one row per variant."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    longest = max(context for _, context in CASES)
    inputs = {"device": DEVICE, "dtype": DTYPE}
    blocks = longest // BLOCK_TOKENS
    cache = torch.randn(blocks, 2, 2, BLOCK_TOKENS, CONFIG.num_kv_heads, CONFIG.head_dim, generator=generator, **inputs)
    width = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim
    qkv = torch.randn(max(count for count, _ in CASES), width, generator=generator, **inputs)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def case(count: int, context: int) -> tuple[Tensor, Tensor, ForwardBatch]:
        batch = one(SequenceInput([0] * count, context - count, table[: -(-context // BLOCK_TOKENS)]))
        return Heads.split(qkv[:count], CONFIG.num_heads, CONFIG.num_kv_heads).q, cache[:, 1], batch

    expected = [paged_attention(*case(*each)) for each in CHECKS]
    rows: list[Row] = []
    for variant in variants(kernels):
        row: dict[str, object] = {"attention, TFLOP/s": variant.name, "first s": 0.0, "error": float("nan")}
        row |= {f"{count}/{context}": float("nan") for count, context in CASES}
        started = time.perf_counter()
        try:
            errors = [
                float((variant.attention(*case(*each)) - right).abs().max())
                for each, right in zip(CHECKS, expected, strict=True)
            ]
            row["first s"], row["error"] = time.perf_counter() - started, max(errors)
            for count, context in CASES:
                q, layer, batch = case(count, context)
                taken = seconds(lambda: variant.attention(q, layer, batch), 5)  # noqa: B023 (called at once)
                row[f"{count}/{context}"] = attention_flops(count, context) / taken / 1e12
        except Exception as error:  # an unsupported call: print it and go on
            print(f"{variant.name}: {type(error).__name__}: {str(error)[:300]}")
        rows.append(row)
        print(
            " ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()), flush=True
        )
    print_table(rows)
    sizes = [8192, 32768] if longest >= 32768 else [longest]
    table_on_device = torch.tensor(table, dtype=torch.int32, device=DEVICE)
    for size in sizes:
        taken = seconds(lambda: gather(cache[:, 1], table_on_device, size, size), 5)  # noqa: B023
        moved = 4 * size * CONFIG.num_kv_heads * CONFIG.head_dim * 2
        print(f"gather of {size} tokens: {taken * 1e6:.0f} us, {moved / taken / 1e9:.0f} GB/s read and written")
    print(f"matrix rate {rate / 1e12:.0f}; error is the largest difference from the reference, bfloat16 allows .03\n")
    return rows


def fastest(rows: Iterable[Row], kernels: Iterable[str]) -> list[Variant]:
    """Return the fastest correct variant of each kind by the sum of the times of all cases; at most 3."""
    by_name = {str(row["attention, TFLOP/s"]): row for row in rows}

    def total(variant: Variant) -> float:
        row = by_name[variant.name]
        if not float(str(row["error"])) < 0.03:
            return float("inf")
        rates = {case: float(str(row[f"{case[0]}/{case[1]}"])) for case in CASES}
        found = sum(attention_flops(*case) / rate for case, rate in rates.items())
        return found if found == found else float("inf")

    kinds: dict[str, Variant] = {}
    for variant in sorted(variants(kernels), key=total):
        if total(variant) < float("inf"):
            kinds.setdefault(variant.kind, variant)
    return list(kinds.values())[:3]


def measure_model(model: Model, cache: Tensor, rate: float, chosen: Iterable[Variant]) -> list[Row]:
    """Measure the default and the chosen variants. Returns one row per length and in the first column the variant."""
    rows: list[Row] = []
    backends: Mapping[str, Ops] = {"default": TritonOps(), **{variant.name: variant for variant in chosen}}
    for name, ops in backends.items():
        changed = Model(CONFIG, model.weights, ops)
        for length in LENGTHS:
            row: dict[str, object] = {"prefill": name, "tokens": length}
            for column, chunk in (("", length), (" in 2k chunks", min(CHUNK, length))):
                batches = chunks(length, chunk)
                rounds = 5 if length <= 8192 else 3 if len(backends) == 1 else 1
                try:
                    taken = seconds(lambda: [changed.forward(each, cache) for each in batches], rounds)  # noqa: B023
                except Exception as error:
                    print(f"{name}, {length} tokens: {type(error).__name__}: {str(error)[:300]}")
                    taken = float("nan")
                row[f"ms{column}"] = taken * 1e3
                row[f"of rate{column}"] = model_flops(length) / taken / rate
            rows.append(row)
        print_table(rows[-len(LENGTHS) :])
    return rows


def short_prefill(model: Model, cache: Tensor, rate: float) -> list[Row]:
    """Measure what limits 512 tokens: the matrix products alone, by library, and the step as a CUDA graph."""
    tokens, layer = LENGTHS[0], model.weights.layers[0]
    rows: list[Row] = []
    before = torch.backends.cuda.preferred_blas_library()
    for library in ("cublas", "cublaslt"):
        try:
            torch.backends.cuda.preferred_blas_library(library)
        except RuntimeError as error:
            print(f"{library}: {error}")
            continue
        for name in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, name).weight
            x = torch.randn(tokens, weight.shape[1], device=DEVICE, dtype=DTYPE)
            taken = seconds(lambda: torch.nn.functional.linear(x, weight), 10)  # noqa: B023
            share = 2 * tokens * weight.numel() / taken / rate
            rows.append({"512 tokens": f"{library} {name}", "us": taken * 1e6, "of rate": share})
    torch.backends.cuda.preferred_blas_library(before)
    try:
        batch = chunks(tokens, tokens)[0]
        model.forward(batch, cache)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.forward(batch, cache)
        taken = seconds(graph.replay, 5)
        share = model_flops(tokens) / taken / rate
        rows.append({"512 tokens": "step as a CUDA graph", "us": taken * 1e6, "of rate": share})
    except Exception as error:
        print(f"CUDA graph of a prefill: {type(error).__name__}: {str(error)[:300]}")
    print_table(rows)
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


def seconds(task: Callable[[], object], rounds: int) -> float:
    """Return the median by CUDA events, after one warm-up round."""
    taken = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        task()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return sorted(taken[1:])[rounds // 2]


if __name__ == "__main__":
    main()
