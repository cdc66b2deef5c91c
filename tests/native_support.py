"""Prebuilt native libraries for tests. They are compiled once per version of the sources."""

from __future__ import annotations

import argparse
import fcntl
import shutil
from pathlib import Path

import pytest

from kvtier.cli.native import build_native
from kvtier.files import cache_dir


def prebuilt_folder() -> Path:
    """Return a folder with all variants of all libraries. Skip the test if there is no compiler."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("this machine has no C compiler")
    folder = cache_dir().resolve() / "prebuilt-for-tests"
    folder.mkdir(mode=0o755, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of pytest-xdist share the folder
        assert build_native(argparse.Namespace(folder=str(folder), json=True)) == 0
    return folder
