"""The model on the CPU compared with transformers on the same weights: SmolLM2-135M in float32.

python -m benchmarks.engine_model                one thread per core; --threads to choose
python -m benchmarks.engine_model --random       random weights of the same shape, for machines without the model

Both compute the same tokens from the same float32 weights and alternate, so that noise affects both. The time of a case
is the best of several rounds. Decode runs at a context of 128 tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.random_weights import random_weights
from benchmarks.report import Bar, Row, arguments, at_least, best, print_table, report
from kvtier.engine import Model, load_model
from kvtier.engine.forward import ForwardBatch, SequenceInput
from kvtier.engine.model_config import ModelConfig, RopeConfig
from kvtier.engine.native import pack
from kvtier.engine.weights import Linear

BLOCK_TOKENS, CONTEXT, BATCH = 16, 128, 16
PREFILLS = (512, 2048)


def main() -> None:
    parser = arguments("The model on the CPU, compared with transformers.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--random", action="store_true", help="random weights instead of the packaged model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, bars = measure(random_model() if options.random else load_model(), options.rounds)
    for row in rows:
        row |= {"threads": options.threads, "isa": os.environ.get("KVTIER_CPU_ISA", "best")}
        row["weights"] = "random" if options.random else "SmolLM2-135M"
    report("engine_model", rows, bars, options.results)


def measure(model: Model, rounds: int) -> tuple[list[Row], list[Bar]]:
    """Measure prefill, decode of one sequence, and decode of sixteen."""
    peer = transformers_model(model)
    ours, theirs = our_tasks(model), their_tasks(peer)
    seconds: dict[str, float] = {}
    for case, tokens in CASES.items():
        few = 4 * rounds if tokens <= BATCH else rounds
        times = best({"kvtier": ours[case], "transformers": theirs[case]}, few)
        seconds |= {f"{case}, {name}": value for name, value in times.items()}
    rates = {name: CASES[name.rsplit(", ", 1)[0]] / value for name, value in seconds.items()}
    rows: list[Row] = [
        {"case": case, "kvtier tok/s": rates[f"{case}, kvtier"], "transformers tok/s": rates[f"{case}, transformers"]}
        for case in CASES
    ]
    print_table(rows)

    def times(case: str) -> float:
        return rates[f"{case}, kvtier"] / rates[f"{case}, transformers"]

    bars = [at_least(f"prefill {length}, times transformers", times(f"prefill {length}"), 1.0) for length in PREFILLS]
    bars.append(at_least("decode of one, times transformers", times("decode 1"), 1.5))
    # measure the share again, alternating: the machine may have changed between the cases above
    both = best({case: ours[case] for case in ("prefill 512", f"decode {BATCH}")}, 2 * rounds)
    share = BATCH / both[f"decode {BATCH}"] / (512 / both["prefill 512"])
    bars.append(at_least(f"decode of {BATCH}, share of the prefill rate", share, 0.5))
    return rows, bars


def random_model() -> Model:
    """Return a model with the shape and the quantisation of SmolLM2-135M: Q4_1 matrices and a Q8_0 embedding."""
    config = ModelConfig("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, rope=RopeConfig(1e5), tied_embeddings=True)
    plain = random_weights(config, torch.float32, torch.device("cpu"))
    random = np.random.default_rng(0)

    def quantised(linear: Linear, kind: str = "Q4_1") -> Linear:
        rows, columns = linear.weight.shape
        if kind == "Q4_1":
            factors = np.broadcast_to(np.float16([0.008, -0.06]), (rows, columns // 32, 2))
            elements = random.integers(0, 256, (rows, columns // 32, 16), np.uint8)
            values = np.concatenate([elements & 15, elements >> 4], axis=2) * factors[..., :1] + factors[..., 1:]
        else:
            factors = np.broadcast_to(np.float16([0.0005]), (rows, columns // 32, 1))
            elements = random.integers(-127, 128, (rows, columns // 32, 32), np.int8)
            values = elements * factors
        stored = np.concatenate([np.ascontiguousarray(factors).view(np.uint8), elements.view(np.uint8)], axis=2)
        weight = torch.from_numpy(values.astype(np.float32).reshape(rows, columns))
        return replace(linear, weight=weight, packed=pack(kind, torch.from_numpy(stored.reshape(rows, -1))))

    names = ("qkv", "output", "gate_up", "down")
    layers = tuple(replace(each, **{name: quantised(getattr(each, name)) for name in names}) for each in plain.layers)
    head = quantised(plain.head, "Q8_0")
    return Model(config, replace(plain, embedding=head.weight, layers=layers, head=head))


CASES = {**{f"prefill {length}": length for length in PREFILLS}, "decode 1": 1, f"decode {BATCH}": BATCH}
"""Name of each case: tokens it computes."""


def our_tasks(model: Model) -> dict[str, Callable[[], object]]:
    """Return our tasks; like a step, each also builds its batch."""
    blocks = CONTEXT // BLOCK_TOKENS + 1
    cache = model.new_cache(max(max(PREFILLS) // BLOCK_TOKENS, BATCH * blocks), BLOCK_TOKENS)

    def step(sequences: list[SequenceInput]) -> torch.Tensor:
        batch = ForwardBatch.build(sequences, BLOCK_TOKENS, torch.device("cpu"))
        return model.logits(model.forward(batch, cache)).argmax(-1)

    def prefill(length: int) -> Callable[[], object]:
        return lambda: step([SequenceInput(_tokens(length), 0, range(length // BLOCK_TOKENS))])

    def decode(count: int) -> Callable[[], object]:
        tables = [range(i * blocks, (i + 1) * blocks) for i in range(count)]
        return lambda: step([SequenceInput([5], CONTEXT, table) for table in tables])

    tasks = {f"prefill {length}": prefill(length) for length in PREFILLS}
    return {**tasks, "decode 1": decode(1), f"decode {BATCH}": decode(BATCH)}


def their_tasks(peer: Any) -> dict[str, Callable[[], object]]:
    """Return tasks of transformers with its own cache and the last row of logits, without generate()."""

    def prefill(length: int) -> Callable[[], object]:
        ids = torch.tensor([_tokens(length)])
        return lambda: _inferred(peer, ids, logits_to_keep=1, use_cache=True).logits.argmax(-1)

    def decode(count: int) -> Callable[[], object]:
        ids = torch.tensor([_tokens(CONTEXT)] * count)
        past = _inferred(peer, ids, use_cache=True).past_key_values
        token = torch.full((count, 1), 5)

        def step() -> object:
            out = _inferred(peer, token, past_key_values=past, use_cache=True).logits.argmax(-1)
            past.crop(-1)  # remove this token again
            return out

        return step

    tasks = {f"prefill {length}": prefill(length) for length in PREFILLS}
    return {**tasks, "decode 1": decode(1), f"decode {BATCH}": decode(BATCH)}


@torch.inference_mode()
def _inferred(peer: Any, ids: torch.Tensor, **options: Any) -> Any:
    return peer(ids, **options)


def transformers_model(model: Model) -> Any:
    """Return a Llama of transformers with these weights and its default (sdpa) attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, weights = model.config, model.weights
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rope_theta=config.rope.theta,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied_embeddings,
        )
    ).eval()
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.weight.split([q_dim, kv_dim, kv_dim])
        gate, up = layer.gate_up.weight.chunk(2)
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate}
        parts |= {"self_attn.o_proj": layer.output.weight, "mlp.up_proj": up, "mlp.down_proj": layer.down.weight}
        parts |= {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm}
        state |= {f"model.layers.{index}.{name}.weight": value for name, value in parts.items()}
    left = peer.load_state_dict(state, strict=False)
    assert not left.unexpected_keys, left
    assert set(left.missing_keys) <= {"lm_head.weight"}, left
    peer.tie_weights()
    return peer


def _tokens(length: int) -> list[int]:
    return [100 + i % 40000 for i in range(length)]


if __name__ == "__main__":
    main()
