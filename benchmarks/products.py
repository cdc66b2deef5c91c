"""Integer products compared with exact products on the CPU: greedy tokens of SmolLM2-135M with the right context.

python -m benchmarks.products                      10,000 positions of the documentation; --positions to choose
KVTIER_CPU_ISA=avx2 python -m benchmarks.products  for one instruction set

Both models read the same text. Each step has one token of each of 16 sequences, so that every token is computed in a
step that uses the packed matrices. The most likely next tokens are compared at every position.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.report import Row, arguments, at_least, print_table, report
from kvtier.engine import Model, load_model, load_tokenizer
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.packaged import DEFAULT_MODEL

BLOCK_TOKENS, BATCH = 16, 16
DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    parser = arguments("Integer products compared with exact products.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--positions", type=int, default=10_000)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    length = -(-options.positions // BATCH)
    ids = load_tokenizer(options.model).encode("".join(path.read_text() for path in sorted(DOCS.glob("*.md"))))
    texts = [ids[i * length : (i + 1) * length] for i in range(BATCH)]
    exact, rounding = (Reader(load_model(options.model, products=each), length) for each in ("exact", "integer"))
    same, gaps, errors = 0, [], []
    for position in range(length):
        tokens = [text[position] for text in texts]
        expected, actual = (each.step(tokens, position) for each in (exact, rounding))
        top = expected.topk(2).values
        differs = expected.argmax(-1) != actual.argmax(-1)
        same += int((~differs).sum())
        gaps += (top[:, 0] - top[:, 1])[differs].tolist()
        errors.append((expected - actual).abs().mean().item())
    total = length * BATCH
    row: Row = {
        "positions": total,
        "same": same,
        "share": same / total,
        "mean error of logits": sum(errors) / length,
        "largest lead of a changed token": max(gaps, default=0.0),
        "threads": options.threads,
        "isa": os.environ.get("KVTIER_CPU_ISA", "best"),
    }
    print_table([row])
    report("products", [row], [at_least("greedy tokens as with exact products", same / total, 0.99)], options.results)


class Reader:
    """A model and the cache of the sequences that it reads."""

    def __init__(self, model: Model, length: int) -> None:
        self._model = model
        self._blocks = -(-length // BLOCK_TOKENS)
        self._cache = model.new_cache(BATCH * self._blocks, BLOCK_TOKENS)

    def step(self, tokens: list[int], position: int) -> torch.Tensor:
        """Return the logits after the next token of every sequence."""
        tables = [range(i * self._blocks, (i + 1) * self._blocks) for i in range(BATCH)]
        inputs = [SequenceInput([token], position, table) for token, table in zip(tokens, tables, strict=True)]
        batch = ForwardBatch.build(inputs, BLOCK_TOKENS, torch.device("cpu"))
        return self._model.logits(self._model.forward(batch, self._cache))


if __name__ == "__main__":
    main()
