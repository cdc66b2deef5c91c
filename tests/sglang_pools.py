"""Host pools for tests of the SGLang backend: SGLang's own pools and a small replacement.

SGLang cannot be installed here, because it needs CUDA packages. Its storage interface, file and simulation backends,
host pools and cache controller need only torch. These modules are loaded from SGLang's `python` folder, whose path is
in the environment variable KVTIER_SGLANG. Stubs replace all other modules of SGLang.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

SNAPSHOT = os.environ.get("KVTIER_SGLANG", "")
REAL = (
    "sglang.srt.environ",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.storage",
)
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class _StubModule(types.ModuleType):
    """A module that creates missing attributes: classes for capitalised names, otherwise functions that return False.

    Names that begin with two underscores raise AttributeError.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (), {}) if name[0].isupper() else (lambda *_, **__: False)
        setattr(self, name, made)
        return made


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules in REAL from the folder SNAPSHOT, and replaces all other modules of SGLang by stubs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name.split(".")[0] != "sglang":
            return None
        base = Path(SNAPSHOT).joinpath(*name.split("."))
        if any(name == real or name.startswith(f"{real}.") for real in REAL):
            is_package = base.is_dir()
            file = base / "__init__.py" if is_package else base.with_suffix(".py")
            return importlib.util.spec_from_file_location(
                name, file, submodule_search_locations=[str(base)] if is_package else None
            )
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(base)]
        return spec

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load_sglang() -> None:
    """Make SGLang's modules importable. Set the host memory that SGLang leaves free, 10 GiB by default, to 0."""
    if not any(isinstance(finder, _Loader) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Loader())
        importlib.import_module("sglang.srt.mem_cache.pool_host.base").HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def make_pool(layout: str, *, is_mla: bool = False, num_pages: int = 12, page_size: int = 4, **options: Any) -> Any:
    """Return one of SGLang's host pools on the CPU. Its device pool is a stub with sizes but without memory."""
    dtype = options.pop("dtype", torch.float16)
    shape = {"layer_num": 3, "start_layer": 0, "end_layer": 3, "device": "cpu", "store_dtype": dtype}
    shape |= {"layer_shard_enabled": False, **options}
    size = (num_pages - 1) * page_size  # tokens in the device pool; SGLang's host pool has one page more
    if is_mla:
        module = importlib.import_module("sglang.srt.mem_cache.pool_host.mla")
        device: Any = types.SimpleNamespace(kv_lora_rank=24, qk_rope_head_dim=8, size=size, **shape)
        kind = module.MLATokenToKVPoolHost
    else:
        module = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
        device = types.SimpleNamespace(head_num=2, head_dim=8, size=size, **shape)
        kind = module.MHATokenToKVPoolHost
    pool = kind(device, 1.0, 0, page_size, layout, pin_memory=False, device="cpu")
    pool.kv_buffer.zero_()
    return pool


def make_config(extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return the HiCacheStorageConfig of a single rank."""
    module = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "model",
        "extra_config": extra,
    }
    return module.HiCacheStorageConfig(**{**values, **fields})


class PlainPool:
    """A host pool for tests without SGLang, with the attributes that kvtier reads from SGLang's pools.

    The memory has the shape [pieces, pages, bytes per piece]. By default, the pieces of a page are K and V.
    """

    def __init__(self, layout: str = "page_first", *, num_pages: int = 16, page_size: int = 4, pieces: int = 2) -> None:
        self.layout, self.page_size, self.layer_num = layout, page_size, 3
        self.start_layer, self.end_layer, self.head_num, self.head_dim, self.dtype = 0, 3, 2, 8, torch.float16
        self.kv_buffer = torch.zeros((pieces, num_pages, 400), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [int(index) // self.page_size for index in indices[:: self.page_size]]
        parts = [part[page] for page in pages for part in self.kv_buffer]
        return [part.data_ptr() for part in parts], [part.numel() for part in parts]


def indices_of(pages: list[int], page_size: int = 4) -> torch.Tensor:
    """Return the host indices of all tokens in the pages."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages] or [torch.empty(0)])


def fill(pool: Any, seed: int) -> None:
    """Fill a pool with random bytes. With the same seed, pools of the same size get the same bytes."""
    flat = pool.kv_buffer.view(torch.uint8).view(-1)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
