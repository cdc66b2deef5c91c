"""Chains built from torch tensors. These tests are not in tests/pure because they need torch."""

import numpy as np
import pytest
import torch

from kvtier.errors import KvtierError
from kvtier.index import Chain, Namespace

NAMESPACE = Namespace("m", block_tokens=4)
IDS = [0, 1, 2, 32_000, 7, 7, 99, 5, 3]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32])
def test_chain_from_tensor_has_same_keys_as_chain_from_list(dtype):
    tensor = torch.tensor(IDS, dtype=dtype)
    chain = Chain(NAMESPACE, tensor)
    assert chain.keys() == Chain(NAMESPACE, IDS).keys()
    grown = Chain(NAMESPACE, tensor[:3])
    grown.append(tensor[3:])
    assert grown.keys() == chain.keys()


def test_chain_from_strided_tensor_has_keys_of_its_elements():
    tensor = torch.tensor(np.repeat(IDS, 2))
    assert Chain(NAMESPACE, tensor[::2]).keys() == Chain(NAMESPACE, IDS).keys()


def test_chain_copies_tensor():
    tensor = torch.tensor(IDS, dtype=torch.int32)
    chain = Chain(NAMESPACE, tensor)
    tensor.zero_()
    assert chain.tokens.tolist() == IDS


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 2, dtype=torch.int32), torch.tensor(3), torch.ones(3), torch.tensor([1, -1])]
)
def test_chain_from_invalid_tensor_raises(wrong):
    with pytest.raises(KvtierError):
        Chain(NAMESPACE, wrong)
