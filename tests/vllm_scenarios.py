"""Functions that run inside a vLLM process (Vllm.run), with checks that need vLLM's objects."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

from vllm_driver import Answer, Driver


class Ledger:
    """Compares the bytes of every loaded block with the bytes of the block when vLLM computed it.

    It identifies blocks by vLLM's own block hashes and learns of loads from the calls that vLLM makes. It uses nothing
    of kvtier. The same block may be computed several times with different rounding; every result is valid.
    """

    def __init__(self, driver: Driver) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._driver = driver
        self._computed: dict[Any, set[int]] = {}
        self._local: dict[str, int] = {}
        self._loads: dict[str, tuple[int, int]] = {}
        """Request -> first and end of the blocks that were loaded for it and not compared yet."""
        self._done: dict[str, int] = {}
        """Request -> blocks that need no more attention: local hits, loaded or recorded."""
        self._failed: set[int] = set()
        self.num_compared = 0
        driver.after_step.append(self._after_step)
        connector = driver.scheduler.connector
        self._wrap(connector, "get_num_new_matched_tokens", self._asked)
        self._wrap(connector, "update_state_after_alloc", self._allocated)
        self._wrap(connector, "request_finished", self._finished)
        worker = get_kv_transfer_group()
        errors = worker.get_block_ids_with_load_errors
        worker.get_block_ids_with_load_errors = lambda: self._note_failed(errors())

    @staticmethod
    def _wrap(target: Any, name: str, before: Any) -> None:
        inner = getattr(target, name)

        def outer(*args: Any) -> Any:
            before(*args)
            return inner(*args)

        setattr(target, name, outer)

    def _note_failed(self, blocks: set[int]) -> set[int]:
        self._failed |= blocks
        return blocks

    @property
    def _block_tokens(self) -> int:
        return self._driver.scheduler.block_size

    def _asked(self, request: Any, num_computed_tokens: int) -> None:
        name = request.request_id
        self._local[name] = self._done[name] = num_computed_tokens // self._block_tokens
        self._loads.pop(name, None)

    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        del blocks
        if num_external_tokens:
            first = self._local[request.request_id]
            stop = first + num_external_tokens // self._block_tokens
            self._loads[request.request_id] = first, stop
            self._done[request.request_id] = stop

    def _finished(self, request: Any, block_ids: Sequence[int]) -> None:
        if request.num_output_tokens:
            self._look(request, list(block_ids))
        for kept in (self._local, self._loads, self._done):
            kept.pop(request.request_id, None)

    def _after_step(self) -> None:
        manager = self._driver.scheduler.kv_cache_manager
        for request in self._driver.scheduler.running:
            self._look(request, manager.get_block_ids(request.request_id)[0])

    def _look(self, request: Any, table: Sequence[int]) -> None:
        name = request.request_id
        num_full = min(request.num_computed_tokens, request.num_tokens) // self._block_tokens
        first, stop = self._loads.pop(name, (0, 0))
        for block in range(first, stop):
            if table[block] in self._failed:  # computed again from here
                self._failed.difference_update(table[first:stop])
                self._done[name] = block
                break
            checksum, valid = self._checksum(table[block]), self._computed.get(request.block_hashes[block], set())
            assert checksum in valid, f"block {block} of {name} has bytes that were never computed for its tokens"
            self.num_compared += 1
        for block in range(self._done.get(name, 0), num_full):
            self._computed.setdefault(request.block_hashes[block], set()).add(self._checksum(table[block]))
        self._done[name] = max(self._done.get(name, 0), num_full)

    def _checksum(self, block: int) -> int:
        checksum = 0
        for cache in self._driver.caches:
            checksum = zlib.crc32(cache[block].contiguous().numpy().tobytes(), checksum)
        return checksum


def start_ledger(driver: Driver) -> None:
    driver.kept["ledger"] = Ledger(driver)


def num_compared(driver: Driver) -> int:
    """Return the number of loaded blocks whose bytes were compared."""
    return driver.kept["ledger"].num_compared


POISON = 1e30
"""Not NaN: vLLM's attention on CPUs multiplies the values behind the end of a sequence by 0, which keeps NaN."""


def poison_free_blocks(driver: Driver) -> None:
    """Fill a device block with POISON when its content is given up.

    That is when it is freed without being in vLLM's prefix cache, or given to another request. A save that reads a
    block without a reference then saves POISON, and a request that runs before its load has arrived reads POISON.
    """
    pool = driver.pool
    free, get = pool.free_blocks, pool.get_new_blocks

    def fill(blocks: Sequence[Any]) -> None:
        for block in blocks:
            for cache in driver.caches:
                cache[block.block_id].fill_(POISON)

    def free_blocks(blocks: Any) -> None:
        given = list(blocks)
        free(given)
        fill([each for each in given if each.ref_cnt == 0 and not each.is_null and each.block_hash is None])

    def get_new_blocks(*args: Any, **options: Any) -> Any:
        found = get(*args, **options)
        fill(found)
        return found

    pool.free_blocks, pool.get_new_blocks = free_blocks, get_new_blocks


def conversations(driver: Driver, prompts: Sequence[Sequence[int]], seed: int, **options: Any) -> dict[int, Answer]:
    """Answer prompts that arrive at random moments, up to 6 at a time."""
    draws, names, left = random.Random(seed), {}, list(enumerate(prompts))
    while left or driver.waiting:
        while left and len(driver.waiting) < 6 and draws.random() < 0.7:
            number, prompt = left.pop(0)
            names[number] = driver.add(prompt, **options)
        if driver.waiting:
            driver.step()
    driver.finish()
    return {number: driver.answers.pop(name) for number, name in names.items()}


def check_idle(driver: Driver) -> None:
    """Raise AssertionError if a finished engine still holds requests, device blocks or blocks of the connector."""
    driver.finish()
    assert not driver.scheduler.requests, f"requests are left: {list(driver.scheduler.requests)}"
    used = {each.block_id: each.ref_cnt for each in driver.pool.blocks if each.ref_cnt and not each.is_null}
    assert not used, f"device blocks are still in use: {used}"


def overwrite_cached_block(driver: Driver, target: int, source: int) -> None:
    """Replace the KV of one of the device blocks in vLLM's prefix cache by the KV of another."""
    cached = [each.block_id for each in driver.pool.blocks if each.block_hash is not None]
    for cache in driver.caches:
        cache[cached[target]] = cache[cached[source]]
