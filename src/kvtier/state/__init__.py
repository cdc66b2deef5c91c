"""Per-sequence data that follows the row order of each batch: Permutation, State, warp, append and RowMap."""

from kvtier.state.permutation import Permutation
from kvtier.state.state import RowMap, State
from kvtier.state.warp import Added, append, warp, warp_ragged

__all__ = ["Added", "Permutation", "RowMap", "State", "append", "warp", "warp_ragged"]
