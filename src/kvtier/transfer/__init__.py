"""Moving blocks between the device cache and host memory, at the link's limit and beside the model."""

from kvtier.transfer.checksums import block_checksums, verify_blocks
from kvtier.transfer.compiled import CompiledTransfer
from kvtier.transfer.device_cache import DeviceCache
from kvtier.transfer.handle import BlockFailure, Status, Transfer, TransferReport
from kvtier.transfer.host_memory import Growth, HostMemory
from kvtier.transfer.layers import LayerDoneCounter
from kvtier.transfer.manager import TransferManager
from kvtier.transfer.plane import Direction, Plane
from kvtier.transfer.strategy import Strategy, TransferConfig
from kvtier.transfer.swap import (
    swap_cache_all_layers,
    swap_cache_all_layers_async,
    swap_cache_per_layer,
    swap_cache_per_layer_async,
)

__all__ = [
    "BlockFailure",
    "CompiledTransfer",
    "DeviceCache",
    "Direction",
    "Growth",
    "HostMemory",
    "LayerDoneCounter",
    "Plane",
    "Status",
    "Strategy",
    "Transfer",
    "TransferConfig",
    "TransferManager",
    "TransferReport",
    "block_checksums",
    "swap_cache_all_layers",
    "swap_cache_all_layers_async",
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
    "verify_blocks",
]
