"""Block transfers between the device cache and host memory, at the rate of the link, while the model runs."""

from kvtier.transfer.block_view import BlockView, Direction
from kvtier.transfer.compiled import CompiledTransfer
from kvtier.transfer.device_cache import DeviceCache
from kvtier.transfer.handle import BlockFailure, TransferHandle, TransferReport, TransferStatus
from kvtier.transfer.host_memory import GrowthState, HostMemory, block_checksums
from kvtier.transfer.layers import LayerDoneCounter
from kvtier.transfer.manager import TransferManager
from kvtier.transfer.strategy import Strategy, TransferConfig
from kvtier.transfer.swap import swap_cache_all_layers, swap_cache_per_layer, swap_cache_per_layer_async

__all__ = [
    "BlockFailure",
    "BlockView",
    "CompiledTransfer",
    "DeviceCache",
    "Direction",
    "GrowthState",
    "HostMemory",
    "LayerDoneCounter",
    "Strategy",
    "TransferConfig",
    "TransferHandle",
    "TransferManager",
    "TransferReport",
    "TransferStatus",
    "block_checksums",
    "swap_cache_all_layers",
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
]
