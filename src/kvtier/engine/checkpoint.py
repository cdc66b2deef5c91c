"""Load a model from a Hugging Face folder or a GGUF file.

A GGUF file has its own names of tensors and stores shapes with the innermost dimension first. The gguf package
dequantizes the tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.engine.gguf_header import GgufHeader, GgufTensor
from kvtier.engine.model import Model
from kvtier.engine.model_config import ModelConfig
from kvtier.engine.native import PACKED_KINDS
from kvtier.engine.ops import Ops
from kvtier.engine.packaged import DEFAULT_MODEL, optional_package, resolve
from kvtier.engine.weights import Assembler, Products, RawMatrix, SafetensorsFolder
from kvtier.errors import ArgumentError, CheckpointError
from kvtier.memory.torch_types import AnyDType, element_type, torch_dtype


class GgufFile:
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self._gguf = optional_package("gguf", "reading GGUF files")
        self._path = path
        self._header = GgufHeader(path)
        self._bytes = np.frombuffer(self._header.data, np.uint8)
        tied = "output.weight" not in self._header.tensors
        self.config = ModelConfig.from_gguf(self._header.metadata, tied_embeddings=tied)
        architecture = self._gguf.MODEL_ARCH[self.config.architecture.upper()]
        num_layers = min(self.config.num_layers, len(self._header.tensors))  # a damaged file can state any number
        self._names = self._gguf.get_tensor_name_map(architecture, num_layers)

    def __contains__(self, name: str) -> bool:
        return self._gguf_name(name) in self._header.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def raw(self, name: str) -> RawMatrix | None:
        tensor = self._tensor(name)
        kind = self._kind(tensor).name
        if len(tensor.shape) != 2 or kind not in PACKED_KINDS:
            return None
        # a copy, because torch warns about read-only memory such as a mapped file
        rows = torch.from_numpy(self._rows(name).copy())
        return (kind, rows.view(torch.bfloat16) if kind == "BF16" else rows)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        kind = self._kind(self._tensor(name))
        try:
            values = self._gguf.quants.dequantize(self._rows(name), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{name} in {self._path} is quantized as {kind.name}, which the gguf package cannot dequantize"
            ) from error
        out.copy_(torch.from_numpy(np.require(values, requirements="W")).view(out.shape))

    def inverse_frequencies(self, config: ModelConfig) -> torch.Tensor:
        """Return the rotary frequencies, divided by the llama3 scaling factors if the file contains such factors."""
        base = config.rope.inverse_frequencies(config.head_dim)
        tensor = self._header.tensors.get("rope_freqs.weight")
        if tensor is None:
            return base
        return base / torch.from_numpy(self._stored(tensor).view(np.float32).reshape(-1).copy())

    def _gguf_name(self, name: str) -> Any:
        return self._names.get_name(name, (".weight", ".bias"))  # None if the architecture has no such tensor

    def _tensor(self, name: str) -> GgufTensor:
        return self._header.tensors[self._gguf_name(name)]

    def _stored(self, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of a tensor as [rows, bytes per row]. A vector has one row."""
        block_elements, block_bytes = self._gguf.GGML_QUANT_SIZES[self._kind(tensor)]
        *outer, inner = tensor.shape
        rows, row_bytes = int(np.prod(outer)), inner // block_elements * block_bytes
        begin = self._header.data_offset + tensor.offset
        if begin + rows * row_bytes > len(self._bytes):
            raise CheckpointError(
                f"{self._path} ends at byte {len(self._bytes)}, but one of its tensors ends at byte "
                f"{begin + rows * row_bytes}: the download is incomplete"
            )
        return self._bytes[begin : begin + rows * row_bytes].reshape(rows, row_bytes)

    def _kind(self, tensor: GgufTensor) -> Any:
        try:
            return self._gguf.GGMLQuantizationType(tensor.type)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path} has a tensor of type {tensor.type}, which the gguf package does not support; upgrade "
                "the package"
            ) from error

    def _rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the rows in Hugging Face order. GGUF files of Llama interleave the halves of each head of q and k."""
        rows = self._stored(self._tensor(name))
        if self.config.architecture != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return rows
        order = np.arange(len(rows)).reshape(-1, self.config.head_dim // 2, 2).swapaxes(1, 2)
        return rows[order.reshape(-1)]


def load_model(
    model: str | Path = DEFAULT_MODEL,
    dtype: AnyDType = "f32",
    device: str | torch.device = "cpu",
    ops: Ops | None = None,
    products: Products | str = Products.EXACT,
) -> Model:
    """Load a model onto a device. `ops` defaults to the fastest operations for the device.

    Raise ArgumentError for unknown `products`, and UnavailableError if the model cannot use integer products.
    """
    if products not in list(Products):
        raise ArgumentError(f"unknown products {products!r}; use one of {', '.join(Products)}")
    products = Products(products)
    path, kind, place = resolve(model), torch_dtype(element_type(dtype)), torch.device(device)
    if not kind.is_floating_point:
        raise CheckpointError(f"a model cannot compute in {kind}; use f32, bf16 or f16")
    source = SafetensorsFolder(path) if path.is_dir() else GgufFile(path)
    return Model(source.config, Assembler(source.config, source, kind, place, products).model(), ops)
