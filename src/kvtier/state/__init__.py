"""Rows that follow their sequences from batch to batch: Permutation, State with warp and append, RowMap."""

from kvtier.state.permutation import Permutation, Runs
from kvtier.state.state import RowMap, State
from kvtier.state.warp import CopyNow, CopyTable, append, warp, warp_ragged

__all__ = ["CopyNow", "CopyTable", "Permutation", "RowMap", "Runs", "State", "append", "warp", "warp_ragged"]
