"""Keys of blocks: their definition in docs/keys.md, token containers, media items, and equality across processes."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from array import array
from itertools import combinations, permutations
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from index_model import block_contents, key_of, namespace_bytes, root_key
from kvtier.errors import ArgumentError, DTypeError, KvtierError, RangeError
from kvtier.index import Chain, MediaItem, Namespace
from kvtier.messages import KEY_BYTES

DOCS = Path(__file__).parents[3] / "docs" / "keys.md"
FIELDS = ("model", "revision", "dtype", "layout", "block_tokens")
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
ITEMS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.binary(min_size=1, max_size=9)), max_size=4)


def plain_keys(namespace: Namespace, tokens, salt=b"", adapter=b"", media=()) -> bytes:
    """Compute the keys block by block from the definition in docs/keys.md."""
    above = root_key(namespace_bytes(*(getattr(namespace, name) for name in FIELDS)), salt, adapter)
    keys = []
    for content in block_contents(tokens, media, namespace.block_tokens):
        above = key_of(above, content)
        keys.append(above)
    return b"".join(keys)


def chain_keys(tokens, media=(), block_tokens: int = 4, **options) -> list[bytes]:
    chain = Chain(Namespace("m", block_tokens=block_tokens), tokens, media=[MediaItem(*m) for m in media], **options)
    keys = chain.keys()
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


@given(TOKENS, ITEMS, st.binary(max_size=3), st.binary(max_size=3), st.integers(1, 9))
def test_keys_equal_definition(tokens, media, salt, adapter, block_tokens):
    namespace = Namespace("model", "rev", "bf16", "4x8x128", block_tokens)
    chain = Chain(namespace, tokens, salt=salt, adapter=adapter, media=[MediaItem(*item) for item in media])
    assert chain.keys() == plain_keys(namespace, tokens, salt, adapter, media)
    assert len(chain.keys()) == KEY_BYTES * (len(tokens) // block_tokens)


@given(st.lists(TOKENS, max_size=6), ITEMS, st.data())
def test_append_yields_same_keys_as_chain_of_all_tokens(parts, media, data):
    items = [MediaItem(*item) for item in media]
    chain = Chain(Namespace("m", block_tokens=3), parts[0] if parts else (), media=items)
    for part in parts[1:]:
        if data.draw(st.booleans()):
            chain.keys(data.draw(st.integers(0, chain.num_blocks)))
        chain.append(part)
    whole = Chain(Namespace("m", block_tokens=3), [token for part in parts for token in part], media=items)
    assert chain.num_tokens == whole.num_tokens
    assert chain.num_blocks == whole.num_blocks
    assert chain.tokens.tolist() == whole.tokens.tolist()
    assert chain.keys() == whole.keys()
    assert chain.keys(chain.num_blocks // 2) == whole.keys()[: chain.num_blocks // 2 * KEY_BYTES]


def test_keys_of_more_blocks_than_chain_has_raises():
    with pytest.raises(RangeError, match="keys of 3 blocks; the chain has 2"):
        Chain(Namespace("m", block_tokens=2), [1, 2, 3, 4, 5]).keys(3)


# ---- token containers ----

CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "numpy default": np.array,
    "array i": lambda ids: array("i", ids),
    "array q": lambda ids: array("q", ids),
    "array H": lambda ids: array("H", ids),
    "list of numpy integers": lambda ids: [np.int64(token) for token in ids],
    "array with stride 2": lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
    "read-only array": lambda ids: np.frombuffer(np.array(ids, np.int32).tobytes(), np.int32),
    "memoryview": lambda ids: memoryview(array("i", ids)),
    **{
        dtype: lambda ids, dtype=dtype: np.array(ids, dtype)
        for dtype in ("int16", "int32", "int64", "uint16", "uint32", "uint64", ">i4", ">u2")
    },
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_keys_do_not_depend_on_token_container(container):
    ids = [0, 1, 2, 32_000, 7, 7, 99, 5, 3]
    namespace = Namespace("m", block_tokens=4)
    chain = Chain(namespace, CONTAINERS[container](ids))
    assert chain.tokens.tolist() == ids
    assert chain.keys() == plain_keys(namespace, ids)
    grown = Chain(namespace)
    grown.append(CONTAINERS[container](ids[:5]))
    grown.append(CONTAINERS[container](ids[5:]))
    assert grown.keys() == chain.keys()


@pytest.mark.parametrize("empty", [[], (), array("i"), np.empty(0, np.int32), np.empty(0)])
def test_empty_chain_has_no_keys(empty):
    assert Chain(Namespace("m"), empty).keys() == b""


def test_chain_copies_the_token_array():
    ids = np.arange(8, dtype=np.int32)
    chain = Chain(Namespace("m", block_tokens=4), ids)
    ids[:] = 0
    assert chain.tokens.tolist() == list(range(8))


@pytest.mark.parametrize("dtype", [list, tuple, np.int64, np.uint64])
@pytest.mark.parametrize("wrong", [2**31, 2**32, 2**40])
def test_token_too_large_raises(dtype, wrong):
    tokens = dtype([1, wrong, 3]) if dtype in (list, tuple) else np.array([1, wrong, 3], dtype)
    with pytest.raises(RangeError, match=str(wrong)):
        Chain(Namespace("m"), tokens)


@pytest.mark.parametrize("dtype", [list, tuple, np.int8, np.int32, np.int64])
@pytest.mark.parametrize("wrong", [-1, -100])
def test_negative_token_raises(dtype, wrong):
    tokens = dtype([1, wrong, 3]) if dtype in (list, tuple) else np.array([1, wrong, 3], dtype)
    with pytest.raises(RangeError, match=str(wrong)):
        Chain(Namespace("m"), tokens)


@pytest.mark.parametrize(
    "wrong", [[1.0], [1, 2.5], ["1"], [None], np.array([1.0]), np.array([True]), np.array(["a"]), [[1, 2]]]
)
def test_non_integer_tokens_raise(wrong):
    with pytest.raises(DTypeError, match="whole numbers"):
        Chain(Namespace("m"), wrong)


@pytest.mark.parametrize("wrong", [np.zeros((2, 2), np.int32), np.int32(3), 3, "abc", b"abc", {1, 2}])
def test_tokens_of_wrong_dimension_raise(wrong):
    with pytest.raises(ArgumentError, match="one dimension"):
        Chain(Namespace("m"), wrong)


def test_failed_append_does_not_change_chain():
    chain = Chain(Namespace("m", block_tokens=2), [1, 2, 3])
    for wrong in ([-1], [2**31], [1.5], np.zeros((1, 1), np.int32)):
        with pytest.raises(KvtierError):
            chain.append(wrong)
    assert chain.tokens.tolist() == [1, 2, 3]


# ---- inputs of a key ----


def test_every_namespace_field_changes_keys():
    fields = {"model": "m", "revision": "r", "dtype": "d", "layout": "l", "block_tokens": 2}
    others = {"model": "m2", "revision": "r2", "dtype": "d2", "layout": "l2", "block_tokens": 1}
    namespaces = [Namespace(**fields)] + [Namespace(**{**fields, name: other}) for name, other in others.items()]
    keys = [Chain(namespace, [1, 2]).keys(1) for namespace in namespaces]
    assert len(set(keys)) == len(keys)


def test_namespace_field_boundaries_change_keys():
    """The same characters yield different keys if they are split differently between fields."""
    namespaces = [
        Namespace("ab", "c"),
        Namespace("a", "bc"),
        Namespace("abc"),
        Namespace("", "abc"),
        Namespace("", "", "abc"),
    ]
    domains = [(b"", b""), (b"ab", b""), (b"a", b"b"), (b"", b"ab")]
    roots = {namespace.root_key(*domain) for namespace in namespaces for domain in domains}
    assert len(roots) == len(namespaces) * len(domains)


def test_salt_and_adapter_change_every_key():
    plain, *others = (chain_keys(range(12), salt=s, adapter=a) for s, a in [(b"", b""), (b"x", b""), (b"", b"x")])
    for other in others:
        assert not set(plain) & set(other)
    assert not set(others[0]) & set(others[1])


def test_token_changes_key_of_its_block_and_all_later_keys():
    first, second = chain_keys([1] * 16), chain_keys([1] * 9 + [2] + [1] * 6)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]


def test_equal_blocks_at_different_positions_have_different_keys():
    assert len(set(chain_keys([1] * 40))) == 10


@pytest.mark.parametrize("block_tokens", [0, -1])
def test_block_tokens_below_one_raises(block_tokens):
    with pytest.raises(RangeError, match=f"block_tokens={block_tokens}"):
        Namespace("m", block_tokens=block_tokens)


# ---- media ----

B = 4
PLAIN = chain_keys([7] * 4 * B)


@pytest.mark.parametrize(
    ("start", "num_tokens", "changed"),
    [
        (0, B, {0}),  # ends right before block 1
        (B, B, {1}),  # starts right after block 0
        (B - 1, 1, {0}),  # the last token of block 0
        (B - 1, 2, {0, 1}),  # one token in each of blocks 0 and 1
        (B, 1, {1}),
        (2 * B - 1, 1, {1}),
        (0, B + 1, {0, 1}),
        (1, 3 * B, {0, 1, 2, 3}),  # starts inside block 0 and ends inside block 3
        (B, 2 * B, {1, 2}),
        (0, 99, {0, 1, 2, 3}),  # extends past the last block
        (4 * B, 3, set()),  # starts after the last block
    ],
)
def test_media_item_changes_blocks_it_overlaps(start, num_tokens, changed):
    """Item ranges are half-open. An item also changes the keys of all later blocks."""
    chain = Chain(Namespace("m", block_tokens=B), [7] * 4 * B, media=[MediaItem(start, num_tokens, b"picture")])
    assert set(chain.extras) & set(range(4)) == changed
    keys = chain_keys([7] * 4 * B, [(start, num_tokens, b"picture")])
    first = min(changed, default=4)
    assert [a == b for a, b in zip(PLAIN, keys, strict=True)] == [i < first for i in range(4)]


def test_chain_without_media_has_no_extras():
    assert chain_keys([7] * 16, []) == PLAIN
    assert Chain(Namespace("m"), [7] * 16).extras == {}


@pytest.mark.parametrize(
    "items",
    [
        [((0, 4, b"a"),), ((0, 4, b"b"),), ((1, 4, b"a"),), ((0, 5, b"a"),), ((0, 3, b"a"),)],
        [((0, 4, b"ab"),), ((0, 2, b"a"), (2, 2, b"b")), ((0, 2, b"ab"), (2, 2, b"ab")), ((0, 2, b"b"), (2, 2, b"a"))],
        [((0, 2, b"a"), (0, 2, b"b")), ((0, 2, b"a"), (0, 2, b"a")), ((0, 2, b"a"),)],
    ],
)
def test_different_media_items_have_different_keys(items):
    keys = [chain_keys([7] * 8, media)[0] for media in items]
    for one, other in combinations(keys, 2):
        assert one != other


def test_media_item_order_does_not_matter():
    items = [(3, 4, b"x"), (0, 2, b"y"), (0, 2, b"x"), (0, 5, b"x"), (9, 1, b"z")]
    assert len({tuple(chain_keys([7] * 16, order)) for order in permutations(items)}) == 1


@pytest.mark.parametrize(("start", "num_tokens", "digest"), [(-1, 2, b"x"), (0, 0, b"x"), (0, -1, b"x"), (0, 1, b"")])
def test_invalid_media_item_raises(start, num_tokens, digest):
    with pytest.raises(ArgumentError):
        MediaItem(start, num_tokens, digest)


# ---- reproducibility ----


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_keys_are_equal_in_other_processes(seed):
    code = (
        "from kvtier.index import *\n"
        "items = [MediaItem(3, 4, b'x'), MediaItem(9, 1, b'z')]\n"
        "chain = Chain(Namespace('m', 'r', block_tokens=4), range(40), salt=b's', adapter=b'a', media=items)\n"
        "print(chain.keys().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    namespace = Namespace("m", "r", block_tokens=4)
    expected = plain_keys(namespace, list(range(40)), b"s", b"a", [(3, 4, b"x"), (9, 1, b"z")])
    assert done.stdout.strip() == expected.hex()


VECTORS = json.loads(re.search(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)[1])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_keys_match_documented_vectors(vector):
    namespace = Namespace(**vector["namespace"])
    salt, adapter = bytes.fromhex(vector["salt"]), bytes.fromhex(vector["adapter"])
    items = [(start, n, bytes.fromhex(digest)) for start, n, digest in vector["media"]]
    chain = Chain(namespace, vector["tokens"], salt=salt, adapter=adapter, media=[MediaItem(*m) for m in items])
    assert namespace.fingerprint.hex() == vector["fingerprint"]
    assert namespace.root_key(salt, adapter).hex() == vector["root"]
    keys = chain.keys()
    assert [keys[at : at + KEY_BYTES].hex() for at in range(0, len(keys), KEY_BYTES)] == vector["keys"]
    assert keys == plain_keys(namespace, vector["tokens"], salt, adapter, items)


def test_documented_key_bytes_hash_to_documented_keys():
    """Hash the bytes that docs/keys.md spells out."""
    by_hand = re.findall(r"(?:^    [0-9a-f ]+\n)+", DOCS.read_text(), re.MULTILINE)
    hashed = [hashlib.sha256(bytes.fromhex(lines)).hexdigest() for lines in by_hand]
    vector = next(vector for vector in VECTORS if vector["name"] == "one block")
    assert hashed == [vector["fingerprint"], vector["root"], vector["keys"][0]]
