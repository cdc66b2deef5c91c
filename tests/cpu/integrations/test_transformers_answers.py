"""`generate` returns the same tokens with and without a PrefixCache. KVTIER_SOAK multiplies the number of cases."""

from __future__ import annotations

import os

import pytest
import torch

from kvtier.integrations.transformers import PrefixCache, PrefixDynamicCache, PrefixStaticCache
from transformers_models import KINDS, RandomCases, greedy, make_model, padded, prompt, shared_model

SOAK = int(os.environ.get("KVTIER_SOAK", "1"))
CASES = 4 * SOAK


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_generate_with_prefix_cache_equals_generate_without(kind, block_tokens, tmp_path):
    """Compare tokens for shared prefixes, padding, sampling, static caches, crops and second turns."""
    model = shared_model(kind)
    with PrefixCache(
        model, f"disk:{tmp_path}?bytes=200MiB&free=0", host_bytes="16MiB", block_tokens=block_tokens
    ) as prefix:
        cases = RandomCases(model, prefix, block_tokens, seed=KINDS.index(kind) * 100 + block_tokens)
        for _ in range(CASES):
            cases.run()
    assert cases.counts.num_cases == CASES
    assert cases.counts.num_ties <= CASES // 10  # answers that differ only because two logits are nearly equal
    print(f"{kind}, blocks of {block_tokens}: {cases.counts}")  # noqa: T201


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_begin_with_any_hit_length_equals_generate(attention):
    """Cache every possible number of prompt tokens, in blocks of one token."""
    model = make_model("llama", attn_implementation=attention)
    ids = prompt(20)
    expected = greedy(model, {"input_ids": ids})
    for num_known in range(21):
        with PrefixCache(model, host_bytes="1MiB", block_tokens=1) as prefix:
            if num_known:
                prefix.generate(ids[:, :num_known], max_new_tokens=1, do_sample=False)
            cache = prefix.begin(ids)
            assert cache.hit_tokens == (min(num_known, 19),)
            assert cache.get_seq_length() == min(num_known, 19)
            assert torch.equal(greedy(model, {"input_ids": ids}, past_key_values=cache), expected)


def test_logits_after_cached_prefix_are_close_to_prefill():
    """The logits after a cached prefix equal the logits after a prefill of the whole prompt, except for rounding."""
    model, ids = shared_model("qwen3"), prompt(40)
    with PrefixCache(model, host_bytes="1MiB", block_tokens=8) as prefix, torch.no_grad():
        plain = model(input_ids=ids).logits[:, -1]
        model(input_ids=ids, past_key_values=prefix.begin(ids))
        cache = prefix.begin(ids)
        assert cache.hit_tokens == (32,)
        cached = model(input_ids=ids[:, 32:], past_key_values=cache).logits[:, -1]
    assert torch.allclose(plain, cached, atol=1e-5)


def test_begin_with_unequal_hits_uses_common_columns():
    """Two rows have different padding and different hits. Only columns that are hits in both rows are reused."""
    model = shared_model("llama")
    first, second = prompt(30, 1)[0].tolist(), prompt(22, 2)[0].tolist()
    with PrefixCache(model, host_bytes="1MiB", block_tokens=4) as prefix:
        prefix.generate(torch.tensor([first]), max_new_tokens=1)
        prefix.generate(torch.tensor([second[:13]]), max_new_tokens=1)
        inputs = padded([first, second])
        cache = prefix.begin(**inputs)
        assert cache.hit_tokens == (20, 12)  # the second row has 8 columns of padding and 12 tokens in the cache
        assert torch.equal(greedy(model, inputs, past_key_values=cache), greedy(model, inputs))


def test_completion_is_reused_in_the_next_turn():
    """The KV of a completion is saved too. The last token of the completion has no KV."""
    model = shared_model("gemma3")
    with PrefixCache(model, host_bytes="1MiB", block_tokens=4) as prefix:
        turn = prefix.generate(prompt(10), max_new_tokens=11, do_sample=False)
        cache = prefix.begin(torch.cat((turn, prompt(3, 5)), dim=1))
        assert cache.hit_tokens == (20,)


def test_begin_max_length_returns_a_static_cache():
    model, ids = shared_model("mistral-sliding"), prompt(30)
    with PrefixCache(model, host_bytes="1MiB", block_tokens=4) as prefix:
        assert isinstance(prefix.begin(ids), PrefixDynamicCache)
        expected = prefix.generate(ids, max_new_tokens=6, do_sample=False)
        cache = prefix.begin(ids, max_length=36)
        assert isinstance(cache, PrefixStaticCache)
        assert cache.hit_tokens == (28,)
        assert torch.equal(greedy(model, {"input_ids": ids}, 6, past_key_values=cache), expected)


def test_copied_cache_is_not_saved():
    """PrefixCache does not record the tokens of a copied cache, so it does not save the blocks of the copy."""
    import copy

    model, ids = shared_model("gemma3"), prompt(12)
    with PrefixCache(model, host_bytes="1MiB", block_tokens=4) as prefix:
        greedy(model, {"input_ids": ids}, past_key_values=copy.deepcopy(prefix.begin(ids)))
        assert prefix.begin(ids).hit_tokens == (0,)


def test_reordered_rows_of_cache_are_not_saved():
    """After an exchange of rows, PrefixCache saves no more blocks of this cache, because it would store wrong KV."""
    model = shared_model("llama")
    ids = prompt(9, rows=2)
    with PrefixCache(model, host_bytes="1MiB", block_tokens=4) as prefix, torch.no_grad():
        cache = prefix.begin(ids)
        model(input_ids=ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        more = prompt(7, 3, rows=2)
        model(input_ids=more, past_key_values=cache)
        for row in range(2):
            turn = torch.cat((ids[row], more[row], prompt(2, 4)[0]))[None]
            assert prefix.begin(turn).hit_tokens == (8,)  # the blocks that were saved before the exchange
