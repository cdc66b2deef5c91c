"""Bindings for the CPU kernels in native.c. If they are not available, CpuOps uses torch."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import ArgumentError, UnavailableError
from kvtier.native_code import X86_VARIANTS, Native, NativeSource, features, load, vendor

MAX_TOKENS = 16
"""On every type of processor, `EngineNative.linear` is faster than torch for up to this number of tokens."""
_LANES, _BLOCK = 16, 32  # 16 rows per tile of a packed matrix; 32 elements per block of a quantised row
# The result of a token must not depend on the batch size. -ffast-math is not used, because it could reorder sums.
# Without avoid-fma-max-bits=0, gcc 13 does not fuse multiply and add in some loops on some processors.
_FLAGS = (
    *("-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    "--param=avoid-fma-max-bits=0",
)
_HEADERS = tuple(f"native_{part}.h" for part in ("threads", "product", "amx", "integer", "chunk", "draw"))
SOURCE = NativeSource("kvtier.engine", ("native.c", *_HEADERS), _FLAGS, ("-march=native",), X86_VARIANTS)
_VARIANT_OF = {"avx2": "v3", "avx2_vnni": "v3-vnni", "avx512": "v4", "avx512_vnni": "v4-vnni", "amx": "amx"}
ISAS = tuple(_VARIANT_OF)
"""Instruction sets that have kernels of their own: the values of KVTIER_CPU_ISA."""
_KINDS = {"Q4_1": 0, "Q8_0": 1, "BF16": 2, "Q4 integer": 3, "Q8 integer": 4}
SAMPLING_ROW = np.dtype([("temperature", "f4"), ("min_p", "f4"), ("top_p", "f8"), ("uniform", "f8")])
"""Sampling parameters of one row of logits, with the layout of the struct in native_draw.h."""
PACKED_KINDS = frozenset(("Q4_0", "Q4_1", "Q8_0", "BF16"))
"""GGUF names of the stored types that `pack` accepts."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantised or BF16 matrix, with its elements reordered for `EngineNative.linear`."""

    kind: str
    data: Tensor
    rows: int
    columns: int

    @property
    def is_integer(self) -> bool:
        """True if products with this matrix round their input."""
        return self.kind.endswith("integer")


class EngineNative:
    """The compiled functions. They release the GIL and use as many threads as torch (see native_threads.h)."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, number, real, threads = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int

        def function(name: str, *types: Any, returns: Any = None) -> Any:
            function = library[f"kvtier_{name}"]
            function.argtypes, function.restype = types, returns
            return function

        self._product = function("product", ctypes.c_int, *[pointer] * 4, *[number] * 3, threads)
        self._attend = function("attend", *[pointer] * 7, real, threads)
        self._attend_chunk = function("attend_chunk", *[pointer] * 6, real, threads)
        self._chunk_scratch = function("chunk_scratch", number, number, returns=number)
        self._norm = function("norm", *[pointer] * 4, number, number, real, threads)
        self._gate = function("gate", pointer, pointer, number, number, threads)
        self._rotate = function("rotate", *[pointer] * 6, threads)
        self._draw = function("draw", *[pointer] * 4, number, number, threads)
        lanes = function("lanes", returns=ctypes.c_int)()
        self.has_fast_long_inputs = lanes == 16 and vendor() == "AuthenticAMD"  # 16: AVX-512
        """True if products and attention are faster than those of torch for any number of tokens.

        On processors of AMD, torch uses MKL without AVX-512, and takes about twice the time of these kernels with
        AVX-512. With AVX2, the products are not faster: 108 GFLOP/s per core, in torch 107 to 116 (EPYC, family 26,
        measured on 2026-11-19).
        """
        openmp = _openmp_of_torch()
        if openmp is not None:
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            function("threads", *[pointer] * 3)(*(ctypes.cast(getattr(openmp, name), pointer) for name in names))

    def is_faster(self, count: int, weight: PackedWeight) -> bool:
        """True if `linear` is faster than torch for `count` tokens."""
        return count <= MAX_TOKENS or (self.has_fast_long_inputs and not weight.is_integer)

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Return x @ weight.T. x is float32."""
        count, x = x.shape[0], x.contiguous()
        padded = 1 << (count - 1).bit_length() if count <= MAX_TOKENS else -(-count // MAX_TOKENS) * MAX_TOKENS
        scratch, out = x.new_empty(2 * padded * weight.columns), x.new_empty(padded, weight.rows)
        self._product(
            *(_KINDS[weight.kind], weight.data.data_ptr(), x.data_ptr(), scratch.data_ptr(), out.data_ptr()),
            *(weight.rows, weight.columns, count, torch.get_num_threads()),
        )
        return out if count == padded else out[:count]

    def attend(self, q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Compute attention for q [sequences, heads, dim] over cache [blocks, 2, tokens, kv_heads, dim]."""
        sequences, heads, dim = q.shape
        threads = torch.get_num_threads()
        longest = -(-longest // _LANES) * _LANES
        out, scratch = q.new_empty(sequences, heads, dim), q.new_empty(threads * heads * longest)
        sizes = _longs(sequences, q.stride(0), heads, cache.shape[3], dim, tables.stride(0), *_layout(cache), longest)
        self._attend(*_addresses(q, cache, tables, lengths, out, scratch), sizes, dim**-0.5, threads)
        return out

    def attend_chunk(self, q: Tensor, cache: Tensor, table: Tensor, context: int, out: Tensor) -> None:
        """Compute attention for the last tokens of a sequence, q [tokens, heads, dim], over its `context` tokens."""
        count, heads, dim = q.shape
        kv_heads, threads = cache.shape[3], torch.get_num_threads()
        scratch = q.new_empty(threads * self._chunk_scratch(dim, heads // kv_heads))
        sizes = _longs(count, context, q.stride(0), heads, kv_heads, dim, *_layout(cache))
        self._attend_chunk(*_addresses(q, cache, table, out, scratch), sizes, dim**-0.5, threads)

    def norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x, if given, to residual in place. Return the RMS norm of residual. Row length % 16 must be 0."""
        out = torch.empty_like(residual)
        self._norm(*_addresses(x, residual, weight, out), *residual.shape, eps, torch.get_num_threads())
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(left half) * right half. The length of each half must be a multiple of 16."""
        tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, dim)
        self._gate(*_addresses(gate_up, out), tokens, dim, torch.get_num_threads())
        return out

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Rotate q and k in place and store k and v. qkv: [tokens, heads + 2 kv_heads, dim], dim % 32 == 0."""
        kv_heads, dim = cache.shape[3:]
        sizes = _longs(qkv.shape[0], qkv.shape[1] - 2 * kv_heads, kv_heads, dim, *_layout(cache))
        self._rotate(*_addresses(qkv, cos, sin, cache, slots), sizes, torch.get_num_threads())

    def draw(self, logits: Tensor, params: np.ndarray[Any, Any]) -> Tensor:
        """Sample one token per row of logits, or -1 if no token of the row can be sampled. Overwrite the logits.

        `params` is an array of dtype SAMPLING_ROW, with one element per row.
        """
        rows, vocab = logits.shape
        chosen = torch.empty(rows, dtype=torch.int64)
        heaps = torch.empty(rows if (params["top_p"] < 1).any() else 0, vocab, dtype=torch.int64)
        threads = torch.get_num_threads()
        self._draw(*_addresses(logits, heaps), params.ctypes.data, chosen.data_ptr(), rows, vocab, threads)
        return chosen

    @staticmethod
    def takes(x: Tensor, multiple: int = _LANES) -> bool:
        """True if x is supported: contiguous, float32, and with a row length that is divisible by `multiple`."""
        return x.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] % multiple == 0


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if each is None else each.data_ptr() for each in tensors]


def _layout(cache: Tensor) -> tuple[int, int, int, int]:
    """Return the number of tokens of a block, the strides of blocks and tokens, and the offset of the values."""
    block_stride, v_offset, token_stride = cache.stride()[:3]
    return cache.shape[2], block_stride, token_stride, v_offset


def _longs(*numbers: int) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * len(numbers))(*numbers)


def pack(kind: str, rows: Tensor, *, integer: bool = False) -> PackedWeight | None:
    """Reorder a stored matrix (weights.RawMatrix) for `linear`. Return None if no native code supports the matrix.

    With `integer`, products with a quantised matrix round their input and use integer instructions.
    """
    if kind not in PACKED_KINDS or native().code is None:
        return None
    columns = rows.shape[1] if kind == "BF16" else rows.shape[1] // _BLOCK_BYTES[kind] * _BLOCK
    if rows.shape[0] % _LANES or columns % _BLOCK:
        return None
    if kind == "BF16":
        return PackedWeight(kind, rows.view(-1, _LANES, columns).transpose(1, 2).contiguous(), len(rows), columns)
    raw = rows.numpy().reshape(-1, _LANES, columns // _BLOCK, _BLOCK_BYTES[kind])
    factors, elements = _split_blocks(kind, raw)
    if integer:
        elements = elements.reshape(*elements.shape[:3], -1, 4).transpose(0, 2, 3, 1, 4)  # see native_integer.h
        kind = "Q8 integer" if kind == "Q8_0" else "Q4 integer"
    else:
        elements = elements.transpose(0, 2, 3, 1)
        kind = "Q8_0" if kind == "Q8_0" else "Q4_1"
    data = np.concatenate([each.reshape(*each.shape[:2], -1) for each in (factors, elements)], axis=2)
    return PackedWeight(kind, torch.from_numpy(data), len(rows), columns)


_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_U8 = np.ndarray[Any, np.dtype[np.uint8]]


def _split_blocks(kind: str, raw: _U8) -> tuple[_U8, _U8]:
    """Split blocks [tiles, lanes, blocks, bytes] into factors and elements.

    Return the factors as the bytes of a float32 array [tiles, blocks, factors, lanes]. Keep the order of the elements.

    Q4_0   18 bytes: factor d, 16 bytes of nibbles q. (q - 8) * d is stored as Q4_1 with m = -8 * d, which is exact.
    Q4_1   20 bytes: factors d and m, 16 bytes of nibbles
    Q8_0   34 bytes: factor d, 32 bytes of elements
    """
    num_factors = 2 if kind == "Q4_1" else 1
    factors = np.ascontiguousarray(raw[..., : 2 * num_factors]).view(np.float16).astype(np.float32)
    if kind == "Q4_0":
        factors = np.concatenate((factors, -8 * factors), axis=-1)
    return np.ascontiguousarray(factors.transpose(0, 2, 3, 1)).view(np.uint8), raw[..., 2 * num_factors :]


@functools.cache  # compile and load once per process
def native() -> Native[EngineNative]:
    """Return the kernels for this processor, or the kernels that KVTIER_CPU_ISA names.

    Raise ArgumentError if KVTIER_CPU_ISA is unknown, and UnavailableError if the named kernels cannot run here.
    """
    isa = os.environ.get("KVTIER_CPU_ISA")
    if not isa:
        return load(SOURCE, EngineNative)
    if isa not in _VARIANT_OF:
        raise ArgumentError(f"KVTIER_CPU_ISA is {isa!r}; use {', '.join(_VARIANT_OF)}, or unset it")
    if missing := missing_features(isa):
        raise UnavailableError(
            f"KVTIER_CPU_ISA={isa} needs a processor with {', '.join(sorted(missing))}; unset it to use the best "
            "kernels of this processor"
        )
    found = load(SOURCE, EngineNative, _VARIANT_OF[isa])
    if found.code is None:
        raise UnavailableError(f"there are no kernels for KVTIER_CPU_ISA={isa}: {found.reason}")
    return found


def missing_features(isa: str) -> frozenset[str]:
    """Return the features that the kernels of an instruction set need and this processor lacks."""
    [variant] = (each for each in X86_VARIANTS if each.name == _VARIANT_OF[isa])
    return variant.needs - features()


def _openmp_of_torch() -> ctypes.CDLL | None:
    """Return the OpenMP runtime of torch. A second runtime would start a second set of threads on the same cores."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "/lib" in line} if maps.exists() else set()
    for path in sorted(paths):
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            library = ctypes.CDLL(path)
            if hasattr(library, "GOMP_parallel"):
                return library
    return None
