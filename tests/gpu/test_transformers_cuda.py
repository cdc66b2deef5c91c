"""The prefix cache for transformers with a model on a GPU: staging on the device and pinned host memory."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_prefix_cache_on_cuda_equals_generate(kind, tmp_path):
    pytest.importorskip("transformers")
    from kvtier.integrations.transformers import PrefixCache
    from transformers_models import greedy, make_model, prompt

    model, ids = make_model(kind).cuda(), prompt(40).cuda()
    expected = greedy(model, {"input_ids": ids})
    with PrefixCache(model, f"disk:{tmp_path}?bytes=64MiB&free=0", host_bytes="8MiB", block_tokens=4) as prefix:
        assert torch.equal(prefix.generate(ids, max_new_tokens=8, do_sample=False), expected)
        cache = prefix.begin(ids)
        assert cache.hit_tokens == (36,)
        assert torch.equal(greedy(model, {"input_ids": ids}, past_key_values=cache), expected)
        static = prefix.begin(ids, max_length=48)
        assert torch.equal(greedy(model, {"input_ids": ids}, past_key_values=static, disable_compile=True), expected)
