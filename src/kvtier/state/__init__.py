"""Per-sequence data that follows the row order of each batch: Permutation, State, warp, append and RowMap."""

from kvtier.state.permutation import Permutation
from kvtier.state.state import RowMap, State
from kvtier.state.warp import append, warp, warp_ragged

__all__ = ["Permutation", "RowMap", "State", "append", "warp", "warp_ragged"]
