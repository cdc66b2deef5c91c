"""GGUF files: metadata and tensors under their Hugging Face names. Dequantising is the `gguf` package's.

The header is read here, because the package's reader makes a Python object per array element: 3.5 s for the vocabulary
of SmolLM2, where this takes 0.1. Two things differ from Hugging Face: shapes are written innermost first, and files of
the llama architecture hold the rows of q and k with the halves of each head interleaved.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.engine.model_config import ModelConfig
from kvtier.engine.native import PACKED_KINDS
from kvtier.engine.weights import RawMatrix
from kvtier.errors import CheckpointError, UnavailableError

_MAGIC = b"GGUF"
# Scalars of the metadata by their number in the file; 8 is a string and 9 an array.
_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class GgufTensor(NamedTuple):
    """Where a tensor is in the file."""

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the tensors' bytes."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data_offset: int


class GgufFile:
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise UnavailableError("reading GGUF files needs the gguf package: pip install 'kvtier[engine]'") from error
        self._gguf = gguf
        self._path = path
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._header = read_header(self._map, path)
        tied = "output.weight" not in self._header.tensors
        self.config = ModelConfig.from_gguf(self._header.metadata, tied_embeddings=tied)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The key-value pairs, arrays as lists."""
        return self._header.metadata

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._header.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, outermost first."""
        return self._header.tensors[_gguf_name(name)].shape

    def raw(self, name: str) -> RawMatrix | None:
        """The quantised rows, in the order Hugging Face has them."""
        tensor = self._header.tensors[_gguf_name(name)]
        kind = self._kind(tensor).name
        if len(tensor.shape) != 2 or kind not in PACKED_KINDS:
            return None
        rows = self._stored(tensor)
        order = self._row_order(name)
        # a copy, because a mapped file is read-only memory, which torch warns about
        chosen = torch.from_numpy(rows.copy() if order is None else rows[order])
        return RawMatrix(kind, chosen.view(torch.bfloat16) if kind == "BF16" else chosen)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Dequantise into `out`."""
        tensor = self._header.tensors[_gguf_name(name)]
        stored = self._stored(tensor)
        order = self._row_order(name)
        if order is not None:
            stored = stored[order]
        kind = self._kind(tensor)
        try:
            values = self._gguf.quants.dequantize(stored, kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{name} in {self._path} is quantised as {kind.name}, which gguf cannot read"
            ) from error
        if not values.flags.writeable:
            values = values.copy()
        out.copy_(torch.from_numpy(values).view(out.shape))

    def inverse_frequencies(self, config: ModelConfig) -> torch.Tensor:
        """Those of the configuration, divided by the file's own factors (how GGUF tells llama3 scaling)."""
        base = config.rope.inverse_frequencies(config.head_dim)
        tensor = self._header.tensors.get("rope_freqs.weight")
        if tensor is None:
            return base
        return base / torch.from_numpy(self._stored(tensor).view(np.float32).reshape(-1).copy())

    def _stored(self, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes, one row per row of the tensor (a vector is one row)."""
        block_elements, block_bytes = self._gguf.GGML_QUANT_SIZES[self._kind(tensor)]
        *outer, inner = tensor.shape
        rows, row_bytes = int(np.prod(outer)), inner // block_elements * block_bytes
        begin = self._header.data_offset + tensor.offset
        if begin + rows * row_bytes > len(self._bytes):
            raise CheckpointError(
                f"{self._path} ends at byte {len(self._bytes)}, inside a tensor that ends at "
                f"{begin + rows * row_bytes}: the download is incomplete"
            )
        return self._bytes[begin : begin + rows * row_bytes].reshape(rows, row_bytes)

    def _kind(self, tensor: GgufTensor) -> Any:
        try:
            return self._gguf.GGMLQuantizationType(tensor.type)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path} has a tensor of type {tensor.type}, which this gguf package does not know; upgrade it"
            ) from error

    def _row_order(self, name: str) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Rows of q and k as Hugging Face orders them: the even ones of a head, then the odd ones."""
        if self.config.architecture != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return None
        rows = np.arange(self.shape(name)[0]).reshape(-1, self.config.head_dim // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)


def _gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return _TOP_NAMES.get(name, name)
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The key-value pairs alone; needs no package."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_header(data, path).metadata


def read_header(data: mmap.mmap | bytes, path: Path) -> GgufHeader:
    """Read metadata and the table of tensors of a GGUF file, version 2 or 3."""
    if data[:4] != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}, not {_MAGIC!r}")
    try:
        return _Reader(data).header()
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the header of {path} cannot be read ({error!r}): truncated or damaged") from error


class _Reader:
    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._at = 4

    def header(self) -> GgufHeader:
        version = self._scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"the GGUF file has version {version}; kvtier reads 2 and 3")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(num_pairs)}
        tensors = {self._string(): self._tensor() for _ in range(num_tensors)}
        alignment = metadata.get("general.alignment", 32)
        return GgufHeader(metadata, tensors, -(-self._at // alignment) * alignment)

    def _tensor(self) -> GgufTensor:
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        return GgufTensor(shape[::-1], self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        found = list(struct.unpack_from(code, self._data, self._at))
        self._at += struct.calcsize(code)
        return found

    def _scalar(self, code: str) -> Any:
        found = struct.unpack_from(f"<{code}", self._data, self._at)[0]
        self._at += struct.calcsize(f"<{code}")
        return found

    def _string(self) -> str:
        length = self._scalar("Q")
        begin, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise IndexError(f"a string of {length} bytes at {begin} passes the end")
        return self._data[begin : self._at].decode()
