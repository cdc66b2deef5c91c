"""The ancestor's way of swapping blocks, as a column of benchmarks/transfer_gpu.py.

For each layer and tensor, it calls one memcpy per run of adjacent blocks, and a kernel for all other blocks. In the
kernel, one warp copies one block over the link, with 8 bytes per thread and step. This code was written from its
description. The ids are uploaded before the clock starts, which favours it.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch

from kvtier.layout import CacheGroup
from kvtier.memory import Buffer, Stream, cuda
from kvtier.transfer import DeviceCache
from kvtier.transfer.block_view import Direction

_SOURCE = b"""
struct Arguments {
    const char *src; char *dst; const long long *src_ids; const long long *dst_ids;
    long long src_stride, dst_stride, nbytes, count;
};
extern "C" __global__ void swap(Arguments a) {
    const long long warp = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (warp >= a.count) return;
    const char *from = a.src + a.src_ids[warp] * a.src_stride;
    char *to = a.dst + a.dst_ids[warp] * a.dst_stride;
    for (long long j = lane; j < a.nbytes / 8; j += 32) {
        unsigned long long word;
        asm volatile("ld.global.nc.b64 %0,[%1];" : "=l"(word) : "l"(from + 8 * j) : "memory");
        asm volatile("st.global.cg.b64 [%0],%1;" ::"l"(to + 8 * j), "l"(word) : "memory");
    }
}
"""


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("src", "dst", "src_ids", "dst_ids")),
        *((name, ctypes.c_longlong) for name in ("src_stride", "dst_stride", "nbytes", "count")),
    ]


class AncestorSwap:
    """A prepared transfer of scattered blocks of every cache segment; host memory is layer-first."""

    def __init__(
        self, group: CacheGroup, cache: DeviceCache, device_ids: np.ndarray, host: Buffer, direction: Direction
    ) -> None:
        """`host` is pinned memory for one block more than are moved."""
        segments = cache.part(range(group.num_layers))
        count = len(device_ids)
        slots = count + 1
        assert host.nbytes >= group.block_bytes * slots
        on_host = np.random.default_rng(0).permutation(slots)[:count]
        ids = {"device": torch.from_numpy(device_ids.copy()).cuda(), "host": torch.from_numpy(on_host.copy()).cuda()}
        self._keep = list(ids.values())
        self._arguments = []
        at = host.data()
        for pointer, stride, nbytes in zip(segments.pointer, segments.stride, segments.nbytes, strict=True):
            near, far = (int(pointer), ids["device"], int(stride)), (at, ids["host"], int(nbytes))
            src, dst = (near, far) if direction is Direction.D2H else (far, near)
            self._arguments.append(
                _Arguments(src[0], dst[0], src[1].data_ptr(), dst[1].data_ptr(), src[2], dst[2], int(nbytes), count)
            )
            at += int(nbytes) * slots
        self._count = count
        self._function = _function()
        torch.cuda.synchronize()

    def run(self, stream: Stream) -> None:
        for arguments in self._arguments:
            cuda.launch_kernel(self._function, -(-self._count // 4), 128, ctypes.addressof(arguments), stream)


@functools.cache
def _function() -> int:
    from cuda.bindings import driver, nvrtc

    _, program = nvrtc.nvrtcCreateProgram(_SOURCE, b"swap.cu", 0, [], [])
    major, minor = torch.cuda.get_device_capability()
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()])
    assert int(status) == 0, "the ancestor's kernel does not compile"
    binary = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, binary)
    module = cuda.unwrap(driver.cuModuleLoadData(binary))
    return int(cuda.unwrap(driver.cuModuleGetFunction(module, b"swap")))
