"""Settings for every test process and for the processes that tests start."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Disable the default deadline of 200 ms per example, because a busy machine may miss it.
settings.register_profile("kvtier", deadline=None)
settings.load_profile("kvtier")

# Several test processes share the cores, and the threads of torch spin while they wait for each other. While another
# process was busy, a batch of tiny matrices took 8 s of CPU time with one thread and 88 s with two threads (2 cores,
# 2026-11-16).
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama with 2 layers and a byte tokenizer."""
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


# Folders whose fixtures take seconds to create in each test process, for example servers and models.
SLOW_FOLDERS = ("server", "cpu/engine", "stores")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of each slow folder together, so that few processes have to create the fixtures of a folder.

    Each process starts with a contiguous range of the list. The order within a folder stays random.
    """
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(tests).as_posix()
        return next((at for at, folder in enumerate(SLOW_FOLDERS) if path.startswith(f"{folder}/")), len(SLOW_FOLDERS))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection. Many tests call gc.collect, which is slow with torch."""
    gc.collect()
    gc.freeze()
